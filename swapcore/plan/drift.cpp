#include "swapcore/plan/drift.hpp"

#include <algorithm>

namespace terrace {
namespace {

constexpr double kDrift = 0.10;       // of the step
constexpr double kLateShare = 0.005;  // of the steps' time
constexpr int kReferenceSteps = 3;
constexpr int kInARow = 3;  // one odd step (evaluation, a short batch) is no drift
constexpr int kStepsUntilLate = 4;
constexpr int kMostPatience = 4096;
constexpr int kWarm = 16;

}  // namespace

void DriftWatch::add(double seconds, double late_seconds) {
  ++lived_;
  ++steps_;
  deviated_ = 0;
  seconds_ += seconds;
  late_ += late_seconds;
  if (timed_ < kReferenceSteps) {
    reference_ = timed_++ == 0 ? seconds : std::min(reference_, seconds);
    return;
  }
  const int direction = seconds > reference_ * (1 + kDrift)   ? 1
                        : seconds < reference_ * (1 - kDrift) ? -1
                                                              : 0;
  beyond_ = direction == 0 ? 0 : direction == direction_ ? beyond_ + 1 : 1;
  direction_ = direction;
}

void DriftWatch::add_deviated() {
  ++steps_;
  ++deviated_;
}

bool DriftWatch::drifted() const { return changed() || (!warm_ && lived_ >= kWarm); }

bool DriftWatch::changed() const {
  return steps_ >= patience_ && (beyond_ >= kInARow || deviated_ >= kInARow);
}

bool DriftWatch::often_late() const { return steps_ >= kStepsUntilLate && late_ > kLateShare * seconds_; }

void DriftWatch::measured_again() {
  if (changed()) patience_ = std::min(kMostPatience, patience_ * 2);
  warm_ = warm_ || lived_ >= kWarm;
  solved_again();
}

void DriftWatch::solved_again() {
  reference_ = seconds_ = late_ = 0;
  steps_ = timed_ = beyond_ = deviated_ = direction_ = 0;
}

}  // namespace terrace
