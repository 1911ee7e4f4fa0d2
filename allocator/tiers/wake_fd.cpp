#include "allocator/tiers/wake_fd.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace terrace {

Result<WakeFd> WakeFd::create() {
  OwnedFd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) {
    return Error{.code = Errc::kOutOfMemory, .text = std::string("eventfd: ") + std::strerror(errno)};
  }
  return WakeFd(std::move(fd));
}

void WakeFd::raise() const {
  const std::uint64_t one = 1;
  while (write(fd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void WakeFd::sleep(std::optional<Nanoseconds> most, std::optional<int> also) const {
  constexpr Nanoseconds::rep kSecond = 1'000'000'000;
  std::array<pollfd, 2> watched{{{.fd = fd_.get(), .events = POLLIN, .revents = 0},
                                 {.fd = also.value_or(-1), .events = POLLIN, .revents = 0}}};
  timespec span{};
  if (most) span = {.tv_sec = most->count() / kSecond, .tv_nsec = most->count() % kSecond};
  const int ready = ppoll(watched.data(), watched.size(), most ? &span : nullptr, nullptr);
  if (ready < 0 && errno != EINTR) {
    // No memory for a poll: the caller asks again, and must not do so without a pause.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (ready > 0 && (watched[0].revents & POLLIN) != 0) {
    std::uint64_t count = 0;
    while (read(fd_.get(), &count, sizeof count) < 0 && errno == EINTR) {
    }
  }
}

}  // namespace terrace
