// Reads and writes of files, many in flight, for one thread that sleeps until one has ended.
//
// Two forms of the same contract: io_uring, and a few threads with pread and pwrite for where the kernel is
// too old or a sandbox refuses io_uring. A request moves all its bytes or fails: short transfers go on from
// where they ended, and interruptions are tried again, a bounded number of times.
//
// submit() and wait() are called by one thread; wake() by any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/clock.hpp"
#include "runtime/device.hpp"
#include "runtime/owned_fd.hpp"

namespace terrace {

struct IoRequest {
  enum class Kind : std::uint8_t { kRead, kWrite };
  Kind kind = Kind::kRead;
  int file = -1;
  Address buffer = nullptr;  // stays the caller's, untouched until the request has ended
  Bytes size;                // at most 1 GiB
  std::uint64_t offset = 0;
  std::uint64_t tag = 0;  // given back when it ends
};

// A request that has ended: error is 0, or an errno; ENODATA where the file ended before the bytes did.
struct IoOutcome {
  std::uint64_t tag = 0;
  int error = 0;
};

// What is left of a request after each answer of the kernel.
class IoProgress {
 public:
  enum class Next : std::uint8_t { kAskAgain, kDone, kFailed };
  IoProgress() = default;
  explicit IoProgress(const IoRequest& request) : rest_(request) {}
  // `answer`: bytes moved, or a negative errno, of an attempt at rest().
  [[nodiscard]] Next take(std::int64_t answer);
  [[nodiscard]] const IoRequest& rest() const { return rest_; }
  [[nodiscard]] IoOutcome outcome() const { return {.tag = rest_.tag, .error = error_}; }

 private:
  IoRequest rest_;
  int fruitless_ = 0;  // answers in a row that moved nothing
  int error_ = 0;
};

enum class IoChoice : std::uint8_t {
  kAuto,     // io_uring where the kernel grants it, else threads
  kThreads,  // as where it does not
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;  // nothing is in flight
  [[nodiscard]] virtual const char* name() const = 0;
  // Precondition: fewer than `depth` in flight. Errors: kIo (the kernel refused; the buffer is free again).
  [[nodiscard]] virtual Status submit(const IoRequest& request) = 0;
  // Adds what has ended to `ended`. Where there is nothing, sleeps in the kernel until there is, until
  // wake(), or for as long as `most` says; it may return early.
  virtual void wait(std::optional<Nanoseconds> most, std::vector<IoOutcome>& ended) = 0;
  // Ends the sleep under way, or else the next one.
  virtual void wake() = 0;
};

// Errors: kOutOfMemory (no file descriptor or thread left).
[[nodiscard]] Result<std::unique_ptr<IoEngine>> open_io_engine(IoChoice choice, unsigned depth);

}  // namespace terrace
