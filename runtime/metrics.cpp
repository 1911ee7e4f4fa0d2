#include "runtime/metrics.hpp"

#include <pthread.h>

#include <mutex>
#include <new>

namespace terrace {
namespace {

constinit MetricsPage private_page;  // and every name of a site group that this process has given
constinit std::mutex naming;

// A child shares the parent's mapped page after fork; what it counts is its own. Another thread of the parent
// may have held the lock.
void start_again_in_child() {
  new (&naming) std::mutex;
  private_page.clear();
  detail::live_page.store(&private_page, std::memory_order_release);
}

template <typename Enum>
const char* label_value(std::size_t index) {
  return name_of(static_cast<Enum>(index));
}
// The names of these two are defined beside the device and the copy engine, which the preload library doesn't
// link; a test holds both spellings together.
template <>
const char* label_value<Direction>(std::size_t index) {
  constexpr std::array kNames = {"h2d", "d2h", "d2d", "peer"};
  static_assert(kNames.size() == kDirectionCount);
  return kNames[index];
}
template <>
const char* label_value<CopyReason>(std::size_t index) {
  constexpr std::array kNames = {"spill", "restore", "offload", "fetch", "expert", "optimizer"};
  static_assert(kNames.size() == kCopyReasonCount);
  return kNames[index];
}

template <typename Set>
struct LabelInfos;
template <typename... Enums>
struct LabelInfos<LabelSet<Enums...>> {
  static constexpr std::array<LabelInfo, sizeof...(Enums)> kInfos = {
      LabelInfo{LabelTraits<Enums>::kName, LabelTraits<Enums>::kCount, &label_value<Enums>}...};
};

constexpr MetricInfo kTable[] = {
#define METRIC(id, name, type, unit, labels, help)                                             \
  MetricInfo{"terrace_" #name,                                                                 \
             MetricType::k##type,                                                              \
             MetricUnit::k##unit,                                                              \
             help,                                                                             \
             std::span<const LabelInfo>(LabelInfos<MetricTraits<Metric::id>::Labels>::kInfos), \
             first_slot(Metric::id),                                                           \
             kMetricSlotCounts[static_cast<std::size_t>(Metric::id)]},
#define NODE_METRIC(id, name, type, unit, labels, help)
#include "runtime/metrics.def"
#undef METRIC
#undef NODE_METRIC
};

constexpr NodeMetricInfo kNodeTable[] = {
#define METRIC(id, name, type, unit, labels, help)
#define NODE_METRIC(id, name, type, unit, labels, help) \
  NodeMetricInfo{"terrace_" #name, MetricType::k##type, MetricUnit::k##unit, labels, help},
#include "runtime/metrics.def"
#undef METRIC
#undef NODE_METRIC
};

std::uint64_t mix(std::uint64_t hash, std::string_view text) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return (hash ^ 0xff) * 0x100000001b3ULL;
}

const char* text_of(MetricType type) { return type == MetricType::kCounter ? "counter" : "gauge"; }
const char* text_of(MetricUnit unit) {
  switch (unit) {
    case MetricUnit::kCount:
      return "count";
    case MetricUnit::kBytes:
      return "bytes";
    case MetricUnit::kSeconds:
      return "seconds";
    case MetricUnit::kRatio:
      return "ratio";
  }
  return "count";
}

std::string label_cell(const MetricInfo& info) {
  std::string cell = "`job`";
  for (const LabelInfo& label : info.labels) cell += std::string(", `") + label.name + "`";
  return cell;
}

void append_row(std::string& text, const char* name, MetricType type, MetricUnit unit,
                const std::string& labels, const char* help) {
  text += std::string("| `") + name + "` | " + text_of(type) + " | " + text_of(unit) + " | " + labels +
          " | " + help + " |\n";
}

// A row for each label and set of values; `reason` means one thing for transfers and another for stalls.
void append_label_values(std::string& text) {
  std::vector<std::pair<std::string, std::string>> rows;  // label and values, metrics
  for (const MetricInfo& info : kTable) {
    for (const LabelInfo& label : info.labels) {
      std::string values;
      for (std::size_t i = 0; i < label.count; ++i) {
        values += (i ? ", `" : "`") + std::string(label.value(i)) + "`";
      }
      const std::string row = std::string("| `") + label.name + "` | " + values + " | ";
      std::size_t at = 0;
      while (at < rows.size() && rows[at].first != row) ++at;
      if (at == rows.size()) rows.emplace_back(row, "");
      rows[at].second += (rows[at].second.empty() ? "`" : ", `") + std::string(info.name) + "`";
    }
  }
  for (const auto& [row, metrics] : rows) text += row + metrics + " |\n";
}

}  // namespace

namespace detail {
constinit std::atomic<MetricsPage*> live_page{&private_page};
}  // namespace detail

const char* name_of(MetricKind kind) {
  switch (kind) {
    case MetricKind::kMatmul:
      return "matmul";
    case MetricKind::kGmm:
      return "gmm";
    case MetricKind::kAttention:
      return "attention";
    case MetricKind::kScan:
      return "scan";
  }
  return "?";
}

const char* name_of(FetchOutcome outcome) {
  switch (outcome) {
    case FetchOutcome::kHit:
      return "hit";
    case FetchOutcome::kMiss:
      return "miss";
    case FetchOutcome::kLate:
      return "late";
  }
  return "?";
}

const char* name_of(FixedReason reason) {
  switch (reason) {
    case FixedReason::kCaptured:
      return "captured";
    case FixedReason::kExported:
      return "exported";
    case FixedReason::kRegistered:
      return "registered";
    case FixedReason::kPeer:
      return "peer";
  }
  return "?";
}

const char* name_of(StallReason reason) {
  switch (reason) {
    case StallReason::kRestoreLate:
      return "restore_late";
    case StallReason::kSpillBackpressure:
      return "spill_backpressure";
    case StallReason::kBudget:
      return "budget";
    case StallReason::kDaemon:
      return "daemon";
    case StallReason::kExpertLate:
      return "expert_late";
    case StallReason::kOptimizerLate:
      return "optimizer_late";
    case StallReason::kRouterWord:
      return "router_word";
  }
  return "?";
}

const char* name_of(ExpertWord word) {
  switch (word) {
    case ExpertWord::kLayer:
      return "layer";
    case ExpertWord::kRouter:
      return "router";
  }
  return "?";
}

const char* name_of(CallGroup group) {
  switch (group) {
    case CallGroup::kAllocate:
      return "allocate";
    case CallGroup::kFree:
      return "free";
    case CallGroup::kCopy:
      return "copy";
    case CallGroup::kLaunch:
      return "launch";
    case CallGroup::kQuery:
      return "query";
    case CallGroup::kMap:
      return "map";
    case CallGroup::kShare:
      return "share";
    case CallGroup::kOther:
      return "other";
  }
  return "?";
}

const char* name_of(FallbackReason reason) {
  constexpr std::array<const char*, kFallbackReasonCount> kNames = {
      "step_cancelled", "layer_order",     "micro_batches",   "changed_shape", "without_backward",
      "offered_twice",  "recompute_shape", "ddr_full",        "hbm_full",      "copy_failed",
      "damaged",        "not_back",        "changed_in_place"};
  const auto index = static_cast<std::size_t>(reason);
  return index < kNames.size() ? kNames[index] : "?";
}

const char* name_of(KeptContent content) { return content == KeptContent::kSaved ? "saved" : "output"; }

const char* name_of(KeptState state) {
  switch (state) {
    case KeptState::kSettled:
      return "settled";
    case KeptState::kLeaving:
      return "leaving";
    case KeptState::kArriving:
      return "arriving";
  }
  return "?";
}

const char* name_of(Estimate estimate) { return estimate == Estimate::kPredicted ? "predicted" : "measured"; }
const char* name_of(StreamedOutcome found) { return found == StreamedOutcome::kFound ? "found" : "loaded"; }
const char* name_of(LinkHold hold) { return hold == LinkHold::kLease ? "lease" : "collective"; }
const char* name_of(RingSlotState state) { return state == RingSlotState::kFree ? "free" : "held"; }

void MetricsPage::clear() {
  for (Slot& slot : slots_) slot.store(0, std::memory_order_relaxed);
  groups_.clear();
}

void MetricsPage::absorb(MetricsPage& from) {
  for (const MetricInfo& info : kTable) {
    for (std::size_t i = info.first_slot; i < info.first_slot + info.slots; ++i) {
      const std::uint64_t moved = from.slots_[i].exchange(0, std::memory_order_relaxed);
      if (moved == 0) continue;
      if (info.type == MetricType::kPeak) {
        std::uint64_t seen = slots_[i].load(std::memory_order_relaxed);
        while (seen < moved && !slots_[i].compare_exchange_weak(seen, moved, std::memory_order_relaxed)) {
        }
      } else {
        slots_[i].fetch_add(moved, std::memory_order_relaxed);
      }
    }
  }
  groups_.absorb(from.groups_);
}

void attach_metrics(MetricsPage& page) {
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, &start_again_in_child);
  const std::lock_guard lock(naming);
  detail::live_page.store(&page, std::memory_order_release);
  if (&page != &private_page) page.absorb(private_page);
}

