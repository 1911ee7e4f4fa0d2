#include "examples/moe_trainer/report.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {

constexpr std::size_t kMeasuringSteps = 2;
constexpr int kBarWidth = 24;

std::string hex_of(float loss) {
  char text[40];
  std::snprintf(text, sizeof text, "%a", static_cast<double>(loss));
  return text;
}

std::string hex_of(std::uint64_t fingerprint) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(fingerprint));
  return text;
}

// What only some runs have.
void add_more(nlohmann::ordered_json& report, const RunRecord& record) {
  if (!record.evaluations.empty()) {
    auto& all = report["evaluations"] = nlohmann::ordered_json::array();
    for (const Evaluation& one : record.evaluations) {
      all.push_back({{"step", one.step}, {"loss", one.loss}, {"perplexity", one.perplexity()}});
    }
  }
  if (record.base) {
    report["base_fingerprint"] = hex_of(record.base->fingerprint);
    report["base_fingerprint_after"] = hex_of(record.base->fingerprint_after);
  }
}

}  // namespace

MemoryPeaks RunRecord::take_peaks(Session& session) {
  const PoolUsage hbm = session.hbm_usage();
  const MemoryPeaks now{hbm.mapped_peak, hbm.live_peak, session.ddr_usage().mapped_peak};
  peaks.hbm_mapped = std::max(peaks.hbm_mapped, now.hbm_mapped);
  peaks.hbm_live = std::max(peaks.hbm_live, now.hbm_live);
  peaks.ddr_mapped = std::max(peaks.ddr_mapped, now.ddr_mapped);
  session.reset_peaks();
  return now;
}

namespace {

nlohmann::ordered_json json_of(const Position& position) {
  return {{"forward_seconds", position.forward_seconds},
          {"backward_seconds", position.backward_seconds},
          {"forward_peak", position.forward_peak.count()},
          {"backward_peak", position.backward_peak.count()}};
}

// What a plan is made of, for programs that judge the plan: seconds, bytes, bytes a second.
nlohmann::ordered_json json_of(const Snapshot& snapshot, const Session& session) {
  nlohmann::ordered_json json = {{"micro_batches", snapshot.micro_batches},
                                 {"other_seconds", snapshot.other_seconds},
                                 {"hbm_budget", snapshot.hbm_budget.count()},
                                 {"hbm_cache_limit", snapshot.hbm_cache_limit.count()},
                                 {"ddr_cache_limit", snapshot.ddr_cache_limit.count()},
                                 {"d2h_bytes_per_second", snapshot.d2h_bytes_per_second},
                                 {"h2d_bytes_per_second", snapshot.h2d_bytes_per_second},
                                 {"both_bytes_per_second", snapshot.both_bytes_per_second},
                                 {"head", json_of(snapshot.head)}};
  auto& layers = json["layers"] = nlohmann::ordered_json::array();
  for (const Position& position : snapshot.layers) layers.push_back(json_of(position));
  auto& sites = json["sites"] = nlohmann::ordered_json::array();
  for (const SiteCost& site : snapshot.sites) {
    sites.push_back({{"layer", site.layer},
                     {"group", session.site(site.site).group},
                     {"bytes", site.bytes.count()},
                     {"travel_bytes", travelling(site).count()},
                     {"recompute_seconds", site.recompute_seconds},
                     {"ready_seconds", site.ready_seconds}});
  }
  return json;
}

// Of the bytes that the link could have carried in its windows, by direction; null where no step was timed.
nlohmann::ordered_json json_of(const LinkUse::Ways& windows) {
  nlohmann::ordered_json json;
  for (const Direction direction : {Direction::kD2H, Direction::kH2D}) {
    const LinkUse::Way& way = windows[static_cast<std::size_t>(direction)];
    auto& share = json[name_of(direction)];
    if (way.capacity > 0_B)
      share = static_cast<double>(way.moved.count()) / static_cast<double>(way.capacity.count());
  }
  return json;
}

// By reason, those that happened.
nlohmann::ordered_json json_of(const std::array<std::uint64_t, kFallbackReasonCount>& fallbacks) {
  auto json = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < fallbacks.size(); ++i)
    if (fallbacks[i] > 0) json[name_of(static_cast<FallbackReason>(i))] = fallbacks[i];
  return json;
}

void add_plan(nlohmann::ordered_json& report, const Session& session) {
  report["plan"] = session.plan_summary();
  if (const Plan* plan = session.plan()) {
    const Prediction& prediction = plan->prediction;
    report["predicted_ms"] = prediction.step_seconds * 1e3;
    report["predicted_residual_share"] = prediction.residual_share;
    report["predicted_stall_ms"] = prediction.stall_seconds * 1e3;
    report["predicted_hbm_peak"] = prediction.hbm_peak.count();
    report["predicted_ddr_peak"] = prediction.ddr_peak.count();
    report["predicted_link_window_used"] = prediction.link_window_used;
  }
  if (const auto error = session.prediction_error()) {
    report["prediction_error"] = {{"step_share", error->step_share},
                                  {"stall_seconds", error->stall_seconds},
                                  {"hbm_bytes", error->hbm_bytes},
                                  {"ddr_bytes", error->ddr_bytes}};
  }
  if (const Snapshot* snapshot = session.snapshot())
    report["swapcore_snapshot"] = json_of(*snapshot, session);
}

}  // namespace

double Evaluation::perplexity() const { return std::exp(loss); }

