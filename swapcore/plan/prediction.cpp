#include "swapcore/plan/prediction.hpp"

#include <algorithm>
#include <numeric>

#include "swapcore/plan/windows.hpp"

namespace terrace {
namespace {

enum class Way : std::uint8_t { kOut, kIn };

// Divides a trip's bytes among the moments in which it travels.
void spread(const Timeline& timeline, const Timeline::Trip& trip, Way way, Prediction& prediction) {
  const double start = way == Way::kOut ? trip.spill_start : trip.restore_start;
  const double end = way == Way::kOut ? trip.spill_end : trip.restore_end;
  if (end <= start) return;
  Bytes left = trip.bytes;
  const auto& starts = timeline.starts;
  auto moment = static_cast<std::size_t>(std::max<std::ptrdiff_t>(
      0, std::upper_bound(starts.begin(), starts.end(), start) - starts.begin() - 1));
  for (; moment < prediction.windows.size() && left > 0_B; ++moment) {
    const double inside = std::min(end, starts[moment + 1]) - std::max(start, starts[moment]);
    const bool last = end <= starts[moment + 1] || moment + 1 == prediction.windows.size();
    const double share = std::clamp(inside / (end - start), 0.0, 1.0);
    const Bytes part =
        last ? left
             : std::min(left,
                        Bytes(static_cast<std::uint64_t>(static_cast<double>(trip.bytes.count()) * share)));
    (way == Way::kOut ? prediction.windows[moment].out : prediction.windows[moment].in) += part;
    left -= part;
    if (last) break;
  }
}

double share_of(Bytes bytes, double seconds, double rate) {
  return seconds > 0 && rate > 0 ? static_cast<double>(bytes.count()) / (seconds * rate) : 0.0;
}

}  // namespace

Prediction predict(const Snapshot& snapshot, const Timeline& timeline) {
  Prediction prediction;
  const int repeats = snapshot.schedule.empty() ? snapshot.micro_batches : 1;
  prediction.step_seconds = snapshot.other_seconds + repeats * timeline.seconds;
  prediction.stall_seconds = repeats * timeline.stall_seconds;
  prediction.hbm = timeline.hbm;
  prediction.hbm_peak = std::accumulate(timeline.hbm.begin(), timeline.hbm.end(), snapshot.other_peak,
                                        [](Bytes a, Bytes b) { return std::max(a, b); });
  prediction.ddr_peak = timeline.ddr;
  prediction.windows.resize(timeline.hbm.size());
  double last_left = 0, last_back = 0;
  Bytes travelled;
  for (const Timeline::Trip& trip : timeline.trips) {
    spread(timeline, trip, Way::kOut, prediction);
    spread(timeline, trip, Way::kIn, prediction);
    last_left = std::max(last_left, trip.spill_end);
    last_back = std::max(last_back, trip.restore_end);
    travelled += trip.bytes;
  }
  for (std::size_t m = 0; m < prediction.windows.size(); ++m) {
    Prediction::Window& window = prediction.windows[m];
    const double seconds = timeline.starts[m + 1] - timeline.starts[m];
    window.out_share = share_of(window.out, seconds, snapshot.d2h_bytes_per_second);
    window.in_share = share_of(window.in, seconds, snapshot.h2d_bytes_per_second);
  }
  if (travelled > 0_B) {
    const double head = timeline.starts[timeline.head];
    const double last_backward = timeline.starts[timeline.hbm.size() - 1];
    prediction.link_window_used = std::max(
        share_of(travelled, std::max(head, last_left), snapshot.d2h_bytes_per_second),
        share_of(travelled, std::max(last_backward, last_back) - head, snapshot.h2d_bytes_per_second));
  }
  return prediction;
}

Prediction::Error Prediction::error(const Measured& measured) const {
  const auto difference = [](Bytes a, Bytes b) {
    return static_cast<std::int64_t>(a.count()) - static_cast<std::int64_t>(b.count());
  };
  return {.step_share = step_seconds > 0 ? (measured.step_seconds - step_seconds) / step_seconds : 0.0,
          .stall_seconds = measured.stall_seconds - stall_seconds,
          .hbm_bytes = difference(measured.hbm_peak, hbm_peak),
          .ddr_bytes = difference(measured.ddr_peak, ddr_peak)};
}

}  // namespace terrace
