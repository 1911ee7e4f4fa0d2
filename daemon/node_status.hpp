// A status reply (daemon/status_json.hpp) as values, for the subcommands that reckon with it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/lease_book.hpp"
#include "runtime/result.hpp"

namespace terrace {

// By a label's value; what is not there is zero.
template <typename T>
class ByName {
 public:
  void set(const std::string& name, T value) { values_[name] = value; }
  [[nodiscard]] T operator[](std::string_view name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? T{} : found->second;
  }
  [[nodiscard]] T sum() const {
    T total{};
    for (const auto& [name, value] : values_) total += value;
    return total;
  }
  [[nodiscard]] const std::map<std::string, T, std::less<>>& all() const { return values_; }

 private:
  std::map<std::string, T, std::less<>> values_;
};
using Counts = ByName<std::uint64_t>;  // bytes or counts
using Seconds = ByName<double>;

struct JobStatus {
  std::string job;
  std::uint64_t processes = 0;
  Counts leased, bytes, budget, peak_bytes;                                   // by tier
  Counts copied_bytes, window_bytes, window_capacity_bytes;                   // by direction
  Counts fetches;                                                             // by outcome
  Seconds stall_seconds;                                                      // by reason
  std::uint64_t steps = 0, evictions = 0, fallbacks = 0, damaged_blocks = 0;  // steps of all processes
  double step_seconds = 0;
};

struct DeviceStatus {
  std::string device;
  std::uint64_t processes = 0, leased_bytes = 0, bytes = 0;  // of HBM
  std::uint64_t budget_bytes = 0;                            // to lease in all
};

struct ProcessStatus {
  int pid = 0;
  std::string job, device, run;
  std::uint64_t hbm_peak_bytes = 0, ddr_peak_bytes = 0, transfer_bytes = 0;
  std::uint64_t cache_hits = 0, cache_misses = 0, cache_late = 0, steps = 0;
  double stall_seconds = 0;
};

struct NodeStatus {
  int pid = 0;
  std::string version, socket, listen;  // listen is empty where metrics are not served
  Counts budget, leased;                // by tier
  std::uint64_t clients = 0;
  std::vector<DeviceStatus> devices;
  std::vector<JobStatus> jobs;
  std::vector<ProcessStatus> ended;  // the last ended first
};

// Values of a wrong type count as not there. Errors: kProtocol (not a status).
[[nodiscard]] Result<NodeStatus> node_status(const std::string& status_json);

}  // namespace terrace
