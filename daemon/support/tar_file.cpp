#include "daemon/support/tar_file.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "runtime/assert.hpp"

namespace terrace {
namespace {

constexpr std::size_t kBlock = 512;

// Of POSIX.1-1988; numbers in octal.
struct Header {
  char name[100], mode[8], uid[8], gid[8], size[12], time[12], checksum[8], type, linked[100], magic[6],
      version[2];
  char user[32], group[32], major[8], minor[8], prefix[155], padding[12];
};
static_assert(sizeof(Header) == kBlock);

template <std::size_t N>
void octal(char (&field)[N], std::uint64_t value) {
  std::snprintf(field, N, "%0*llo", static_cast<int>(N - 1), static_cast<unsigned long long>(value));
}

std::string header_of(const TarMember& member, std::time_t now) {
  TERRACE_CHECK(member.name.size() < 100, "a member's name fits its field");
  Header header{};
  std::memcpy(header.name, member.name.data(), member.name.size());
  octal(header.mode, 0644);
  octal(header.uid, 0);
  octal(header.gid, 0);
  octal(header.size, member.text.size());
  octal(header.time, static_cast<std::uint64_t>(now));
  header.type = '0';
  std::memcpy(header.magic, "ustar", 6);
  std::memcpy(header.version, "00", 2);
  std::memset(header.checksum, ' ', sizeof header.checksum);  // as it is summed
  unsigned sum = 0;
  for (std::size_t i = 0; i < kBlock; ++i) sum += reinterpret_cast<const unsigned char*>(&header)[i];
  std::snprintf(header.checksum, 7, "%06o", sum);
  return {reinterpret_cast<const char*>(&header), kBlock};
}

std::string archive_of(const std::vector<TarMember>& members) {
  const std::time_t now = std::time(nullptr);
  std::string archive;
  for (const TarMember& member : members) {
    archive += header_of(member, now) + member.text;
    archive.resize((archive.size() + kBlock - 1) / kBlock * kBlock);
  }
  archive.resize(archive.size() + 2 * kBlock);
  return archive;
}

}  // namespace

Status write_tar_gz(const std::string& path, const std::vector<TarMember>& members) {
  const auto failed = [&](const std::string& why) {
    return Error{.code = Errc::kIo, .text = path + ": " + why};
  };
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0 && errno == EEXIST) return failed("is there already; name another file with --out");
  if (fd < 0)
    return failed(std::string(std::strerror(errno)) + "; name a file that you may write with --out");
  gzFile file = ::gzdopen(fd, "wb9");
  if (file == nullptr) {
    ::close(fd);
    ::unlink(path.c_str());
    return failed("no memory to compress");
  }
  const std::string archive = archive_of(members);
  const bool written = ::gzwrite(file, archive.data(), static_cast<unsigned>(archive.size())) ==
                       static_cast<int>(archive.size());
  if (::gzclose(file) == Z_OK && written) return {};
  ::unlink(path.c_str());
  return failed("could not be written; is the disk full?");
}

}  // namespace terrace
