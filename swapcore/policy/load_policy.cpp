// The policy as a file on disk.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "swapcore/policy/policy.hpp"

namespace terrace {
namespace {

constexpr std::size_t kFileMost = std::size_t{1} << 20;

Error file_error(const std::string& path, std::string_view what_and_would_do) {
  return Error{Errc::kIo, path + ": " + std::string(what_and_would_do), {}, Pool::kScratch};
}

class OpenFile {
 public:
  explicit OpenFile(int descriptor) : descriptor_(descriptor) {}
  ~OpenFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  [[nodiscard]] int get() const { return descriptor_; }

 private:
  int descriptor_;
};

Error cannot_open(const std::string& path, int cause) {
  switch (cause) {
    case ENOENT:
    case ENOTDIR:
      return file_error(path, "no such policy file; check the path, or leave it out for the defaults");
    case EACCES:
      return file_error(path,
                        "this user may not read the policy file; give it read permission with chmod u+r");
    default:
      return file_error(path, std::string("can't open the policy file: ") + std::strerror(cause) +
                                  "; check the path and its permissions");
  }
}

}  // namespace

Result<Policy> load_policy(const std::string& path) {
  const OpenFile file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return cannot_open(path, errno);
  struct stat facts {};
  if (fstat(file.get(), &facts) != 0) return cannot_open(path, errno);
  if (S_ISDIR(facts.st_mode)) return file_error(path, "is a folder; give the path of the policy file in it");
  // Root can read what nobody may. The file's mode says that it isn't meant to be read, so it isn't.
  if (S_ISREG(facts.st_mode) && (facts.st_mode & (S_IRUSR | S_IRGRP | S_IROTH)) == 0)
    return file_error(path, "nobody may read the policy file; give it read permission with chmod u+r");
  std::string text;
  char buffer[16384];
  for (;;) {
    const ssize_t got = read(file.get(), buffer, sizeof buffer);
    if (got == 0) break;
    if (got < 0) {
      if (errno == EINTR) continue;
      return file_error(path, std::string("can't read the policy file: ") + std::strerror(errno) +
                                  "; check the disk or choose another file");
    }
    text.append(buffer, static_cast<std::size_t>(got));
    if (text.size() > kFileMost)
      return file_error(path, "is larger than 1 MiB; a policy is a few dozen lines, so check the path");
  }
  return parse_policy(text, path);
}

}  // namespace terrace
