#include "daemon/status_totals.hpp"

#include <algorithm>
#include <map>

#include "daemon/saturating_add.hpp"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;

struct Totals {
  std::size_t processes = 0;
  SlotValues values{};  // sums, and peaks of the largest process
  TierAmounts leased;
};

void add(Totals& totals, const ClientRegistry::Record& record) {
  ++totals.processes;
  for (const MetricInfo& info : metric_table()) {
    for (std::size_t i = info.first_slot; i < info.first_slot + info.slots; ++i) {
      const std::uint64_t value = record.values[i];
      totals.values[i] = info.type == MetricType::kPeak ? std::max(totals.values[i], value)
                                                        : saturating_add(totals.values[i], value);
    }
  }
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    totals.leased[tier] = Bytes(saturating_add(totals.leased[tier].count(), record.leased[tier].count()));
  }
}

enum class Zeros : std::uint8_t { kKept, kLeftOut };

// The slots of a metric, added up by its label `Label`: {"h2d": 12, ...}.
template <Metric M, typename Label>
Json by_label(const SlotValues& values, Zeros zeros) {
  const MetricInfo& info = info_of(M);
  std::array<std::uint64_t, LabelTraits<Label>::kCount> sums{};
  const char* (*name)(std::size_t index) = nullptr;
  for (std::size_t i = 0; i < info.slots; ++i) {
    std::size_t rest = i;
    for (std::size_t label = info.labels.size(); label-- > 0;) {  // the last label is the fastest
      const LabelInfo& of = info.labels[label];
      if (std::string_view(of.name) == LabelTraits<Label>::kName) {
        std::uint64_t& sum = sums[rest % of.count];
        sum = saturating_add(sum, values[info.first_slot + i]);
        name = of.value;
      }
      rest /= of.count;
    }
  }
  Json json = Json::object();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (sums[i] == 0 && zeros == Zeros::kLeftOut) continue;
    if (info.unit == MetricUnit::kSeconds) {
      json[name(i)] = exposed_value(info, sums[i]);
    } else {
      json[name(i)] = sums[i];
    }
  }
  return json;
}

template <Metric M>
Json all_of(const SlotValues& values) {
  const MetricInfo& info = info_of(M);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < info.slots; ++i) sum = saturating_add(sum, values[info.first_slot + i]);
  if (info.unit == MetricUnit::kSeconds) return exposed_value(info, sum);
  return sum;
}

Json job(const std::string& name, const Totals& totals) {
  const SlotValues& values = totals.values;
  Json json;
  json["job"] = name;
  json["processes"] = totals.processes;
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    json["leased"][name_of(static_cast<TierId>(tier))] = totals.leased[tier].count();
  }
  json["bytes"] = by_label<Metric::kTierBytes, TierId>(values, Zeros::kKept);
  json["budget"] = by_label<Metric::kBudgetBytes, TierId>(values, Zeros::kKept);
  json["peak_bytes"] = by_label<Metric::kTierPeakBytes, TierId>(values, Zeros::kKept);
  json["copied_bytes"] = by_label<Metric::kTransferBytes, Direction>(values, Zeros::kLeftOut);
  json["window_bytes"] = by_label<Metric::kLinkWindowBytes, Direction>(values, Zeros::kLeftOut);
  json["window_capacity_bytes"] = by_label<Metric::kLinkWindowCapacity, Direction>(values, Zeros::kLeftOut);
  json["fetches"] = by_label<Metric::kCacheFetches, FetchOutcome>(values, Zeros::kLeftOut);
  json["stall_seconds"] = by_label<Metric::kStallSeconds, StallReason>(values, Zeros::kLeftOut);
  json["steps"] = all_of<Metric::kSteps>(values);
  json["step_seconds"] = all_of<Metric::kStepSeconds>(values);
  json["evictions"] = all_of<Metric::kCacheEvictions>(values);
  json["fallbacks"] = all_of<Metric::kFallbacks>(values);
  json["damaged_blocks"] = all_of<Metric::kDamagedBlocks>(values);
  return json;
}

}  // namespace

Json job_totals(const ClientRegistry::View& view) {
  std::map<std::string, Totals> jobs;
  for (const auto& record : view.live) add(jobs[record.job], record);
  Json list = Json::array();
  for (const auto& [name, totals] : jobs) list.push_back(job(name, totals));
  return list;
}

Json device_totals(const ClientRegistry::View& view) {
  std::map<std::string, Totals> devices;
  for (const auto& record : view.live) add(devices[record.device], record);
  Json list = Json::array();
  for (const auto& [name, totals] : devices) {
    Json json;
    json["device"] = name;
    json["processes"] = totals.processes;
    json["leased_bytes"] = totals.leased[static_cast<std::size_t>(TierId::kHbm)].count();
    json["bytes"] = by_label<Metric::kTierBytes, TierId>(totals.values, Zeros::kKept)[name_of(TierId::kHbm)];
    list.push_back(json);
  }
  return list;
}

}  // namespace terrace
