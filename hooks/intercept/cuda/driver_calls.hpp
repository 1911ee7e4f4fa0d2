// The driver's functions that the hook itself calls: the real ones, never the intercepted.
#pragma once

#include "hooks/intercept/cuda/abi.hpp"
#include "runtime/units.hpp"

namespace terrace::hooks::cuda {

struct DriverCalls {
#define DRIVER_CALL(member, name, parameters) CallResult(*member) parameters = nullptr;
#define DRIVER_CALL_OPTIONAL(member, name, parameters) CallResult(*member) parameters = nullptr;
#include "hooks/intercept/cuda/driver_calls.def"
#undef DRIVER_CALL
#undef DRIVER_CALL_OPTIONAL
};

// Null while no driver is loaded that has them all.
[[nodiscard]] const DriverCalls* driver_calls() noexcept;

// The device of this thread's context; -1: it has none.
[[nodiscard]] DeviceOrdinal current_device() noexcept;

// While it lives, nothing that this thread asks of the driver breaks a capture that is going on elsewhere.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const DriverCalls& driver) noexcept : driver_(driver) {
    driver_.capture_mode(&mode_);
  }
  ~RelaxedCapture() { driver_.capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const DriverCalls& driver_;
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; then what the thread had
};

// Makes a context current on this thread while it lives.
class CurrentContext {
 public:
  CurrentContext(const DriverCalls& driver, ContextHandle wanted) noexcept;
  ~CurrentContext() {
    if (changed_) driver_.context_set(before_);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  [[nodiscard]] CallResult result() const noexcept { return result_; }

 private:
  const DriverCalls& driver_;
  ContextHandle before_ = nullptr;
  bool changed_ = false;
  CallResult result_ = kSuccess;
};

}  // namespace terrace::hooks::cuda
