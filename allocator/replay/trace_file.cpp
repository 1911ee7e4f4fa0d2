#include "allocator/replay/trace_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runtime/owned_fd.hpp"

namespace terrace {
namespace {

constexpr std::size_t kMostPerCall = 1 << 20;

// zlib passes through what is not compressed.
class GzipSource final : public trace::ByteSource {
 public:
  GzipSource(gzFile file, std::string path) : file_(file), path_(std::move(path)) {}
  ~GzipSource() override { gzclose_r(file_); }
  GzipSource(const GzipSource&) = delete;
  GzipSource& operator=(const GzipSource&) = delete;

  Result<std::size_t> read(std::span<std::byte> to) override {
    const auto wanted = static_cast<unsigned>(std::min(to.size(), kMostPerCall));
    const int got = gzread(file_, to.data(), wanted);
    if (got > 0) return static_cast<std::size_t>(got);
    int code = Z_OK;
    const char* why = gzerror(file_, &code);
    if (code == Z_OK || code == Z_STREAM_END || code == Z_BUF_ERROR) return std::size_t{0};
    return Error{.code = Errc::kIo,
                 .text = path_ + ": " + (code == Z_ERRNO ? std::strerror(errno) : why) +
                         "; use a trace as recorded, or compressed with gzip"};
  }

 private:
  gzFile file_;
  std::string path_;
};

}  // namespace

Result<trace::Reader> open_trace(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    return Error{.code = Errc::kIo, .text = path + ": " + why};
  };
  OwnedFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return refuse(std::strerror(errno));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return refuse(std::strerror(errno));
  if (S_ISDIR(info.st_mode)) return refuse("a folder; name a file written by `terrace run --record FILE`");
  const gzFile file = gzdopen(fd.get(), "rb");
  if (file == nullptr) return refuse("no memory to read it");
  (void)fd.release();
  return trace::Reader::open(std::make_unique<GzipSource>(file, path), path);
}

}  // namespace terrace
