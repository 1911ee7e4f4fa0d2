// The file that one recorder of one process writes a trace into.
//
// A process can hold two recorders: the preload library has its own, and so does a program or library of ours
// in it. Both name the same file; the one whose layer is nearer to the user gets it. The one that was there
// first holds a lock on the file. A nearer one puts a new file in its place, and the first finds, when it
// writes next, that its own is gone.
//
// No heap memory, no exceptions; errno is kept by the caller. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/trace/format.hpp"

namespace terrace::trace {

class RecordingFile {
 public:
  enum class Outcome : std::uint8_t {
    kDone,
    kTaken,   // another recorder has the file, by a right as good as ours or better
    kFailed,  // errno says why
  };

  constexpr RecordingFile() = default;
  // Opens and empties the file, or replaces it, where it is free or held by a layer further from the user.
  [[nodiscard]] Outcome open(const char* path, Layer layer) noexcept;
  [[nodiscard]] Outcome write(std::span<const std::byte> bytes) noexcept;
  // A forked child lets go of its parent's file; after kTaken or kFailed nothing is held any more.
  void close() noexcept;

 private:
  [[nodiscard]] Outcome replace(const char* path) noexcept;
  [[nodiscard]] bool remember() noexcept;
  [[nodiscard]] bool still_ours() const noexcept;

  int fd_ = -1;
  std::uint64_t device_ = 0;  // of the file, as opened
  std::uint64_t inode_ = 0;
};

}  // namespace terrace::trace
