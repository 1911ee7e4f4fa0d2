#include "daemon/replay_command.hpp"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "allocator/replay/trace_file.hpp"
#include "runtime/device.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {
namespace {

constexpr Bytes kSmallestDevice = 256_MiB;
constexpr Bytes kDeviceStep = 64_MiB;
constexpr Bytes kGranularity = 2_MiB;  // of a GPU: so the emulated device rounds as one would

constexpr int kFailed = 1;
constexpr int kRefused = 2;

int say(const Error& error, int code) {
  std::fprintf(stderr, "terrace: %s\n", error.text.c_str());
  return code;
}

Result<std::optional<Bytes>> budget_of(const ReplayOptions& options) {
  if (options.budget.empty()) return std::optional<Bytes>();
  const auto bytes = parse_bytes(options.budget);
  if (!bytes) return Error{bytes.error().code, "--budget: " + bytes.error().text};
  if (*bytes == 0_B) return Error{Errc::kInvalidArgument, "--budget: 0 bytes; use a size like \"40GiB\""};
  return std::optional<Bytes>(*bytes);
}

// What is replayed, and on what. The device goes last.
struct Setting {
  std::unique_ptr<Device> device;  // none for a plugin that makes its own
  std::unique_ptr<ReplayedAllocator> allocator;
  ReplayPlace place;
};

Result<std::unique_ptr<Device>> device_for(const ReplayOptions& options, std::optional<Bytes> budget,
                                           const TraceSummary& summary) {
  EmulatedOptions emulated;
  const Bytes wanted = budget.value_or(2 * summary.peak_live_rounded);
  emulated.capacity = round_up(std::max(wanted, kSmallestDevice), kDeviceStep);
  emulated.granularity = kGranularity;
  return open_device(options.device, emulated);
}

// A device that somebody else uses too has less to give than it has.
Result<Bytes> budget_on(const Device& device, std::optional<Bytes> asked) {
  if (asked) return *asked;
  const auto memory = device.memory();
  if (!memory) return memory.error();
  return round_down(std::min(device.info().capacity, memory->free), device.info().granularity);
}

Result<Setting> set_up(const ReplayOptions& options, std::optional<Bytes> asked,
                       const TraceSummary& summary) {
  Setting setting;
  auto device = device_for(options, asked, summary);
  if (!device) return std::move(device).error();
  const auto budget = budget_on(**device, asked);
  if (!budget) return budget.error();
  setting.place = {options.trace, (*device)->info().kind, *budget};
  setting.device = std::move(*device);
  auto allocator = [&]() -> Result<std::unique_ptr<ReplayedAllocator>> {
    if (options.allocator == "terrace") return replay_on_pool(*setting.device, *budget);
    if (options.allocator == "baseline") return replay_on_device(*setting.device, *budget);
    const bool on_host = setting.place.device == "emulated";
    const int number = on_host ? -1 : setting.device->info().id.index;
    setting.device.reset();  // it opens its own
    if (on_host) setting.place.device = "host";
    return replay_on_plugin(options.allocator, number, *budget);
  }();
  if (!allocator) return std::move(allocator).error();
  setting.allocator = std::move(*allocator);
  return setting;
}

struct Times {
  const char* name;
  const LatencyHistogram& histogram;
};
struct Percentile {
  const char* name;
  double share;
};
constexpr Percentile kPercentiles[] = {{"p50", 0.50}, {"p90", 0.90}, {"p99", 0.99}};

std::string time_text(Nanoseconds time) {
  char text[32];
  const auto count = static_cast<double>(time.count());
  if (count < 1e4) {
    std::snprintf(text, sizeof text, "%.0f ns", count);
  } else if (count < 1e7) {
    std::snprintf(text, sizeof text, "%.1f us", count * 1e-3);
  } else {
    std::snprintf(text, sizeof text, "%.1f ms", count * 1e-6);
  }
  return text;
}

std::string line_of(const Times& times) {
  std::string line = std::string(times.name) + ":";
  line.resize(12, ' ');
  for (const Percentile& percentile : kPercentiles) {
    line +=
        std::string(percentile.name) + " " + time_text(times.histogram.percentile(percentile.share)) + ", ";
  }
  return line + "max " + time_text(times.histogram.max()) + "\n";
}

nlohmann::ordered_json json_of(const LatencyHistogram& histogram) {
  nlohmann::ordered_json json;
  json["count"] = histogram.count();
  for (const Percentile& percentile : kPercentiles) {
    json[std::string(percentile.name) + "_ns"] = histogram.percentile(percentile.share).count();
  }
  json["max_ns"] = histogram.max().count();
  return json;
}

}  // namespace

