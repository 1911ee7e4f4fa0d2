// The command line as a value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "examples/moe_trainer/config.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace::trainer {

enum class Command : std::uint8_t { kTrain, kParity, kSites };

struct Settings {
  Command command = Command::kTrain;
  std::string config;     // empty: the built-in nano
  std::string model;      // folder of a public model: to train, or to compare with its reference
  std::string export_to;  // folder to write it to
  std::vector<std::string> data;
  std::string images;  // folder; empty: made ones, where the configuration asks for images
  std::string device = "auto";
  std::string policy;  // empty: TERRACE_POLICY in the environment, else the defaults
  std::optional<Amount> hbm;
  std::optional<Bytes> emulated_capacity;
  std::optional<std::int64_t> steps, length, batch;
  std::optional<std::uint64_t> seed;
  std::optional<Recompute> recompute;
  std::optional<SwapMode> swapcore;
  std::string json;
  std::string trace;  // file of the timeline; empty: none
  std::string checkpoint;
  std::string resume;
  std::int64_t save_every = 0;
  std::string base;                   // checkpoint of the frozen model under adapters
  std::vector<std::string> evaluate;  // text that is not trained on
  std::int64_t evaluate_every = 0;
  bool no_progress = false;
  bool json_to_stdout = false;
};

// The settings, or the exit code to leave with: --help has been printed, or what was wrong.
struct ParsedSettings {
  std::optional<Settings> settings;
  int exit_code = 0;
};
[[nodiscard]] ParsedSettings parse_command_line(int argc, const char* const* argv);

// The configuration with the command line's say in it. `of_model` is that of the public model, where one is
// trained: its [train] comes from the file. Throws Failure (kBadInput).
[[nodiscard]] Config config_of(const Settings& settings, const Config* of_model = nullptr);
// The policy with the command line's say in it. Throws Failure (kBadInput).
[[nodiscard]] Policy policy_of(const Settings& settings);

}  // namespace terrace::trainer
