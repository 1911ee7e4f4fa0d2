#include "daemon/now_json.hpp"

#include <cstdio>
#include <cstring>

#include "daemon/exposition.hpp"

namespace terrace {
namespace {

constexpr const char* kPrefix = "terrace_";

// Puts a comma before all but the first.
class Members {
 public:
  explicit Members(std::string& text) : text_(text) { text_ += '{'; }
  ~Members() { text_ += '}'; }
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;
  // Names need no escaping: clean_job_name() has seen them, or they are ours.
  std::string& next(const std::string& name) {
    if (!std::exchange(first_, false)) text_ += ',';
    return text_.append("\"").append(name).append("\":");
  }

 private:
  std::string& text_;
  bool first_ = true;
};

void append_tiers(std::string& text, const TierAmounts& amounts) {
  Members tiers(text);
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    if (amounts[tier] > Bytes()) {
      append_value(tiers.next(name_of(static_cast<TierId>(tier))), MetricUnit::kBytes, amounts[tier].count());
    }
  }
}

bool any(const SlotValues& values, std::size_t first, std::size_t count) {
  for (std::size_t i = first; i < first + count; ++i) {
    if (values[i] != 0) return true;
  }
  return false;
}

// The values from slot `first` on, nested by the labels from `depth` on.
void append_nested(std::string& text, const MetricInfo& info, const SlotValues& values, std::size_t first,
                   std::size_t depth) {
  if (depth == info.labels.size()) return append_value(text, info.unit, values[first]);
  std::size_t each = 1;
  for (std::size_t i = depth + 1; i < info.labels.size(); ++i) each *= info.labels[i].count;
  Members members(text);
  for (std::size_t i = 0; i < info.labels[depth].count; ++i) {
    const std::size_t at = first + i * each;
    if (any(values, at, each))
      append_nested(members.next(info.labels[depth].value(i)), info, values, at, depth + 1);
  }
}

void append_links(std::string& text, const LinkTotals::mapped_type& links) {
  Members devices(text);
  for (const auto& [device, sums] : links) {
    Members directions(devices.next(device));
    for (std::size_t d = 0; d < kLinkDirections; ++d)
      append_value(directions.next(name_of(static_cast<Direction>(d))), MetricUnit::kRatio, sums[d]);
  }
}

// `links`: null where there are none.
void append_counted(std::string& text, const SlotValues& values, const TierAmounts& leased,
                    std::size_t processes, const LinkTotals::mapped_type* links = nullptr) {
  Members members(text);
  append_value(members.next("processes"), MetricUnit::kCount, processes);
  append_tiers(members.next("lease_bytes"), leased);
  if (links != nullptr) append_links(members.next("link_lease_ratio"), *links);
  for (const MetricInfo& info : metric_table()) {
    if (any(values, info.first_slot, info.slots))
      append_nested(members.next(info.name + std::strlen(kPrefix)), info, values, info.first_slot, 0);
  }
}

}  // namespace

std::string now_json(const ClientRegistry::View& view, const std::string& version,
                     double seconds_since_epoch) {
  std::string text;
  {
    Members all(text);
    char time[32];
    std::snprintf(time, sizeof time, "%.3f", seconds_since_epoch);
    all.next("time") += time;
    all.next("version").append("\"").append(version).append("\"");
    append_value(all.next("clients"), MetricUnit::kCount, view.live.size());
    append_tiers(all.next("budget_bytes"), view.budget);
    append_tiers(all.next("lease_bytes"), view.leased);
    {
      Members jobs(all.next("jobs"));
      const LinkTotals links = links_of(view);
      for (const auto& [name, job] : view.jobs) {
        const auto of_job = links.find(name);
        append_counted(jobs.next(name), job.values, job.leased, job.clients,
                       of_job == links.end() ? nullptr : &of_job->second);
      }
    }
    Members devices(all.next("devices"));
    for (const auto& [name, device] : devices_of(view))
      append_counted(devices.next(name), device.values, device.leased, device.processes);
  }
  return text;
}

}  // namespace terrace
