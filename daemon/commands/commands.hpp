// The subcommands of `terrace`, a file each: the options it has, and what it does with them.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>

namespace terrace {

inline constexpr int kFailed = 1;   // what was asked for could not be had
inline constexpr int kRefused = 2;  // bad input, said in one line

struct Invocation {
  std::filesystem::path programs;  // the folder with terrace and terraced
  int exit_code = 0;               // set by the subcommand that ran
};

// Each adds its subcommand, which runs inside app.parse(). Precondition: the invocation outlives the app's
// parsing.
void add_run(CLI::App& app, Invocation& invocation);
void add_check(CLI::App& app, Invocation& invocation);
void add_status(CLI::App& app, Invocation& invocation);
void add_top(CLI::App& app, Invocation& invocation);
void add_history(CLI::App& app, Invocation& invocation);
void add_advise(CLI::App& app, Invocation& invocation);
void add_doctor(CLI::App& app, Invocation& invocation);
void add_support(CLI::App& app, Invocation& invocation);
void add_reload(CLI::App& app, Invocation& invocation);
void add_off(CLI::App& app, Invocation& invocation);
void add_replay(CLI::App& app, Invocation& invocation);
void add_metrics_doc(CLI::App& app, Invocation& invocation);
void add_completion(CLI::App& app, Invocation& invocation);

}  // namespace terrace
