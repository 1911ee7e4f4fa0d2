// What the registry knows, in the Prometheus text format: the table of runtime/metrics.def by job, and what
// terraced knows of devices and of the node.
//
// A scrape reads every page once, then writes names and labels from a cache and numbers behind them: counts
// and bytes as integers, seconds with nine digits, nothing rounded. Series of one job appear with the job and
// stay.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "daemon/client_registry.hpp"

namespace terrace {

inline constexpr std::size_t kMaxDevices = 64;  // device labels; processes on others share "other"

// What the live processes on one device hold.
struct DeviceTotals {
  SlotValues values{};  // as JobTotals::values
  TierAmounts leased;
  std::size_t processes = 0;
};
[[nodiscard]] std::map<std::string, DeviceTotals> devices_of(const ClientRegistry::View& view);

// Leases of link time, in billionths, by job, device and direction: of live processes.
using LinkTotals = std::map<std::string, std::map<std::string, std::array<std::uint64_t, kLinkDirections>>>;
[[nodiscard]] LinkTotals links_of(const ClientRegistry::View& view);

// Appends a metric's raw value as both formats print it.
void append_value(std::string& text, MetricUnit unit, std::uint64_t raw);

class Exposition {
 public:
  // Precondition: the registry outlives the exposition.
  explicit Exposition(ClientRegistry& registry) : registry_(registry) {}
  // Appends every family. From any thread.
  void write(std::string& text);

 private:
  using Clock = std::chrono::steady_clock;
  struct Job {
    std::string names;                                   // of all slots: `terrace_x{job="a",tier="hbm"} `
    std::array<std::uint32_t, kMetricSlots + 1> ends{};  // slot i: names[ends[i], ends[i + 1])
    SlotValues last{};
    std::size_t processes = 0;
    Clock::time_point changed;
  };
  [[nodiscard]] Job& job(const std::string& label);
  void write_counted(std::string& text, const ClientRegistry::View& view);
  static void write_groups(std::string& text, const ClientRegistry::View& view);
  void write_jobs(std::string& text, const ClientRegistry::View& view);

  ClientRegistry& registry_;
  std::mutex mutex_;
  std::map<std::string, Job> jobs_;
};

}  // namespace terrace
