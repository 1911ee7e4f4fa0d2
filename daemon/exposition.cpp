#include "daemon/exposition.hpp"

#include <time.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <string_view>

#include "daemon/saturating_add.hpp"

namespace terrace {
namespace {

constexpr std::size_t kLineEstimate = 96;

void append_number(std::string& text, std::uint64_t value) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  text.append(digits, end);
}

void append_head(std::string& text, const char* name, const char* help, MetricType type) {
  text.append("# HELP ").append(name).append(" ").append(help).append("\n# TYPE ").append(name);
  text.append(type == MetricType::kCounter ? " counter\n" : " gauge\n");
}

// Lines of one node metric. Labels need no escaping: clean_job_name() has seen them, or they are ours.
class Family {
 public:
  Family(std::string& text, NodeMetric metric)
      : text_(text), info_(node_metric_table()[static_cast<std::size_t>(metric)]) {
    append_head(text_, info_.name, info_.help, info_.type);
  }
  // `labels` without the braces; empty: none.
  void line(std::string_view labels, std::uint64_t raw) {
    text_.append(info_.name);
    if (!labels.empty()) text_.append("{").append(labels).append("}");
    text_.append(" ");
    append_value(text_, info_.unit, raw);
    text_.append("\n");
  }

 private:
  std::string& text_;
  const NodeMetricInfo& info_;
};

std::string label(const char* name, std::string_view value) {
  return std::string(name).append("=\"").append(value).append("\"");
}
std::string with_tier(const std::string& labels, std::size_t tier) {
  return (labels.empty() ? "" : labels + ",") + label("tier", name_of(static_cast<TierId>(tier)));
}

void write_tiers(Family& family, const std::string& labels, const TierAmounts& amounts) {
  for (std::size_t tier = 0; tier < kTierCount; ++tier)
    family.line(with_tier(labels, tier), amounts[tier].count());
}

void write_devices(std::string& text, const ClientRegistry::View& view) {
  const auto devices = devices_of(view);
  Family bytes(text, NodeMetric::kDeviceBytes);
  for (const auto& [name, device] : devices) {
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      std::uint64_t sum = 0;
      for (std::size_t pool = 0; pool < kPoolCount; ++pool)
        sum = saturating_add(sum, device.values[first_slot(Metric::kTierBytes) + tier * kPoolCount + pool]);
      bytes.line(with_tier(label("device", name), tier), sum);
    }
  }
  Family leases(text, NodeMetric::kDeviceLeaseBytes);
  for (const auto& [name, device] : devices) write_tiers(leases, label("device", name), device.leased);
  Family processes(text, NodeMetric::kDeviceProcesses);
  for (const auto& [name, device] : devices) processes.line(label("device", name), device.processes);
  std::map<std::string, std::uint64_t> withheld;
  for (const auto& [name, device] : devices) withheld[name] = 0;
  for (const auto& account : view.accounts) {
    if (account.tier == TierId::kHbm && (account.withheld > Bytes() || withheld.contains(account.place)))
      withheld[account.place] = account.withheld.count();
  }
  Family ended(text, NodeMetric::kWithheld);
  for (const auto& [name, bytes] : withheld) ended.line(label("device", name), bytes);
}

void write_links(std::string& text, const ClientRegistry::View& view) {
  Family family(text, NodeMetric::kLinkLease);
  for (const auto& [job, devices] : links_of(view)) {
    for (const auto& [device, sums] : devices) {
      for (std::size_t d = 0; d < kLinkDirections; ++d) {
        family.line(label("job", job) + "," + label("device", device) + "," +
                        label("direction", name_of(static_cast<Direction>(d))),
                    sums[d]);
      }
    }
  }
}

std::uint64_t cpu_nanoseconds() {
  timespec spent{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
  return static_cast<std::uint64_t>(spent.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(spent.tv_nsec);
}

std::uint64_t resident_bytes() {
  unsigned long total = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr) return 0;
  const int read = std::fscanf(file, "%lu %lu", &total, &resident);
  std::fclose(file);
  return read == 2 ? resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) : 0;
}

void write_node(std::string& text, const ClientRegistry::View& view) {
  Family budgets(text, NodeMetric::kNodeBudgetBytes);
  write_tiers(budgets, "", view.budget);
  Family(text, NodeMetric::kClients).line("", view.live.size());
  Family(text, NodeMetric::kClientsJoined).line("", view.joined_total);
  Family(text, NodeMetric::kDaemonCpu).line("", cpu_nanoseconds());
  Family(text, NodeMetric::kDaemonResident).line("", resident_bytes());
}

}  // namespace

std::map<std::string, DeviceTotals> devices_of(const ClientRegistry::View& view) {
  std::map<std::string, DeviceTotals> devices;
  for (const ClientRegistry::Record& record : view.live) {
    const bool known = devices.contains(record.device) || devices.size() < kMaxDevices;
    DeviceTotals& device = devices[known ? record.device : "other"];
    ++device.processes;
    for (std::size_t tier = 0; tier < kTierCount; ++tier) device.leased[tier] += record.leased[tier];
    for (const MetricInfo& info : metric_table()) {
      for (std::size_t slot = info.first_slot; slot < info.first_slot + info.slots; ++slot) {
        std::uint64_t& total = device.values[slot];
        total = info.type == MetricType::kPeak ? std::max(total, record.values[slot])
                                               : saturating_add(total, record.values[slot]);
      }
    }
  }
  return devices;
}

