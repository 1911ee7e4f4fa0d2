#include "examples/moe_trainer/report.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

}  // namespace

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
  report["hbm_peak_bytes"] = hbm.mapped_peak.count();
  report["hbm_live_peak_bytes"] = hbm.live_peak.count();
  report["ddr_peak_bytes"] = session.ddr_usage().mapped_peak.count();
  report["cache_hits"] = counters.hits;
  report["cache_misses"] = counters.misses;
  report["cache_late"] = counters.late;
  report["cache_evictions"] = counters.evictions;
  report["spilled_bytes"] = counters.spilled.count();
  report["restored_bytes"] = counters.restored.count();
  report["stall_seconds"] = counters.stall_seconds;
  report["losses"] = record.losses;
  auto& hex = report["losses_hex"] = nlohmann::ordered_json::array();
  for (const float loss : record.losses) hex.push_back(hex_of(loss));
  report["plan"] = session.plan_summary();

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