std::string replay_text(const ReplayPlace& place, const trace::Header& header, const TraceSummary& summary,
                        const ReplayReport& report) {
  char text[256];
  std::string out = place.trace + ": " + name_of(header.layer) + " of " + header.process + " on " +
                    header.device_kind + "; " + std::to_string(summary.allocations) + " allocations, " +
                    std::to_string(summary.frees) + " frees, " + std::to_string(summary.streams) +
                    " streams, " + std::to_string(summary.threads) + " threads";
  std::snprintf(text, sizeof text, ", %.1f s%s\n", summary.seconds, summary.torn ? ", broken off" : "");
  out += text;
  out += report.allocator + " on " + place.device + ", budget " + format_bytes(place.budget) + "\n";
  out += "live:       peak " + format_bytes(report.peak_live) + ", " +
         format_bytes(report.peak_live_rounded) + " in units of 512 B\n";
  if (report.peak_reserved == 0_B) {
    out += "reserved:   not known\n";
  } else {
    std::snprintf(text, sizeof text, ", %.4f of peak live; %.2f%% of what was held at the peak was unused\n",
                  report.reserved_ratio(), 100 * report.fragmentation());
    out += "reserved:   peak " + format_bytes(report.peak_reserved) + text;
  }
  if (report.failures != 0) {
    out += "failures:   " + std::to_string(report.failures) + " allocations refused, the largest " +
           format_bytes(report.largest_failure) + "\n";
  }
  out += line_of({"allocate", report.allocate_time}) + line_of({"free", report.free_time});
  std::snprintf(text, sizeof text, "total:      %.3f s in %llu calls\n", report.seconds,
                static_cast<unsigned long long>(report.allocations + report.frees));
  return out + text;
}

std::string replay_json(const ReplayPlace& place, const trace::Header& header, const TraceSummary& summary,
                        const ReplayReport& report) {
  nlohmann::ordered_json json;
  json["trace"] = place.trace;
  json["recorded"] = {{"process", header.process},
                      {"device", header.device_kind},
                      {"layer", name_of(header.layer)},
                      {"allocations", summary.allocations},
                      {"frees", summary.frees},
                      {"streams", summary.streams},
                      {"threads", summary.threads},
                      {"seconds", summary.seconds},
                      {"torn", summary.torn},
                      {"peak_live_bytes", summary.peak_live.count()},
                      {"largest_bytes", summary.largest.count()}};
  json["allocator"] = report.allocator;
  json["device"] = place.device;
  json["budget_bytes"] = place.budget.count();
  json["allocations"] = report.allocations;
  json["frees"] = report.frees;
  json["failures"] = report.failures;
  json["largest_failure_bytes"] = report.largest_failure.count();
  json["peak_live_bytes"] = report.peak_live.count();
  json["peak_live_rounded_bytes"] = report.peak_live_rounded.count();
  json["peak_reserved_bytes"] = report.peak_reserved.count();
  json["reserved_at_peak_bytes"] = report.reserved_at_peak.count();
  json["reserved_ratio"] = report.reserved_ratio();
  json["fragmentation"] = report.fragmentation();
  json["allocate"] = json_of(report.allocate_time);
  json["free"] = json_of(report.free_time);
  json["seconds"] = report.seconds;
  return json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

int replay_command(const ReplayOptions& options) {
  const auto asked = budget_of(options);
  if (!asked) return say(asked.error(), kRefused);
  auto first = open_trace(options.trace);
  if (!first) return say(first.error(), kRefused);
  const auto summary = summarize(*first);
  if (!summary) return say(summary.error(), kRefused);
  auto setting = set_up(options, *asked, *summary);
  if (!setting) {
    const Errc code = setting.error().code;
    return say(setting.error(),
               code == Errc::kInvalidArgument || code == Errc::kNotFound ? kRefused : kFailed);
  }
  auto reader = open_trace(options.trace);
  if (!reader) return say(reader.error(), kRefused);
  const auto report = replay(*reader, *setting->allocator);
  if (!report) return say(report.error(), kFailed);
  const auto write = options.form == ReportForm::kJson ? replay_json : replay_text;
  const std::string out = write(setting->place, first->header(), *summary, *report);
  std::printf("%s%s", out.c_str(), options.form == ReportForm::kJson ? "\n" : "");
  return 0;
}

}  // namespace terrace
