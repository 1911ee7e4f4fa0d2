// Fault injection: every fallible boundary asks fault_point() first, and a test decides which call fails.
//
//   for (int nth = 1;; ++nth) {
//     ScopedFaults faults(fail_call(nth));
//     churn();
//     if (!faults.fired()) break;
//   }
//
// With no plan installed a fault point costs one relaxed load.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

namespace terrace {

enum class FaultPoint : std::uint8_t {
#define FAULT_POINT(id, name) id,
#include "runtime/fault_points.def"
#undef FAULT_POINT
};
[[nodiscard]] const char* name_of(FaultPoint point);
[[nodiscard]] std::optional<FaultPoint> fault_point_named(std::string_view name);

struct FaultPlan {
  std::uint64_t nth = 0;           // the nth matching call fails, counted from 1; 0: none
  std::optional<FaultPoint> only;  // count calls of this point alone
  std::uint64_t repeat = 1;        // how many matching calls fail from the nth on
};
[[nodiscard]] constexpr FaultPlan fail_call(std::uint64_t nth) {
  return {.nth = nth, .only = {}, .repeat = 1};
}
[[nodiscard]] constexpr FaultPlan fail_call(FaultPoint point, std::uint64_t nth) {
  return {.nth = nth, .only = point, .repeat = 1};
}

// Installs a plan for the whole process until destroyed. At most one at a time (a programmer error
// otherwise).
class ScopedFaults {
 public:
  explicit ScopedFaults(FaultPlan plan);
  ~ScopedFaults();
  ScopedFaults(const ScopedFaults&) = delete;
  ScopedFaults& operator=(const ScopedFaults&) = delete;
  [[nodiscard]] bool fired() const;           // some call has failed
  [[nodiscard]] std::uint64_t calls() const;  // matching calls seen so far

 private:
  struct State;
  State* state_;
};

namespace detail {
extern std::atomic<bool> faults_armed;
bool fault_point_slow(FaultPoint point);
}  // namespace detail

// True: the caller must behave as if the real call had failed, having changed nothing.
[[nodiscard]] inline bool fault_point(FaultPoint point) {
  return detail::faults_armed.load(std::memory_order_relaxed) && detail::fault_point_slow(point);
}

}  // namespace terrace