LinkTotals links_of(const ClientRegistry::View& view) {
  constexpr std::uint64_t kBillionths = 1'000'000'000 / kLinkWhole;
  LinkTotals links;
  for (const ClientRegistry::Record& record : view.live) {
    auto& sums = links[record.job][record.device];
    for (std::size_t d = 0; d < kLinkDirections; ++d) sums[d] += record.link[d] * kBillionths;
  }
  return links;
}

void append_value(std::string& text, MetricUnit unit, std::uint64_t raw) {
  if (unit != MetricUnit::kSeconds && unit != MetricUnit::kRatio) return append_number(text, raw);
  constexpr std::uint64_t kWhole = 1'000'000'000;
  append_number(text, raw / kWhole);
  std::uint64_t rest = raw % kWhole;
  if (rest == 0) return;
  char digits[] = ".000000000";
  for (std::size_t i = 9; i > 0; --i, rest /= 10) digits[i] = static_cast<char>('0' + rest % 10);
  text.append(digits, sizeof digits - 1);
}

Exposition::Job& Exposition::job(const std::string& label) {
  const auto [found, fresh] = jobs_.try_emplace(label);
  Job& job = found->second;
  if (!fresh) return job;
  for (const MetricInfo& info : metric_table()) {
    for (std::size_t i = 0; i < info.slots; ++i) {
      job.names.append(info.name).append("{job=\"").append(label).append("\"");
      for (const auto& [name, value] : labels_of(info, i))
        job.names.append(",").append(name).append("=\"").append(value).append("\"");
      job.names.append("} ");
      job.ends[info.first_slot + i + 1] = static_cast<std::uint32_t>(job.names.size());
    }
  }
  return job;
}

// What the processes count. A family's lines stand together, so families are the outer loop.
void Exposition::write_counted(std::string& text, const ClientRegistry::View& view) {
  struct Row {
    const Job* job;
    const SlotValues* values;
  };
  std::vector<Row> rows;
  for (const auto& [label, totals] : view.jobs) rows.push_back({&job(label), &totals.values});
  for (const MetricInfo& info : metric_table()) {
    append_head(text, info.name, info.help, info.type);
    for (const Row& row : rows) {
      for (std::size_t slot = info.first_slot; slot < info.first_slot + info.slots; ++slot) {
        const std::uint32_t begin = row.job->ends[slot];
        text.append(row.job->names, begin, row.job->ends[slot + 1] - begin);
        append_value(text, info.unit, (*row.values)[slot]);
        text.append("\n");
      }
    }
  }
}

void Exposition::write_groups(std::string& text, const ClientRegistry::View& view) {
  Family fetches(text, NodeMetric::kSiteGroupFetches);
  for (const auto& [name, totals] : view.jobs) {
    for (const auto& [group, counts] : totals.groups) {
      for (std::size_t i = 0; i < counts.size(); ++i) {
        const char* outcome = name_of(static_cast<FetchOutcome>(i));
        fetches.line(label("job", name) + "," + label("group", group) + "," + label("outcome", outcome),
                     counts[i]);
      }
    }
  }
}

void Exposition::write_jobs(std::string& text, const ClientRegistry::View& view) {
  const Clock::time_point now = Clock::now();
  Family leases(text, NodeMetric::kLeaseBytes);
  for (const auto& [name, totals] : view.jobs) write_tiers(leases, label("job", name), totals.leased);
  Family processes(text, NodeMetric::kJobProcesses);
  for (const auto& [name, totals] : view.jobs) processes.line(label("job", name), totals.clients);
  Family ages(text, NodeMetric::kPageAge);
  for (const auto& [name, totals] : view.jobs) {
    Job& known = job(name);
    if (known.last != totals.values || known.processes != totals.clients) {
      known.last = totals.values;
      known.processes = totals.clients;
      known.changed = now;
    }
    const auto age = std::chrono::duration_cast<std::chrono::nanoseconds>(now - known.changed).count();
    ages.line(label("job", name), totals.clients == 0 ? 0 : static_cast<std::uint64_t>(age));
  }
}

void Exposition::write(std::string& text) {
  const ClientRegistry::View view = registry_.view(ClientRegistry::Ended::kLeftOut);
  const std::lock_guard lock(mutex_);
  std::erase_if(jobs_, [&](const auto& known) { return !view.jobs.contains(known.first); });
  text.reserve(text.size() + (view.jobs.size() + 1) * kMetricSlots * kLineEstimate);
  write_counted(text, view);
  write_groups(text, view);
  write_jobs(text, view);
  write_devices(text, view);
  write_links(text, view);
  write_node(text, view);
}

}  // namespace terrace
