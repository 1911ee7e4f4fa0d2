// Tells the outermost intercepted call of a thread from those that it causes. There are two levels: a runtime
// that allocates through the driver is counted once, and what happens is decided in the driver's call, since
// every runtime comes by there. Only what a runtime gets done without it is settled in the runtime's.
#pragma once

namespace terrace::hooks {

class RuntimeCall;

class DriverCall {
 public:
  DriverCall() noexcept { outermost_ = depth_++ == 0; }
  ~DriverCall() { --depth_; }
  DriverCall(const DriverCall&) = delete;
  DriverCall& operator=(const DriverCall&) = delete;
  [[nodiscard]] bool outermost() const noexcept { return outermost_; }
  [[nodiscard]] static bool under_way() noexcept { return depth_ != 0; }
  // An allocation or a free was dealt with on this level; a launch was seen.
  static void note_memory() noexcept { ++memory_calls_; }
  static void note_launch() noexcept { ++launches_; }

 private:
  friend class RuntimeCall;
  bool outermost_;
  static inline thread_local constinit unsigned depth_ = 0;
  static inline thread_local constinit unsigned memory_calls_ = 0;
  static inline thread_local constinit unsigned launches_ = 0;
};

class RuntimeCall {
 public:
  RuntimeCall() noexcept
      : memory_calls_before_(DriverCall::memory_calls_), launches_before_(DriverCall::launches_) {
    outermost_ = depth_++ == 0;
  }
  ~RuntimeCall() { --depth_; }
  RuntimeCall(const RuntimeCall&) = delete;
  RuntimeCall& operator=(const RuntimeCall&) = delete;
  [[nodiscard]] bool outermost() const noexcept { return outermost_; }
  [[nodiscard]] static bool under_way() noexcept { return depth_ != 0; }
  // No driver call below this one has dealt with memory.
  [[nodiscard]] bool unseen_below() const noexcept {
    return DriverCall::memory_calls_ == memory_calls_before_;
  }
  // Nor has one launched anything.
  [[nodiscard]] bool no_launch_below() const noexcept { return DriverCall::launches_ == launches_before_; }

 private:
  bool outermost_;
  unsigned memory_calls_before_, launches_before_;
  static inline thread_local constinit unsigned depth_ = 0;
};

}  // namespace terrace::hooks
