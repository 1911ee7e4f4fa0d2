#include "runtime/clock.hpp"

#include "runtime/assert.hpp"

namespace terrace {

namespace {
class SteadyClock final : public Clock {
 public:
  [[nodiscard]] Nanoseconds now() const override {
    return std::chrono::duration_cast<Nanoseconds>(std::chrono::steady_clock::now().time_since_epoch());
  }
};
}  // namespace

const Clock& steady_clock() {
  static const SteadyClock clock;
  return clock;
}

void ManualClock::advance(Nanoseconds span) {
  TERRACE_CHECK(span >= Nanoseconds::zero(), "time never goes back");
  now_.fetch_add(span.count(), std::memory_order_acq_rel);
}

}  // namespace terrace
