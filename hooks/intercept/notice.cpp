#include "hooks/intercept/notice.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace terrace::hooks {

void say_once(Notice kind, std::string_view line) noexcept {
  static constinit std::atomic<std::uint32_t> said{0};
  const std::uint32_t bit = 1U << static_cast<unsigned>(kind);
  if ((said.fetch_or(bit, std::memory_order_relaxed) & bit) != 0) return;
  const int kept = errno;
  // One call, so that lines of several processes do not mix.
  static constexpr std::string_view kBefore = "terrace: ";
  const iovec parts[3] = {{const_cast<char*>(kBefore.data()), kBefore.size()},
                          {const_cast<char*>(line.data()), line.size()},
                          {const_cast<char*>("\n"), 1}};
  [[maybe_unused]] const ssize_t written = ::writev(STDERR_FILENO, parts, 3);
  errno = kept;
}

void say_at_end(std::string_view lines) noexcept {
  const int kept = errno;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, lines.data(), lines.size());
  errno = kept;
}

}  // namespace terrace::hooks
