// The metrics of this process: one table (metrics.def), one page of 64-bit atomics that terraced reads.
//
//   metrics().add<Metric::kTransferBytes>(Direction::kD2H, CopyReason::kSpill, 64_MiB);
//   metrics().set<Metric::kBudgetBytes>(TierId::kHbm, budget);
//
// Labels come first, in the order of the table, then the amount in the metric's unit: Bytes, a count, or
// time (std::chrono or seconds as double; kept as integer nanoseconds). A wrong label or unit doesn't
// compile. Every call is one relaxed atomic operation: wait-free, allowed in any thread and before main.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/assert.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/device.hpp"
#include "runtime/fault.hpp"
#include "runtime/site_groups.hpp"
#include "runtime/units.hpp"

namespace terrace {

// --- Labels. The order of enumerators is part of the page's layout. ---

// Kinds of site; the same order as the sites of Swap Core, a layer above.
enum class MetricKind : std::uint8_t { kMatmul = 0, kGmm = 1, kAttention = 2, kScan = 3 };
enum class StallReason : std::uint8_t {
  kRestoreLate = 0,
  kSpillBackpressure,
  kBudget,
  kDaemon,
  kExpertLate,
  kOptimizerLate,
  kRouterWord
};
// By whose word a layer's experts were fetched.
enum class ExpertWord : std::uint8_t { kLayer = 0, kRouter };
enum class CallGroup : std::uint8_t { kAllocate = 0, kFree, kCopy, kLaunch, kQuery, kMap, kShare, kOther };
// Why Swap Core went another way than planned. The first five are of a step, whose rest is computed again
// where it would have travelled; the others are of one output, which is computed again.
enum class FallbackReason : std::uint8_t {
  kStepCancelled = 0,
  kLayerOrder,
  kMicroBatches,
  kChangedShape,
  kWithoutBackward,
  kOfferedTwice,
  kRecomputeShape,
  kDdrFull,
  kHbmFull,
  kCopyFailed,
  kDamaged,
  kNotBack,
  kChangedInPlace,
};
inline constexpr int kFallbackReasonCount = 13;
enum class KeptContent : std::uint8_t { kSaved = 0, kOutput };
enum class KeptState : std::uint8_t { kSettled = 0, kLeaving, kArriving };  // as HBM sees it
enum class Estimate : std::uint8_t { kPredicted = 0, kMeasured };
enum class StreamedOutcome : std::uint8_t { kFound = 0, kLoaded };
enum class RingSlotState : std::uint8_t { kFree = 0, kHeld };
// What a background copy is held back for while the link could carry it.
enum class LinkHold : std::uint8_t { kLease = 0, kCollective };
// Who else has seen a block's memory, so that it stays where it is.
enum class FixedReason : std::uint8_t { kCaptured = 0, kExported, kRegistered, kPeer };
[[nodiscard]] const char* name_of(FallbackReason reason);  // "step_cancelled", "layer_order", ...
[[nodiscard]] const char* name_of(MetricKind kind);        // "matmul", "gmm", "attention", "scan"
[[nodiscard]] const char* name_of(FetchOutcome outcome);   // "hit", "miss", "late"
[[nodiscard]] const char* name_of(StallReason reason);     // "restore_late", "spill_backpressure", ...
[[nodiscard]] const char* name_of(ExpertWord word);        // "layer", "router"
[[nodiscard]] const char* name_of(CallGroup group);        // "allocate", "free", ...
[[nodiscard]] const char* name_of(KeptContent content);    // "saved", "output"
[[nodiscard]] const char* name_of(KeptState state);        // "settled", "leaving", "arriving"
[[nodiscard]] const char* name_of(Estimate estimate);      // "predicted", "measured"
[[nodiscard]] const char* name_of(StreamedOutcome found);  // "found", "loaded"
[[nodiscard]] const char* name_of(RingSlotState state);    // "free", "held"
[[nodiscard]] const char* name_of(LinkHold hold);          // "lease", "collective"
[[nodiscard]] const char* name_of(FixedReason reason);     // "captured", "exported", ...

namespace detail {
inline constexpr int kFaultPointCount = 0
#define FAULT_POINT(id, name) +1
#include "runtime/fault_points.def"
#undef FAULT_POINT
    ;
}  // namespace detail

template <typename Enum>
struct LabelTraits;
#define TERRACE_LABEL(Enum, name, count)         \
  template <>                                    \
  struct LabelTraits<Enum> {                     \
    static constexpr const char* kName = name;   \
    static constexpr std::size_t kCount = count; \
  };
TERRACE_LABEL(TierId, "tier", kTierCount)
TERRACE_LABEL(Pool, "pool", kPoolCount)
TERRACE_LABEL(Direction, "direction", kDirectionCount)
TERRACE_LABEL(CopyReason, "reason", kCopyReasonCount)
TERRACE_LABEL(MetricKind, "kind", 4)
TERRACE_LABEL(FetchOutcome, "outcome", kFetchOutcomeCount)
TERRACE_LABEL(StallReason, "reason", 7)
TERRACE_LABEL(ExpertWord, "load", 2)
TERRACE_LABEL(CallGroup, "call_group", 8)
TERRACE_LABEL(FallbackReason, "reason", kFallbackReasonCount)
TERRACE_LABEL(KeptContent, "content", 2)
TERRACE_LABEL(KeptState, "state", 3)
TERRACE_LABEL(Estimate, "estimate", 2)
TERRACE_LABEL(StreamedOutcome, "outcome", 2)
TERRACE_LABEL(RingSlotState, "state", 2)
TERRACE_LABEL(LinkHold, "reason", 2)
TERRACE_LABEL(FixedReason, "reason", 4)
TERRACE_LABEL(FaultPoint, "point", detail::kFaultPointCount)
#undef TERRACE_LABEL

// --- The table ---

enum class MetricType : std::uint8_t { kCounter, kGauge, kPeak };
enum class MetricUnit : std::uint8_t { kCount, kBytes, kSeconds, kRatio };  // the last: of the node alone

enum class Metric : std::uint8_t {
#define METRIC(id, name, type, unit, labels, help) id,
#define NODE_METRIC(id, name, type, unit, labels, help)
#include "runtime/metrics.def"
#undef METRIC
#undef NODE_METRIC
};
enum class NodeMetric : std::uint8_t {
#define METRIC(id, name, type, unit, labels, help)
#define NODE_METRIC(id, name, type, unit, labels, help) id,
#include "runtime/metrics.def"
#undef METRIC
#undef NODE_METRIC
};

// The labels of one metric; a slot for each combination, the last label fastest.
template <typename... Enums>
struct LabelSet {
  using Tuple = std::tuple<Enums...>;
  static constexpr std::size_t kRank = sizeof...(Enums);
  static constexpr std::size_t kSlots = (std::size_t{1} * ... * LabelTraits<Enums>::kCount);
  [[nodiscard]] static constexpr std::size_t index(Enums... labels) {
    std::size_t slot = 0;
    ((slot = slot * LabelTraits<Enums>::kCount + static_cast<std::size_t>(labels)), ...);
    return slot;
  }
};

template <Metric M>
struct MetricTraits;
#define TERRACE_LABEL_SET(...) LabelSet<__VA_ARGS__>
#define METRIC(id, name, type, unit, labels, help)           \
  template <>                                                \
  struct MetricTraits<Metric::id> {                          \
    using Labels = TERRACE_LABEL_SET labels;                 \
    static constexpr MetricType kType = MetricType::k##type; \
    static constexpr MetricUnit kUnit = MetricUnit::k##unit; \
  };
#define NODE_METRIC(id, name, type, unit, labels, help)
#include "runtime/metrics.def"
#undef METRIC
#undef NODE_METRIC

inline constexpr std::array kMetricSlotCounts = {
#define METRIC(id, name, type, unit, labels, help) MetricTraits<Metric::id>::Labels::kSlots,
#define NODE_METRIC(id, name, type, unit, labels, help)
#include "runtime/metrics.def"
#undef METRIC
#undef NODE_METRIC
};
#undef TERRACE_LABEL_SET
inline constexpr std::size_t kMetricCount = kMetricSlotCounts.size();

[[nodiscard]] constexpr std::size_t first_slot(Metric metric) {
  std::size_t slot = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(metric); ++i) slot += kMetricSlotCounts[i];
  return slot;
}
inline constexpr std::size_t kMetricSlots = [] {
  std::size_t slots = 0;
  for (const std::size_t count : kMetricSlotCounts) slots += count;
  return slots;
}();

