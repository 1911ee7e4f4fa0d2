#include "swapcore/streamed/load_choice.hpp"

#include <algorithm>

#include "runtime/assert.hpp"

namespace terrace {

namespace {
constexpr double kWorthIt = 0.97;
}

const char* name_of(ExpertLoad load) {
  switch (load) {
    case ExpertLoad::kLayer:
      return "layer";
    case ExpertLoad::kRouter:
      return "router";
    case ExpertLoad::kAuto:
      return "auto";
  }
  return "?";
}

double predicted_seconds(const LoadCosts& costs, ExpertLoad load) {
  TERRACE_CHECK(costs.bytes_per_second > 0 && load != ExpertLoad::kAuto, "a rate and a way are given");
  const double all = static_cast<double>(costs.all.count()) / costs.bytes_per_second;
  if (load == ExpertLoad::kLayer)
    return std::max(costs.forward_seconds, all) + std::max(costs.backward_seconds, all);
  const double fired = all * costs.fired_share;
  return costs.forward_seconds + costs.asking_seconds + fired + std::max(costs.backward_seconds, fired);
}

// By router a step takes longer the more experts fire, in two straight pieces: backward hides the first.
double break_even_share(const LoadCosts& costs) {
  const double all = static_cast<double>(costs.all.count()) / costs.bytes_per_second;
  const double left = predicted_seconds(costs, ExpertLoad::kLayer) - costs.forward_seconds -
                      costs.asking_seconds - costs.backward_seconds;
  if (all <= 0 || left <= 0) return 0;
  const double hidden = costs.backward_seconds;
  const double seconds = left <= hidden ? left : (left + hidden) / 2;
  return std::min(1.0, seconds / all);
}

ExpertLoad choose_load(const LoadCosts& costs, ExpertLoad now) {
  const ExpertLoad other = now == ExpertLoad::kLayer ? ExpertLoad::kRouter : ExpertLoad::kLayer;
  const bool worth_it = predicted_seconds(costs, other) < kWorthIt * predicted_seconds(costs, now);
  return worth_it ? other : now;
}

}  // namespace terrace
