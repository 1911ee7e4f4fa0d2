// What `terrace top` shows, as lines for a screen of a given size. Pure: two statuses in, text out.
//
//   terraced 0.1.0, pid 4211, 2 processes                    http://127.0.0.1:9464/metrics
//   hbm              [##########----------]   12.0 GiB leased of 24.0 GiB
//   GPU MEMORY IN USE
//   0000:1b:00.0     [######--------------]    6.0 GiB, 12.0 GiB leased of 24.0 GiB, 1 process
//   JOB           PROC STEP/S        HBM        DDR       TO/S     FROM/S  HIT STALL  BY
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "daemon/node_status.hpp"

namespace terrace {

struct ScreenSize {
  int columns = 80, rows = 24;
};

enum class Ink : std::uint8_t { kPlain, kTitle, kHbm, kDdr, kDim, kAlarm };

struct Stretch {
  std::string text;  // ASCII
  Ink ink = Ink::kPlain;
};
using Line = std::vector<Stretch>;

struct Moment {
  NodeStatus status;
  double seconds = 0;  // on a clock that only goes forward
};

// At most size.rows lines of at most size.columns characters. Rates are those since `before`; without it, or
// where a counter fell because its processes have ended, they are shown as "-". Rows that don't fit are
// counted.
[[nodiscard]] std::vector<Line> picture_of(const Moment& now, const std::optional<Moment>& before,
                                           ScreenSize size);
// One line for when there is no daemon.
[[nodiscard]] std::vector<Line> picture_without_daemon(const std::string& why, ScreenSize size);

enum class Colours : std::uint8_t { kOn, kOff };
// A line with its escape sequences; nothing but its text where colours are off.
[[nodiscard]] std::string painted(const Line& line, Colours colours);

}  // namespace terrace