void detach_metrics() { attach_metrics(private_page); }

std::size_t site_group_row(std::string_view group) {
  const std::string_view cut = group.substr(0, SiteGroups::kNameSize - 1);
  const std::lock_guard lock(naming);
  SiteGroups& names = private_page.site_groups();
  names.set_name(SiteGroups::kOther, SiteGroups::kOtherName);
  std::size_t row = 0;
  while (row < SiteGroups::kOther && !names.name(row).empty() && names.name(row) != cut) ++row;
  if (cut.empty()) row = SiteGroups::kOther;
  names.set_name(row, cut);
  for (const std::size_t named : {row, SiteGroups::kOther})
    metrics().site_groups().set_name(named, names.name(named));
  return row;
}

std::span<const MetricInfo> metric_table() { return kTable; }
const MetricInfo& info_of(Metric metric) { return kTable[static_cast<std::size_t>(metric)]; }
std::span<const NodeMetricInfo> node_metric_table() { return kNodeTable; }

std::vector<std::pair<std::string, std::string>> labels_of(const MetricInfo& info, std::size_t index) {
  std::vector<std::pair<std::string, std::string>> labels(info.labels.size());
  for (std::size_t i = info.labels.size(); i-- > 0;) {
    const LabelInfo& label = info.labels[i];
    labels[i] = {label.name, label.value(index % label.count)};
    index /= label.count;
  }
  return labels;
}

