// The file behind the NVMe tier: all its bytes taken from the file system at once, and no name.
//
// The name is removed before the file is used: whatever ends the process, nothing stays behind. Opened past
// the page cache (O_DIRECT) where the file system allows it; where not (some network file systems, older
// tmpfs) it goes through the page cache, works the same, and says so.
#pragma once

#include <filesystem>

#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"

namespace terrace {

// Of offsets, sizes and memory, where the page cache is passed by. Every drive's logical block divides it.
inline constexpr Bytes kFileAlignment = 4_KiB;

class NvmeFile {
 public:
  struct Options {
    std::filesystem::path folder;  // exists; on the drive to be used
    Bytes size;                    // rounded up to kFileAlignment
  };
  // Errors: kIo (the folder is not there or not writable, the file system is full or refuses: the text names
  // the path, the bytes wanted and those free), kNotSupported (it can't set bytes aside ahead),
  // kInvalidArgument (no bytes).
  [[nodiscard]] static Result<NvmeFile> create(const Options& options);

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] Bytes size() const { return size_; }
  [[nodiscard]] bool direct() const { return direct_; }

 private:
  NvmeFile() = default;
  OwnedFd fd_;
  Bytes size_;
  bool direct_ = false;
};

}  // namespace terrace
