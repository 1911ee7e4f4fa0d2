#include "daemon/socket_path.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace terrace {
namespace {

namespace fs = std::filesystem;

// Whether a daemon of this user could make the folder and put a socket there.
bool can_create_in(fs::path folder) {
  std::error_code error;
  while (!folder.empty() && !fs::exists(folder, error)) folder = folder.parent_path();
  return ::access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) == 0;
}

Result<std::string> private_socket(const fs::path& folder) {
  ::mkdir(folder.c_str(), 0700);  // may be there
  struct stat status {};
  const bool ours = ::lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
                    status.st_uid == ::geteuid() && (status.st_mode & 022) == 0;
  if (!ours) {
    return Error{Errc::kIo,
                 "the folder " + folder.string() +
                     " must belong to you and be writable by nobody else; name a socket with --socket"};
  }
  return (folder / "terraced.sock").string();
}

}  // namespace

Result<std::string> choose_socket(const std::string& from_policy) {
  if (::access(from_policy.c_str(), W_OK) == 0) return from_policy;
  if (can_create_in(fs::path(from_policy).parent_path())) return from_policy;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime != '\0') return private_socket(fs::path(runtime) / "terrace");
  std::error_code error;
  fs::path temporary = fs::temp_directory_path(error);
  if (error) temporary = "/tmp";
  return private_socket(temporary / ("terrace-" + std::to_string(::geteuid())));
}

}  // namespace terrace
