#include "runtime/fault.hpp"

#include <array>
#include <cstddef>
#include <mutex>

#include "runtime/assert.hpp"

namespace terrace {

namespace detail {
std::atomic<bool> faults_armed{false};
}  // namespace detail

namespace {

constexpr std::array kNames = {
#define FAULT_POINT(id, name) name,
#include "runtime/fault_points.def"
#undef FAULT_POINT
};

// One for the process, never destroyed: a thread that saw faults_armed just before a plan was taken away
// still asks it, and finds nothing installed.
struct ActivePlan {
  std::mutex mutex;
  bool installed = false;
  FaultPlan plan;
  std::uint64_t calls = 0;
  bool fired = false;
};

ActivePlan& active_plan() {
  static auto* plan = new ActivePlan;
  return *plan;
}

}  // namespace

const char* name_of(FaultPoint point) {
  const auto index = static_cast<std::size_t>(point);
  return index < kNames.size() ? kNames[index] : "unknown";
}

std::optional<FaultPoint> fault_point_named(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<FaultPoint>(i);
  }
  return std::nullopt;
}

namespace detail {
bool fault_point_slow(FaultPoint point) {
  ActivePlan& active = active_plan();
  const std::lock_guard lock(active.mutex);
  if (!active.installed) return false;
  if (active.plan.only && *active.plan.only != point) return false;
  ++active.calls;
  // Subtraction, so that a repeat of "for ever" cannot overflow.
  const FaultPlan& plan = active.plan;
  if (plan.nth == 0 || active.calls < plan.nth || active.calls - plan.nth >= plan.repeat) return false;
  active.fired = true;
  return true;
}
}  // namespace detail

struct ScopedFaults::State {
  ActivePlan& active;
};

ScopedFaults::ScopedFaults(FaultPlan plan) : state_(new State{active_plan()}) {
  ActivePlan& active = state_->active;
  const std::lock_guard lock(active.mutex);
  TERRACE_CHECK(!active.installed, "one fault plan at a time");
  active.installed = true;
  active.plan = plan;
  active.calls = 0;
  active.fired = false;
  detail::faults_armed.store(true, std::memory_order_relaxed);
}

ScopedFaults::~ScopedFaults() {
  {
    const std::lock_guard lock(state_->active.mutex);
    detail::faults_armed.store(false, std::memory_order_relaxed);
    state_->active.installed = false;
  }
  delete state_;
}

bool ScopedFaults::fired() const {
  const std::lock_guard lock(state_->active.mutex);
  return state_->active.fired;
}

std::uint64_t ScopedFaults::calls() const {
  const std::lock_guard lock(state_->active.mutex);
  return state_->active.calls;
}

}  // namespace terrace
