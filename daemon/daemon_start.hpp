// Starts terraced in the background, for `terrace run`.
#pragma once

#include <filesystem>
#include <string>

#include "daemon/observer.hpp"
#include "runtime/result.hpp"

namespace terrace {

struct DaemonStart {
  std::filesystem::path program;  // terraced
  std::string socket;
  std::string listen;  // empty: as the policy says
  std::string policy;  // a file; empty: the defaults
  int idle_seconds = 5;
};

// Joins the daemon at the socket, or starts one and waits until it answers. It writes its log to terraced.log
// beside the socket. Errors: why there is none, one line: what terraced said last, where it ended.
[[nodiscard]] Result<Observer> join_or_start_daemon(const DaemonStart& start);

}  // namespace terrace
