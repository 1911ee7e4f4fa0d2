#include "daemon/node_status.hpp"

#include <nlohmann/json.hpp>

namespace terrace {
namespace {

using Json = nlohmann::json;

std::uint64_t count(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number_unsigned() ? found->get<std::uint64_t>() : 0;
}
double number(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number() ? found->get<double>() : 0;
}
std::string text(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : "";
}

Counts counts(const Json& json, const char* key) {
  Counts counts;
  if (!json.contains(key) || !json[key].is_object()) return counts;
  for (const auto& [name, value] : json[key].items()) counts.set(name, count(json[key], name.c_str()));
  return counts;
}
Seconds seconds(const Json& json, const char* key) {
  Seconds seconds;
  if (!json.contains(key) || !json[key].is_object()) return seconds;
  for (const auto& [name, value] : json[key].items()) seconds.set(name, number(json[key], name.c_str()));
  return seconds;
}

// The objects of a list.
std::vector<Json> objects(const Json& json, const char* key) {
  std::vector<Json> list;
  if (!json.contains(key) || !json[key].is_array()) return list;
  for (const Json& entry : json[key]) {
    if (entry.is_object()) list.push_back(entry);
  }
  return list;
}

JobStatus job_of(const Json& json) {
  JobStatus job;
  job.job = text(json, "job");
  job.processes = count(json, "processes");
  job.leased = counts(json, "leased");
  job.bytes = counts(json, "bytes");
  job.budget = counts(json, "budget");
  job.peak_bytes = counts(json, "peak_bytes");
  job.copied_bytes = counts(json, "copied_bytes");
  job.window_bytes = counts(json, "window_bytes");
  job.window_capacity_bytes = counts(json, "window_capacity_bytes");
  job.fetches = counts(json, "fetches");
  job.stall_seconds = seconds(json, "stall_seconds");
  job.steps = count(json, "steps");
  job.step_seconds = number(json, "step_seconds");
  job.evictions = count(json, "evictions");
  job.fallbacks = count(json, "fallbacks");
  job.damaged_blocks = count(json, "damaged_blocks");
  return job;
}

// Its budget is that of its account.
DeviceStatus device_of(const Json& json, const std::vector<Json>& accounts) {
  DeviceStatus device;
  device.device = text(json, "device");
  device.processes = count(json, "processes");
  device.leased_bytes = count(json, "leased_bytes");
  device.bytes = count(json, "bytes");
  for (const Json& account : accounts) {
    if (text(account, "tier") == "hbm" && text(account, "place") == device.device)
      device.budget_bytes = count(account, "budget");
  }
  return device;
}

ProcessStatus process_of(const Json& json) {
  ProcessStatus process;
  process.pid = static_cast<int>(count(json, "pid"));
  process.job = text(json, "job");
  process.device = text(json, "device");
  process.run = text(json, "run");
  process.hbm_peak_bytes = count(json, "hbm_peak_bytes");
  process.ddr_peak_bytes = count(json, "ddr_peak_bytes");
  process.transfer_bytes = count(json, "transfer_bytes");
  process.cache_hits = count(json, "cache_hits");
  process.cache_misses = count(json, "cache_misses");
  process.cache_late = count(json, "cache_late");
  process.stall_seconds = number(json, "stall_seconds");
  process.steps = count(json, "steps");
  return process;
}

}  // namespace

Result<NodeStatus> node_status(const std::string& status_json) {
  const Json json = Json::parse(status_json, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("budget"))
    return Error{Errc::kProtocol, "the daemon's answer is no status; is it of this version?"};
  NodeStatus status;
  status.pid = static_cast<int>(count(json, "pid"));
  status.version = text(json, "version");
  status.socket = text(json, "socket");
  status.listen = text(json, "listen");
  status.budget = counts(json, "budget");
  status.leased = counts(json, "leased");
  status.clients = count(json, "clients_total");
  for (const Json& entry : objects(json, "devices"))
    status.devices.push_back(device_of(entry, objects(json, "accounts")));
  for (const Json& entry : objects(json, "jobs")) status.jobs.push_back(job_of(entry));
  for (const Json& entry : objects(json, "ended")) status.ended.push_back(process_of(entry));
  return status;
}

}  // namespace terrace
