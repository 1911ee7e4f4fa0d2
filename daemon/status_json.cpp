#include "daemon/status_json.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "daemon/saturating_add.hpp"
#include "daemon/status_totals.hpp"
#include "runtime/wire.hpp"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;

Json by_tier(const TierAmounts& amounts) {
  Json json = Json::object();
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    json[name_of(static_cast<TierId>(tier))] = amounts[tier].count();
  }
  return json;
}

template <Metric M, typename... Args>
std::uint64_t slot(const SlotValues& values, Args... labels) {
  return values[first_slot(M) + MetricTraits<M>::Labels::index(labels...)];
}
template <Metric M>
std::uint64_t sum(const SlotValues& values) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < info_of(M).slots; ++i) total = saturating_add(total, values[first_slot(M) + i]);
  return total;
}
std::uint64_t fetches(const SlotValues& values, FetchOutcome outcome) {
  std::uint64_t total = 0;
  for (std::size_t kind = 0; kind < LabelTraits<MetricKind>::kCount; ++kind) {
    total += slot<Metric::kCacheFetches>(values, static_cast<MetricKind>(kind), outcome);
  }
  return total;
}

void add_summary(Json& json, const SlotValues& values) {
  json["hbm_peak_bytes"] = slot<Metric::kTierPeakBytes>(values, TierId::kHbm);
  json["ddr_peak_bytes"] = slot<Metric::kTierPeakBytes>(values, TierId::kDdr);
  json["transfer_bytes"] = sum<Metric::kTransferBytes>(values);
  json["cache_hits"] = fetches(values, FetchOutcome::kHit);
  json["cache_misses"] = fetches(values, FetchOutcome::kMiss);
  json["cache_late"] = fetches(values, FetchOutcome::kLate);
  json["stall_seconds"] = static_cast<double>(sum<Metric::kStallSeconds>(values)) / 1e9;
  json["steps"] = sum<Metric::kSteps>(values);
  json["passthrough_calls"] = sum<Metric::kPassthroughCalls>(values);
  json["refused_allocations"] = sum<Metric::kRefusedAllocations>(values);
  json["refused_bytes"] = sum<Metric::kRefusedBytes>(values);
  json["unknown_frees"] = sum<Metric::kUnknownFrees>(values);
}

std::string hex(std::uint64_t value) {
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[(value >> shift) & 15];
  return text;
}

Json process(const ClientRegistry::Record& record) {
  Json json;
  json["id"] = record.client;
  json["pid"] = record.pid;
  json["user"] = record.user;
  json["job"] = record.job;
  json["device"] = record.device;
  json["run"] = hex(record.run);
  json["leased"] = by_tier(record.leased);
  json["waiting"] = by_tier(record.waiting);
  for (std::size_t d = 0; d < kLinkDirections; ++d)
    json["link"][name_of(static_cast<Direction>(d))] = static_cast<double>(record.link[d]) / kLinkWhole;
  json["deaf"] = record.deaf;
  json["passthrough"] = record.course == Course::kPassthrough;
  add_summary(json, record.values);
  return json;
}

Json listed(const std::vector<ClientRegistry::Record>& records, std::uint64_t run) {
  Json list = Json::array();
  for (const auto& record : records) {
    if (run == 0 || record.run == run) list.push_back(process(record));
  }
  return list;
}

// Paths and devices may hold bytes that are no text.
std::string text_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

// Sets json[key] to as much of the list as the text has room for. A cut text would be no JSON.
void put(Json& json, const char* key, const Json& list) {
  Json& kept = json[key] = Json::array();
  std::size_t size = text_of(json).size();
  for (const Json& entry : list) {
    size += text_of(entry).size() + 1;
    if (size > kMaxWireText) return;
    kept.push_back(entry);
  }
}

Json run_summary(const ClientRegistry::View& view, std::uint64_t run) {
  SlotValues totals{};
  std::size_t processes = 0;
  for (const auto* records : {&view.live, &view.ended}) {
    for (const auto& record : *records) {
      if (record.run != run) continue;
      ++processes;
      for (const MetricInfo& info : metric_table()) {
        for (std::size_t i = info.first_slot; i < info.first_slot + info.slots; ++i) {
          totals[i] = info.type == MetricType::kPeak ? std::max(totals[i], record.values[i])
                                                     : saturating_add(totals[i], record.values[i]);
        }
      }
    }
  }
  Json json;
  json["processes"] = processes;
  add_summary(json, totals);
  return json;
}

}  // namespace

std::string status_json(const DaemonFacts& facts, const ClientRegistry::View& view, std::uint64_t run) {
  Json json;
  json["pid"] = facts.pid;
  json["version"] = facts.version;
  json["socket"] = facts.socket;
  json["listen"] = facts.listen;
  json["budget"] = by_tier(view.budget);
  json["leased"] = by_tier(view.leased);
  json["clients_total"] = view.clients;
  json["accounts"] = Json::array();
  for (const auto& account : view.accounts) {
    if (account.budget == Bytes() && account.leased == Bytes()) continue;
    json["accounts"].push_back({{"tier", name_of(account.tier)},
                                {"place", account.place},
                                {"budget", account.budget.count()},
                                {"leased", account.leased.count()},
                                {"withheld", account.withheld.count()}});
  }
  if (run != 0) json["run"] = run_summary(view, run);
  // In the order of what is missed most: every list is bounded, and the last are cut first.
  put(json, "devices", device_totals(view));
  put(json, "jobs", job_totals(view));
  put(json, "clients", listed(view.live, run));
  put(json, "ended", listed(view.ended, run));
  return text_of(json);
}

}  // namespace terrace
