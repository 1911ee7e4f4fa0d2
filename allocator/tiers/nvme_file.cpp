#include "allocator/tiers/nvme_file.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "runtime/fault.hpp"

namespace terrace {
namespace {

Bytes free_in(const std::filesystem::path& folder) {
  struct statvfs system {};
  if (statvfs(folder.c_str(), &system) != 0) return {};
  return Bytes(static_cast<std::uint64_t>(system.f_bavail) * system.f_frsize);
}

Error no_room(const NvmeFile::Options& options, const std::string& why) {
  return Error{.code = Errc::kIo,
               .text = "nvme tier: " + options.folder.string() + " has no room for a file of " +
                       format_bytes(options.size) + " (" + why + "; " +
                       format_bytes(free_in(options.folder)) +
                       " free): lower the budget or name another folder",
               .bytes = options.size};
}

// What would end in a half-filled disk, or in a signal that kills the process, is refused before it is tried.
Status check_room(const NvmeFile::Options& options) {
  rlimit most{};
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < options.size.count()) {
    return no_room(options, "the process may write files of at most " + format_bytes(Bytes(most.rlim_cur)));
  }
  if (free_in(options.folder) < options.size) return no_room(options, "full");
  return {};
}

Result<OwnedFd> open_nameless(const NvmeFile::Options& options) {
  std::string path = (options.folder / "terrace-nvme-XXXXXX").string();
  OwnedFd file;
  int reason = EIO;
  if (!fault_point(FaultPoint::kNvmeOpen)) {
    file = OwnedFd(mkostemp(path.data(), O_CLOEXEC));
    reason = errno;
  }
  if (!file.valid()) {
    return Error{.code = Errc::kIo,
                 .text = "nvme tier: no file can be made in " + options.folder.string() + ": " +
                         std::strerror(reason) + "; create the folder, or name one that can be written"};
  }
  unlink(path.c_str());
  return file;
}

Status set_aside(int file, const NvmeFile::Options& options) {
  constexpr int kMostInterruptions = 100;
  int reason = fault_point(FaultPoint::kNvmeAllocate) ? ENOSPC : EINTR;
  for (int i = 0; i < kMostInterruptions && reason == EINTR; ++i) {
    reason = fallocate(file, 0, 0, static_cast<off_t>(options.size.count())) == 0 ? 0 : errno;
  }
  if (reason == 0) return {};
  if (reason == EOPNOTSUPP) {
    return Error{
        .code = Errc::kNotSupported,
        .text = "nvme tier: the file system of " + options.folder.string() +
                " can't set bytes aside for a file (fallocate); use a local one, such as ext4 or xfs"};
  }
  return no_room(options, std::strerror(reason));
}

}  // namespace

Result<NvmeFile> NvmeFile::create(const Options& asked) {
  // Up to what an offset can hold, so that rounding cannot overflow.
  constexpr Bytes kMost = Bytes((1ULL << 63) - kFileAlignment.count());
  if (asked.size == 0_B || asked.size > kMost) {
    return Error{
        .code = Errc::kInvalidArgument,
        .text = "nvme tier: a file of " + format_bytes(asked.size) + " can't be made; give it a size",
        .bytes = asked.size};
  }
  const Options options{.folder = asked.folder, .size = round_up(asked.size, kFileAlignment)};
  auto opened = open_nameless(options);  // first: a folder that is not there has no room either
  if (!opened) return std::move(opened).error();
  if (Status room = check_room(options); !room) return room.error();
  if (Status taken = set_aside(opened->get(), options); !taken) return taken.error();
  NvmeFile file;
  // After the bytes are set aside, which some file systems do by writing.
  const int flags = fcntl(opened->get(), F_GETFL);
  file.direct_ = flags >= 0 && fcntl(opened->get(), F_SETFL, flags | O_DIRECT) == 0;
  file.fd_ = std::move(opened).value();
  file.size_ = options.size;
  return file;
}

}  // namespace terrace