// --- Amounts: what a slot holds for a value of the metric's unit ---

namespace detail {
[[nodiscard]] constexpr std::uint64_t nanoseconds_of(double seconds) {
  return seconds > 0 ? (seconds < 1e10 ? static_cast<std::uint64_t>(seconds * 1e9) : std::uint64_t{1} << 63)
                     : 0;
}
template <MetricUnit Unit, typename T>
[[nodiscard]] constexpr std::uint64_t amount_of(T amount) {
  if constexpr (Unit == MetricUnit::kBytes) {
    static_assert(std::is_same_v<T, Bytes>, "this metric counts Bytes");
    return amount.count();
  } else if constexpr (Unit == MetricUnit::kSeconds) {
    if constexpr (std::is_same_v<T, double>) {
      return nanoseconds_of(amount);
    } else {
      const auto count = std::chrono::duration_cast<std::chrono::nanoseconds>(amount).count();
      return count > 0 ? static_cast<std::uint64_t>(count) : 0;
    }
  } else {
    static_assert(std::integral<T>, "this metric is a count");
    return static_cast<std::uint64_t>(amount);
  }
}
}  // namespace detail

// The slots of one process. Lives in shared memory: nothing but lock-free atomics.
class MetricsPage {
 public:
  // Counters and gauges.
  template <Metric M, typename... Args>
  void add(Args... labels_then_amount) {
    apply<M>([](auto& slot, std::uint64_t n) { slot.fetch_add(n, std::memory_order_relaxed); },
             std::make_tuple(labels_then_amount...));
  }
  // Gauges only; never below what was added.
  template <Metric M, typename... Args>
  void subtract(Args... labels_then_amount) {
    static_assert(MetricTraits<M>::kType == MetricType::kGauge, "only a gauge falls");
    apply<M>([](auto& slot, std::uint64_t n) { slot.fetch_sub(n, std::memory_order_relaxed); },
             std::make_tuple(labels_then_amount...));
  }
  // Gauges and peaks.
  template <Metric M, typename... Args>
  void set(Args... labels_then_amount) {
    static_assert(MetricTraits<M>::kType != MetricType::kCounter, "a counter only rises: add()");
    apply<M>([](auto& slot, std::uint64_t n) { slot.store(n, std::memory_order_relaxed); },
             std::make_tuple(labels_then_amount...));
  }
  // Peaks: keeps the larger of what is there and the amount.
  template <Metric M, typename... Args>
  void raise(Args... labels_then_amount) {
    static_assert(MetricTraits<M>::kType == MetricType::kPeak, "only a peak is raised");
    apply<M>(
        [](auto& slot, std::uint64_t n) {
          std::uint64_t seen = slot.load(std::memory_order_relaxed);
          while (seen < n && !slot.compare_exchange_weak(seen, n, std::memory_order_relaxed)) {
          }
        },
        std::make_tuple(labels_then_amount...));
  }
  // The slot's raw value: bytes, count or nanoseconds.
  template <Metric M, typename... Args>
  [[nodiscard]] std::uint64_t value(Args... labels) const {
    return slots_[first_slot(M) + MetricTraits<M>::Labels::index(labels...)].load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t raw(std::size_t slot) const {
    return slots_[slot].load(std::memory_order_relaxed);
  }
  [[nodiscard]] SiteGroups& site_groups() { return groups_; }
  [[nodiscard]] const SiteGroups& site_groups() const { return groups_; }
  void clear();
  // Moves what `from` has counted into this page and leaves zeros there.
  void absorb(MetricsPage& from);

 private:
  using Slot = std::atomic<std::uint64_t>;
  static_assert(Slot::is_always_lock_free && sizeof(Slot) == sizeof(std::uint64_t));

  template <Metric M, typename Operation, typename... Args>
  void apply(Operation operation, const std::tuple<Args...>& args) {
    using Labels = typename MetricTraits<M>::Labels;
    static_assert(sizeof...(Args) == Labels::kRank + 1, "give every label of the metric, then the amount");
    const std::size_t index = [&]<std::size_t... I>(std::index_sequence<I...>) {
      return Labels::index(std::get<I>(args)...);
    }
    (std::make_index_sequence<Labels::kRank>{});
    TERRACE_DCHECK(index < Labels::kSlots, "labels are enumerators");
    operation(slots_[first_slot(M) + index],
              detail::amount_of<MetricTraits<M>::kUnit>(std::get<Labels::kRank>(args)));
  }

  std::array<Slot, kMetricSlots> slots_{};
  SiteGroups groups_;
};
static_assert(std::is_standard_layout_v<MetricsPage> && std::is_trivially_destructible_v<MetricsPage>);

namespace detail {
extern std::atomic<MetricsPage*> live_page;
}  // namespace detail

// The page of this process: a private one until attach_metrics(). Never destroyed, so that it may be used
// while static objects are. A forked child starts again with a private page of zeros.
[[nodiscard]] inline MetricsPage& metrics() { return *detail::live_page.load(std::memory_order_acquire); }
// Makes `page` the live one; it stays mapped until another is attached or detach_metrics() is called. What
// the private page has counted moves into it; what an earlier attached page has counted stays there, so that
// nothing is counted twice. Attach early: an update made by another thread in this very moment may stay
// behind.
void attach_metrics(MetricsPage& page);
// Back to the private page. The counts stay in the page that was attached: it is what the daemon reads last.
void detach_metrics();
// The row of site_groups() for a group of sites of this process: the same for one name, whichever page is
// live; SiteGroups::kOther once all others are taken. From any thread; takes a lock.
[[nodiscard]] std::size_t site_group_row(std::string_view group);

// --- Walking the table ---

struct LabelInfo {
  const char* name;
  std::size_t count;
  const char* (*value)(std::size_t index);
};
struct MetricInfo {
  const char* name;  // with the prefix terrace_
  MetricType type;
  MetricUnit unit;
  const char* help;
  std::span<const LabelInfo> labels;
  std::size_t first_slot;
  std::size_t slots;
};
struct NodeMetricInfo {
  const char* name;  // with the prefix terrace_
  MetricType type;
  MetricUnit unit;
  const char* labels;  // "job, tier"
  const char* help;
};
[[nodiscard]] std::span<const MetricInfo> metric_table();  // in the order of Metric
[[nodiscard]] const MetricInfo& info_of(Metric metric);
[[nodiscard]] std::span<const NodeMetricInfo> node_metric_table();  // in the order of NodeMetric
// The label values of slot `index` of a metric, 0 <= index < info.slots, in the order of info.labels.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> labels_of(const MetricInfo& info,
                                                                         std::size_t index);
// A slot's raw value in the metric's unit: nanoseconds become seconds.
[[nodiscard]] double exposed_value(const MetricInfo& info, std::uint64_t raw);
// Changes whenever the layout of the page does.
[[nodiscard]] std::uint64_t metrics_layout_id();
// docs/METRICS.md, whole.
[[nodiscard]] std::string metrics_document();

}  // namespace terrace