double exposed_value(const MetricInfo& info, std::uint64_t raw) {
  const auto value = static_cast<double>(raw);
  return info.unit == MetricUnit::kSeconds ? value / 1e9 : value;
}

std::uint64_t metrics_layout_id() {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const MetricInfo& info : kTable) {
    hash = mix(hash, info.name);
    hash = mix(hash, text_of(info.unit));
    hash = mix(hash, std::to_string(static_cast<int>(info.type)));
    for (const LabelInfo& label : info.labels) {
      hash = mix(hash, label.name);
      for (std::size_t i = 0; i < label.count; ++i) hash = mix(hash, label.value(i));
    }
  }
  hash = mix(hash, std::to_string(SiteGroups::kRows) + "x" + std::to_string(SiteGroups::kNameSize));
  return hash;
}

std::string metrics_document() {
  std::string text =
      "# Metrics\n\n"
      "`terraced` serves these at `/metrics` in the Prometheus text format. This page is generated from\n"
      "`runtime/metrics.def` by `terrace metrics-doc`; a test keeps it current.\n\n"
      "## Of the jobs\n\n"
      "Counted by each training process in a page that it shares with `terraced`, and added up by `job`.\n"
      "Counters keep what ended processes have counted. Of gauges named `..._peak_bytes` or\n"
      "`spill_error_...` the largest of a job's processes is shown; other gauges are summed over them.\n"
      "At most 64 jobs have a label of their own; later ones share `other`.\n\n"
      "| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n";
  for (const MetricInfo& info : kTable) {
    append_row(text, info.name, info.type, info.unit, label_cell(info), info.help);
  }
  text +=
      "\n## Of the node\n\nKnown to `terraced` itself, or named by the jobs.\n\n"
      "| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n";
  for (const NodeMetricInfo& info : kNodeTable) {
    std::string labels;
    for (const char* c = info.labels; *c != '\0'; ++c) {
      if (labels.empty()) labels = "`";
      labels += *c == ',' ? std::string("`,") : *c == ' ' ? std::string(" `") : std::string(1, *c);
    }
    if (!labels.empty()) labels += "`";
    append_row(text, info.name, info.type, info.unit, labels, info.help);
  }
  text += "\n## Labels\n\n| label | values | of |\n|---|---|---|\n";
  append_label_values(text);
  return text;
}

}  // namespace terrace
