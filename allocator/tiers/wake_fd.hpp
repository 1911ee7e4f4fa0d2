// An eventfd: what lets a thread that sleeps in poll() be woken by another.
#pragma once

#include <optional>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"

namespace terrace {

class WakeFd {
 public:
  // Errors: kOutOfMemory (no file descriptor left).
  [[nodiscard]] static Result<WakeFd> create();
  void raise() const;  // from any thread; ends the sleep under way, or else the next one
  // Sleeps until raise(), until `also` (a file descriptor) is readable, or for `most`. May return early.
  void sleep(std::optional<Nanoseconds> most, std::optional<int> also = std::nullopt) const;

 private:
  explicit WakeFd(OwnedFd fd) : fd_(std::move(fd)) {}
  OwnedFd fd_;
};

}  // namespace terrace
