// Tells the outermost intercepted call of a thread from those that it causes: a runtime that allocates
// through the driver is counted once.
#pragma once

namespace terrace::hooks {

class CallGuard {
 public:
  CallGuard() noexcept { ++depth_; }
  ~CallGuard() { --depth_; }
  CallGuard(const CallGuard&) = delete;
  CallGuard& operator=(const CallGuard&) = delete;
  [[nodiscard]] bool outermost() const noexcept { return depth_ == 1; }

 private:
  static inline thread_local constinit unsigned depth_ = 0;
};

}  // namespace terrace::hooks
