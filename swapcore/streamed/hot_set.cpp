#include "swapcore/streamed/hot_set.hpp"

#include <algorithm>
#include <numeric>

#include "runtime/assert.hpp"

namespace terrace {

HotSet::HotSet(std::size_t parts, std::size_t places) : loads_(parts), places_(places), has_place_(parts) {
  TERRACE_CHECK(places <= parts, "a part has one place at most");
  std::iota(places_.begin(), places_.end(), 0U);
  std::fill_n(has_place_.begin(), places, true);
}

std::vector<HotSet::Change> HotSet::end_step(std::span<const std::int64_t> uses) {
  TERRACE_CHECK(uses.size() == loads_.size(), "every part is counted");
  for (std::size_t i = 0; i < uses.size(); ++i) loads_[i] = kFade * loads_[i] + static_cast<double>(uses[i]);
  std::vector<std::uint32_t> outside;
  for (std::uint32_t part = 0; part < loads_.size(); ++part) {
    if (!has_place_[part]) outside.push_back(part);
  }
  std::vector<std::size_t> coldest(places_.size());
  std::iota(coldest.begin(), coldest.end(), std::size_t{0});
  std::stable_sort(outside.begin(), outside.end(),
                   [this](std::uint32_t a, std::uint32_t b) { return loads_[a] > loads_[b]; });
  std::stable_sort(coldest.begin(), coldest.end(),
                   [this](std::size_t a, std::size_t b) { return loads_[places_[a]] < loads_[places_[b]]; });
  std::vector<Change> changes;
  for (std::size_t i = 0; i < std::min(outside.size(), coldest.size()); ++i) {
    const std::size_t place = coldest[i];
    const std::uint32_t leaves = places_[place], comes = outside[i];
    if (loads_[comes] <= kMargin * loads_[leaves]) break;
    changes.push_back({place, leaves, comes});
    places_[place] = comes;
    has_place_[leaves] = false;
    has_place_[comes] = true;
  }
  return changes;
}

}  // namespace terrace
