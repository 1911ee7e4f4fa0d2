#include "daemon/top/picture.hpp"

#include <algorithm>
#include <cstdio>

#include "runtime/units.hpp"

namespace terrace {
namespace {

constexpr int kFewestColumns = 20;

std::string bytes(std::uint64_t count) { return format_bytes(Bytes(count)); }

std::string padded(std::string text, int width) {
  if (static_cast<int>(text.size()) > width) text.resize(static_cast<std::size_t>(std::max(width, 0)));
  text.resize(static_cast<std::size_t>(std::max(width, 0)), ' ');
  return text;
}
std::string right(const std::string& text, int width) {
  return std::string(static_cast<std::size_t>(std::max(0, width - static_cast<int>(text.size()))), ' ') +
         text;
}
std::string formatted(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

// "[#####-----]", `width` with its brackets.
std::string bar(std::uint64_t part, std::uint64_t whole, int width) {
  const int inner = std::max(width - 2, 0);
  const double share = whole > 0 ? std::min(1.0, static_cast<double>(part) / static_cast<double>(whole)) : 0;
  const int filled = static_cast<int>(share * inner + 0.5);
  return "[" + std::string(static_cast<std::size_t>(filled), '#') +
         std::string(static_cast<std::size_t>(inner - filled), '-') + "]";
}

// Cut to the width, so that nothing wraps.
Line fitted(Line line, int columns) {
  int left = columns;
  for (Stretch& stretch : line) {
    if (static_cast<int>(stretch.text.size()) > left) stretch.text.resize(static_cast<std::size_t>(left));
    for (char& c : stretch.text) {
      if (c < ' ' || c > '~') c = '?';  // a name from elsewhere
    }
    left -= static_cast<int>(stretch.text.size());
  }
  return line;
}

// ---------------------------------------------------------------- rates

// What a job did since an earlier look; nothing where a counter fell, since then processes have ended.
struct Progress {
  double steps = 0, to_ddr = 0, from_ddr = 0;  // a second
  std::optional<double> hits, late, stalled;   // shares
  std::string reason;                          // of most of the stall
};

std::optional<double> share(double part, double whole) {
  return whole > 0 ? std::optional(part / whole) : std::nullopt;
}

std::optional<Progress> progress(const JobStatus& now, const JobStatus* before, double seconds) {
  if (before == nullptr || seconds <= 0) return std::nullopt;
  const auto rose = [&](std::uint64_t to, std::uint64_t from) { return static_cast<double>(to - from); };
  const auto fell = [](const Counts& to, const Counts& from) { return to.sum() < from.sum(); };
  if (now.steps < before->steps || now.step_seconds < before->step_seconds ||
      fell(now.copied_bytes, before->copied_bytes) || fell(now.fetches, before->fetches))
    return std::nullopt;
  Progress made;
  made.steps = rose(now.steps, before->steps) / seconds;
  made.to_ddr = rose(now.copied_bytes["d2h"], before->copied_bytes["d2h"]) / seconds;
  made.from_ddr = rose(now.copied_bytes["h2d"], before->copied_bytes["h2d"]) / seconds;
  const double hits = rose(now.fetches["hit"], before->fetches["hit"]);
  const double late = rose(now.fetches["late"], before->fetches["late"]);
  const double fetches = rose(now.fetches.sum(), before->fetches.sum());
  made.hits = share(hits + late, fetches);
  made.late = share(late, fetches);
  double most = 0;
  for (const auto& [reason, total] : now.stall_seconds.all()) {
    const double stalled = total - before->stall_seconds[reason];
    if (stalled > most) made.reason = reason, most = stalled;
  }
  const double ran = now.step_seconds - before->step_seconds;
  made.stalled = share(now.stall_seconds.sum() - before->stall_seconds.sum(), ran);
  return made;
}

const JobStatus* find(const std::optional<Moment>& moment, const std::string& job) {
  if (!moment) return nullptr;
  const auto found = std::find_if(moment->status.jobs.begin(), moment->status.jobs.end(),
                                  [&](const JobStatus& status) { return status.job == job; });
  return found == moment->status.jobs.end() ? nullptr : &*found;
}

// ---------------------------------------------------------------- parts

Line headline(const NodeStatus& status, int columns) {
  const std::string what = "terraced " + status.version + ", pid " + std::to_string(status.pid) + ", " +
                           std::to_string(status.clients) + (status.clients == 1 ? " process" : " processes");
  const std::string where = status.listen.empty() ? "" : "http://" + status.listen + "/metrics";
  const int gap = columns - static_cast<int>(what.size());
  if (gap < static_cast<int>(where.size()) + 2) return {{what, Ink::kTitle}};
  return {{what, Ink::kTitle}, {right(where, gap), Ink::kDim}};
}

// Bars take what the words leave.
int bar_width(int columns) { return std::clamp(columns - 70, 10, 100); }

Line tier_line(const NodeStatus& status, const char* tier, Ink ink, int columns) {
  const std::uint64_t leased = status.leased[tier], budget = status.budget[tier];
  return {{padded(tier, 16)},
          {bar(leased, budget, bar_width(columns)), ink},
          {" " + right(bytes(leased), 10) + " leased of " + bytes(budget)}};
}

Line device_line(const DeviceStatus& device, int columns) {
  return {{padded(device.device, 15) + " "},
          {bar(device.bytes, device.budget_bytes, bar_width(columns)), Ink::kHbm},
          {" " + right(bytes(device.bytes), 10) + ", " + bytes(device.leased_bytes) + " leased of " +
           bytes(device.budget_bytes)},
          {", " + std::to_string(device.processes) + (device.processes == 1 ? " process" : " processes"),
           Ink::kDim}};
}

struct Column {
  const char* title;
  int width;
};
constexpr Column kColumns[] = {{"PROC", 4},  {"STEP/S", 6},  {"HBM", 10}, {"DDR", 10},
                               {"TO/S", 10}, {"FROM/S", 10}, {"HIT", 4},  {"STALL", 5}};
constexpr int kReasonWidth = 20;  // "  spill_backpressure", where the screen is wide enough

int used_by_columns() {
  int used = 0;
  for (const Column& column : kColumns) used += column.width + 1;
  return used;
}
int name_width(int columns) { return std::clamp(columns - used_by_columns() - kReasonWidth, 12, 40); }
bool shows_reason(int columns) { return columns >= used_by_columns() + name_width(columns) + kReasonWidth; }

Line job_titles(int columns) {
  std::string text = padded("JOB", name_width(columns));
  for (const Column& column : kColumns) text += " " + right(column.title, column.width);
  return {{text + (shows_reason(columns) ? "  BY" : ""), Ink::kTitle}};
}

std::string percent(const std::optional<double>& share) {
  return share ? formatted("%.0f%%", *share * 100) : "-";
}

Line job_line(const JobStatus& job, const std::optional<Progress>& made, int columns) {
  const auto rate = [](double a_second) {
    return bytes(static_cast<std::uint64_t>(std::max(0.0, a_second)));
  };
  const std::string cells[] = {std::to_string(job.processes),   made ? formatted("%.2f", made->steps) : "-",
                               bytes(job.bytes["hbm"]),         bytes(job.bytes["ddr"]),
                               made ? rate(made->to_ddr) : "-", made ? rate(made->from_ddr) : "-",
                               made ? percent(made->hits) : "-"};
  std::string text = padded(job.job, name_width(columns));
  for (std::size_t i = 0; i < std::size(cells); ++i) text += " " + right(cells[i], kColumns[i].width);
  const bool alarming = made && made->stalled.value_or(0) > 0.05;
  return {{text},
          {" " + right(made ? percent(made->stalled) : "-", kColumns[std::size(cells)].width) +
               (made && shows_reason(columns) ? "  " + made->reason : ""),
           alarming ? Ink::kAlarm : Ink::kPlain}};
}

// As many of the lines as there is room for; the last says how many are missing.
void put_some(std::vector<Line>& lines, std::vector<Line> some, int room) {
  const int count = static_cast<int>(some.size());
  if (count > room && room > 0) {
    some.resize(static_cast<std::size_t>(room - 1));
    some.push_back({{"... and " + std::to_string(count - room + 1) + " more", Ink::kDim}});
  } else if (count > room) {
    some.clear();
  }
  lines.insert(lines.end(), some.begin(), some.end());
}

std::vector<Line> fitted(std::vector<Line> lines, ScreenSize size) {
  if (static_cast<int>(lines.size()) > size.rows)
    lines.resize(static_cast<std::size_t>(std::max(size.rows, 0)));
  for (Line& line : lines) line = fitted(std::move(line), std::max(size.columns, 0));
  return lines;
}

const Line kFooter = {{"q quits", Ink::kDim}};

}  // namespace

std::vector<Line> picture_of(const Moment& now, const std::optional<Moment>& before, ScreenSize size) {
  const int columns = std::max(size.columns, kFewestColumns);
  const double seconds = before ? now.seconds - before->seconds : 0;
  std::vector<Line> lines{headline(now.status, columns), {}};
  lines.push_back(tier_line(now.status, "hbm", Ink::kHbm, columns));
  lines.push_back(tier_line(now.status, "ddr", Ink::kDdr, columns));
  std::vector<Line> devices, jobs;
  for (const DeviceStatus& device : now.status.devices) devices.push_back(device_line(device, columns));
  for (const JobStatus& job : now.status.jobs)
    jobs.push_back(job_line(job, progress(job, find(before, job.job), seconds), columns));
  // Two blank lines, two of titles and the footer; what is left is the jobs' first, then the devices'.
  const int room = std::max(0, size.rows - static_cast<int>(lines.size()) - 5);
  const int for_jobs =
      std::min(static_cast<int>(jobs.size()), std::max(room / 2, room - static_cast<int>(devices.size())));
  if (!devices.empty()) {
    lines.insert(lines.end(), {{}, {{"GPU MEMORY IN USE", Ink::kTitle}}});
    put_some(lines, std::move(devices), room - for_jobs);
  }
  lines.insert(lines.end(), {{}, job_titles(columns)});
  if (jobs.empty()) jobs.push_back({{"no process is registered", Ink::kDim}});
  put_some(lines, std::move(jobs), std::max(for_jobs, 1));
  lines = fitted(std::move(lines), {size.columns, size.rows - 1});
  while (static_cast<int>(lines.size()) < size.rows - 1) lines.emplace_back();
  lines.push_back(kFooter);
  return fitted(std::move(lines), size);
}

std::vector<Line> picture_without_daemon(const std::string& why, ScreenSize size) {
  return fitted({{{why, Ink::kAlarm}}, {{"looking again every second", Ink::kDim}}, {}, kFooter}, size);
}

std::string painted(const Line& line, Colours colours) {
  static constexpr const char* kSequences[] = {"", "1", "36", "32", "2", "31"};
  std::string text;
  for (const Stretch& stretch : line) {
    const char* sequence = kSequences[static_cast<std::size_t>(stretch.ink)];
    if (colours == Colours::kOff || *sequence == '\0') {
      text += stretch.text;
    } else {
      text += std::string("\033[") + sequence + "m" + stretch.text + "\033[0m";
    }
  }
  return text;
}

}  // namespace terrace