double RunRecord::ms_per_step() const {
  const std::size_t skipped = step_seconds.size() > kMeasuringSteps ? kMeasuringSteps : 0;
  std::vector<double> steps(step_seconds.begin() + static_cast<std::ptrdiff_t>(skipped), step_seconds.end());
  if (steps.empty()) return 0;
  const auto middle = steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2);
  std::nth_element(steps.begin(), middle, steps.end());
  return *middle * 1e3;
}

double RunRecord::tokens_per_second() const {
  const double ms = ms_per_step();
  return ms > 0 ? static_cast<double>(tokens_per_step) * 1e3 / ms : 0;
}

void write_report(const std::string& path, const RunRecord& record, const Session& session) {
  const DeviceInfo& device = session.device().info();
  const PoolUsage hbm = session.hbm_usage();
  const SessionCounters counters = session.counters();
  nlohmann::ordered_json report;
  report["device"] = device.kind;
  report["name"] = device.name;
  report["budget_bytes"] = hbm.budget.count();
  report["steps"] = record.losses.size();
  report["ms_per_step"] = record.ms_per_step();
  report["tokens_per_second"] = record.tokens_per_second();
  report["hbm_peak_bytes"] = std::max(record.peaks.hbm_mapped, hbm.mapped_peak).count();
  report["hbm_live_peak_bytes"] = std::max(record.peaks.hbm_live, hbm.live_peak).count();
  report["ddr_peak_bytes"] = std::max(record.peaks.ddr_mapped, session.ddr_usage().mapped_peak).count();
  report["cache_hits"] = counters.hits;
  report["cache_misses"] = counters.misses;
  report["cache_late"] = counters.late;
  report["cache_evictions"] = counters.evictions;
  report["spilled_bytes"] = counters.spilled.count();
  report["restored_bytes"] = counters.restored.count();
  report["stall_seconds"] = counters.stall_seconds;
  if (session.policy().swapcore.spill_format != SpillFormat::kExact)
    report["spill_error"] = {{"largest", counters.spill_error_largest}, {"mean", counters.spill_error_mean}};
  report["fallbacks"] = json_of(counters.fallbacks);
  report["link_window_used"] = json_of(counters.link_windows);
  if (record.streamed) {
    report["experts_resident_bytes"] = record.streamed->experts_resident.count();
    report["experts_ddr_bytes"] = record.streamed->experts_streamed.count();
    report["experts_fetched_bytes"] = record.streamed->experts_in.count();
    report["experts_nvme_bytes"] = record.streamed->experts_nvme.count();
    report["experts_from_nvme_bytes"] = record.streamed->experts_from_nvme.count();
    report["experts_kept_bytes"] = record.streamed->experts_kept.count();
    report["experts_from_kept_bytes"] = record.streamed->experts_from_kept.count();
    if (!record.streamed->experts_load.empty()) {
      report["experts_load"] = record.streamed->experts_load;
      report["experts_fired_share"] = record.streamed->experts_fired_share;
      auto& share = report["experts_break_even_share"];
      if (record.streamed->experts_break_even_share) share = *record.streamed->experts_break_even_share;
    }
    report["state_fetched_bytes"] = record.streamed->state_in.count();
    report["state_written_bytes"] = record.streamed->state_out.count();
    report["state_nvme_bytes"] = record.streamed->state_nvme.count();
    report["state_from_nvme_bytes"] = record.streamed->state_from_nvme.count();
    report["state_to_nvme_bytes"] = record.streamed->state_to_nvme.count();
    report["expert_stall_seconds"] = counters.expert_stall_seconds;
    report["router_stall_seconds"] = counters.router_stall_seconds;
    report["optimizer_stall_seconds"] = counters.optimizer_stall_seconds;
  }
  report["losses"] = record.losses;
  auto& hex = report["losses_hex"] = nlohmann::ordered_json::array();
  for (const float loss : record.losses) hex.push_back(hex_of(loss));
  auto& by_step = report["by_step"] = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < record.losses.size(); ++i) {
    const MemoryPeaks& peaks = record.step_peaks[i];
    by_step.push_back({{"ms", record.step_seconds[i] * 1e3},
                       {"hbm_peak_bytes", peaks.hbm_mapped.count()},
                       {"hbm_live_peak_bytes", peaks.hbm_live.count()},
                       {"ddr_peak_bytes", peaks.ddr_mapped.count()}});
  }
  add_more(report, record);
  add_plan(report, session);

  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << report.dump(1) << '\n';
  file.close();
  if (!file) {
    throw Failure(ExitCode::kFailed, path + ": cannot write the result: " + std::strerror(errno) +
                                         "; check the path and the space on the disk");
  }
}

Progress::Progress(Show show, std::int64_t steps)
    : visible_(show == Show::kOnTerminal && isatty(STDERR_FILENO) == 1), steps_(steps) {}

Progress::~Progress() {
  if (drawn_) std::fputc('\n', stderr);
}

void Progress::update(std::int64_t step, const RunRecord& record) {
  if (!visible_ || record.losses.empty()) return;
  const int filled = static_cast<int>(kBarWidth * step / std::max<std::int64_t>(1, steps_));
  const auto left = static_cast<long>(static_cast<double>(steps_ - step) * record.ms_per_step() / 1e3);
  const std::string bar = std::string(static_cast<std::size_t>(filled), '=') +
                          std::string(static_cast<std::size_t>(kBarWidth - filled), ' ');
  std::fprintf(stderr, "\r\033[Kstep %ld/%ld [%s] loss %.4f  %.0f ms/step  %.0f tokens/s  %ld:%02ld left",
               static_cast<long>(step), static_cast<long>(steps_), bar.c_str(),
               static_cast<double>(record.losses.back()), record.ms_per_step(), record.tokens_per_second(),
               left / 60, left % 60);
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace terrace::trainer
