#include "swapcore/plan/residual.hpp"

#include <algorithm>

namespace terrace {
namespace {

constexpr int kFirst = 1;  // it pins and maps what later ones find there
constexpr int kTelling = 3;
constexpr std::size_t kMostSeen = 64;

template <typename Member>
double median(std::vector<Prediction::Measured> steps, Member member) {
  const auto middle = steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2);
  std::nth_element(steps.begin(), middle, steps.end(),
                   [member](const auto& a, const auto& b) { return a.*member < b.*member; });
  return (*middle).*member;
}

}  // namespace

void ResidualWatch::begin(const Prediction& modelled) {
  modelled_seconds_ = modelled.step_seconds;
  modelled_stall_ = modelled.stall_seconds;
  steps_ = 0;
  seen_.clear();
}

bool ResidualWatch::add(const Prediction::Measured& step) {
  if (++steps_ <= kFirst || modelled_seconds_ <= 0) return false;
  if (seen_.size() == kMostSeen) seen_.erase(seen_.begin());
  seen_.push_back(step);
  if (steps_ != kFirst + kTelling) return false;
  share_ = median(seen_, &Prediction::Measured::step_seconds) / modelled_seconds_ - 1;
  stall_ = median(seen_, &Prediction::Measured::stall_seconds) - modelled_stall_;
  seen_.clear();
  return true;
}

Prediction ResidualWatch::corrected(Prediction modelled) const {
  modelled.residual_share = share_;
  modelled.step_seconds *= 1 + share_;
  modelled.stall_seconds = std::max(0.0, modelled.stall_seconds + stall_);
  return modelled;
}

Prediction::Measured ResidualWatch::typical(const Prediction::Measured& last) const {
  std::vector<Prediction::Measured> steps = seen_;
  steps.push_back(last);
  Prediction::Measured typical = last;
  typical.step_seconds = median(steps, &Prediction::Measured::step_seconds);
  typical.stall_seconds = median(steps, &Prediction::Measured::stall_seconds);
  return typical;
}

}  // namespace terrace
