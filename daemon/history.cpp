#include "daemon/history.hpp"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "allocator/replay/replay.hpp"
#include "allocator/replay/trace_file.hpp"
#include "runtime/units.hpp"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostResult = std::size_t{256} << 20;  // bytes of a result file: far beyond any

std::string bytes(std::uint64_t count) { return format_bytes(Bytes(count)); }

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f s", value);
  return text;
}

void add(ProcessStatus& total, const ProcessStatus& process) {
  total.hbm_peak_bytes = std::max(total.hbm_peak_bytes, process.hbm_peak_bytes);
  total.ddr_peak_bytes = std::max(total.ddr_peak_bytes, process.ddr_peak_bytes);
  total.transfer_bytes += process.transfer_bytes;
  total.cache_hits += process.cache_hits;
  total.cache_misses += process.cache_misses;
  total.cache_late += process.cache_late;
  total.steps += process.steps;
  total.stall_seconds += process.stall_seconds;
}

bool is_no_run(const std::string& run) { return run.find_first_not_of('0') == std::string::npos; }

bool same(const EndedRun& run, const ProcessStatus& process) {
  return !is_no_run(run.run) && run.run == process.run && run.job == process.job;
}

// ---------------------------------------------------------------- files

// Reads it whole where it begins as an object does; empty where it doesn't.
std::string json_text(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  char first = 0;
  if (!(stream >> first) || first != '{') return {};
  stream.seekg(0, std::ios::end);
  if (stream.tellg() < 0 || static_cast<std::size_t>(stream.tellg()) > kMostResult) return {};
  stream.seekg(0);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

std::uint64_t whole(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number_unsigned() ? found->get<std::uint64_t>() : 0;
}
double number(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number() ? found->get<double>() : 0;
}

std::string result_text(const Json& json) {
  const std::string plan =
      json.contains("plan") && json["plan"].is_string() ? json["plan"].get<std::string>() : "";
  char pace[96];
  std::snprintf(pace, sizeof pace, "%llu steps, %.1f ms each, %.0f tokens/s\n",
                static_cast<unsigned long long>(whole(json, "steps")), number(json, "ms_per_step"),
                number(json, "tokens_per_second"));
  std::string text = pace;
  text += "HBM peak " + bytes(whole(json, "hbm_peak_bytes")) + " of " + bytes(whole(json, "budget_bytes")) +
          ", DDR peak " + bytes(whole(json, "ddr_peak_bytes")) + "; spilled " +
          bytes(whole(json, "spilled_bytes")) + ", restored " + bytes(whole(json, "restored_bytes")) + "\n";
  text += "cache " + std::to_string(whole(json, "cache_hits")) + " hits, " +
          std::to_string(whole(json, "cache_misses")) + " misses, " +
          std::to_string(whole(json, "cache_late")) + " late; stalled " +
          seconds(number(json, "stall_seconds")) + "\n";
  if (number(json, "predicted_ms") > 0) {
    std::snprintf(pace, sizeof pace, "predicted %.1f ms a step\n", number(json, "predicted_ms"));
    text += pace;
  }
  return plan.empty() ? text : text + "plan: " + plan + "\n";
}

std::string trace_text(const trace::Header& header, const TraceSummary& summary) {
  return "trace of " + header.process + ", " + trace::name_of(header.layer) + ", device " +
         header.device_kind + "\n" + std::to_string(summary.allocations) + " allocations and " +
         std::to_string(summary.frees) + " frees on " + std::to_string(summary.streams) + " streams in " +
         seconds(summary.seconds) + "\npeak of live bytes " + format_bytes(summary.peak_live) +
         ", largest block " + format_bytes(summary.largest) + "\n" +
         (summary.torn ? "the file broke off inside an event\n" : "");
}

}  // namespace

std::vector<EndedRun> ended_runs(const std::vector<ProcessStatus>& ended) {
  std::vector<EndedRun> runs;
  for (const ProcessStatus& process : ended) {
    auto found =
        std::find_if(runs.begin(), runs.end(), [&](const EndedRun& run) { return same(run, process); });
    if (found == runs.end())
      found = runs.insert(runs.end(), {.run = process.run, .job = process.job, .processes = 0, .total = {}});
    ++found->processes;
    add(found->total, process);
  }
  return runs;
}

std::string history_text(const std::vector<EndedRun>& runs) {
  if (runs.empty()) return "the daemon remembers no process that has ended\n";
  std::string text;
  for (const EndedRun& run : runs) {
    text += run.job + (is_no_run(run.run) ? "" : ", run " + run.run) + ", " + std::to_string(run.processes) +
            (run.processes == 1 ? " process" : " processes") + ": " + std::to_string(run.total.steps) +
            " steps, HBM peak " + bytes(run.total.hbm_peak_bytes) + ", DDR peak " +
            bytes(run.total.ddr_peak_bytes) + ", moved " + bytes(run.total.transfer_bytes) + ", cache " +
            std::to_string(run.total.cache_hits) + " hits, " + std::to_string(run.total.cache_misses) +
            " misses, " + std::to_string(run.total.cache_late) + " late, stalled " +
            seconds(run.total.stall_seconds) + "\n";
  }
  return text;
}

std::string history_json(const std::vector<EndedRun>& runs) {
  Json list = Json::array();
  for (const EndedRun& run : runs) {
    Json json;
    json["run"] = run.run;
    json["job"] = run.job;
    json["processes"] = run.processes;
    json["steps"] = run.total.steps;
    json["hbm_peak_bytes"] = run.total.hbm_peak_bytes;
    json["ddr_peak_bytes"] = run.total.ddr_peak_bytes;
    json["transfer_bytes"] = run.total.transfer_bytes;
    json["cache_hits"] = run.total.cache_hits;
    json["cache_misses"] = run.total.cache_misses;
    json["cache_late"] = run.total.cache_late;
    json["stall_seconds"] = run.total.stall_seconds;
    list.push_back(json);
  }
  return list.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<std::string> file_history(const std::string& file) {
  const std::string text = json_text(file);
  if (!text.empty()) {
    const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.contains("ms_per_step")) return result_text(json);
    return Error{Errc::kInvalidArgument,
                 file + ": no result of a run; give a file of moe_trainer --json or of terrace run --record"};
  }
  auto reader = open_trace(file);
  if (!reader) return reader.error();
  const trace::Header header = reader->header();
  const auto summary = summarize(*reader);
  if (!summary) return summary.error();
  return trace_text(header, *summary);
}

}  // namespace terrace
