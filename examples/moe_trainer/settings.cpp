#include "examples/moe_trainer/settings.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "examples/moe_trainer/default_config.hpp"
#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {

bool all_digits(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// A plain number is bytes; else as a policy file would write it.
Amount amount_of(const std::string& flag, const std::string& text) {
  if (all_digits(text)) {
    std::uint64_t count = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
    if (error == std::errc()) return Amount::of(Bytes(count));
  }
  const auto amount = parse_amount(text);
  if (!amount.ok()) bad_input(flag + ": " + amount.error().text);
  return *amount;
}

struct Texts {  // options that need a second look
  std::string hbm, emulated_capacity, recompute, swapcore;
  bool sites = false;
};

void declare(CLI::App& app, Settings& settings, Texts& texts) {
  app.add_option("--config", settings.config, "Model and training, TOML (default: the built-in nano)");
  app.add_option(
      "--model", settings.model,
      "Train this public model: a folder with config.json and its weights; --config gives [train]");
  app.add_option("--export", settings.export_to, "At the end write the model of --model to this folder");
  app.add_option("--data", settings.data, "Text files to train on, UTF-8")->expected(1, -1);
  app.add_option(
      "--images", settings.images,
      "Folder of images, NAME.ppm and NAME.txt (default: made ones, where [images] is configured)");
  app.add_option("--device", settings.device, "auto, cuda or emulated")
      ->check(CLI::IsMember({"auto", "cuda", "emulated"}));
  app.add_option("--hbm", texts.hbm,
                 "Device memory budget: bytes, \"24GiB\" or \"80%\"; overrides the policy");
  app.add_option("--policy", settings.policy, "Policy file (default: TERRACE_POLICY, else the defaults)");
  app.add_option("--steps", settings.steps, "Steps to train, those before a resume included")
      ->check(CLI::PositiveNumber);
  app.add_option("--length", settings.length, "Bytes in a sequence (default: the configuration's)")
      ->check(CLI::PositiveNumber);
  app.add_option("--batch", settings.batch, "Sequences in a micro-batch (default: the configuration's)")
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", settings.seed, "Of weights and data order (default 1)");
  app.add_option("--json", settings.json, "Write the result here");
  app.add_option("--trace", settings.trace,
                 "Write a timeline of the run here, for chrome://tracing or ui.perfetto.dev");
  app.add_option("--recompute", texts.recompute, "none or full: how activations are kept")
      ->check(CLI::IsMember({"none", "full"}));
  app.add_option("--swapcore", texts.swapcore, "off or auto; overrides the policy")
      ->check(CLI::IsMember({"off", "auto"}));
  app.add_option("--checkpoint", settings.checkpoint,
                 "Save here (safetensors) at the end, when told to stop, and as --save-every says");
  app.add_option("--save-every", settings.save_every, "Steps between checkpoints")
      ->check(CLI::PositiveNumber);
  app.add_option("--resume", settings.resume, "Continue from this checkpoint");
  app.add_option("--base", settings.base, "Put the adapters of [lora] on the model of this checkpoint");
  app.add_option(
         "--evaluate", settings.evaluate,
         "Text that is not trained on: its loss, at the start, at the end and as --evaluate-every says")
      ->expected(1, -1);
  app.add_option("--evaluate-every", settings.evaluate_every, "Steps between evaluations")
      ->check(CLI::PositiveNumber);
  app.add_option("--emulated-capacity", texts.emulated_capacity,
                 "Memory of an emulated device (default: 4GiB, or what the job needs)");
  app.add_flag("--sites", texts.sites,
               "Print the sites of --config (also a public model's config.json) as JSON, and train nothing");
  app.add_flag("--no-progress", settings.no_progress, "No progress bar");
}

CLI::App* declare_parity(CLI::App& app, Settings& settings) {
  CLI::App* parity = app.add_subcommand(
      "parity", "Compare a public model's loss, logits and gradients with reference.safetensors beside it");
  parity->add_option("folder", settings.model, "config.json, weights and reference.safetensors")->required();
  parity->add_option("--device", settings.device, "auto, cuda or emulated")
      ->check(CLI::IsMember({"auto", "cuda", "emulated"}));
  parity->add_flag("--json", settings.json_to_stdout, "Print one JSON object");
  return parity;
}

void read(const Texts& texts, Settings& settings) {
  if (!settings.export_to.empty() && settings.model.empty()) {
    bad_input("--export: writes back a public model; name one with --model DIR");
  }
  if (settings.save_every > 0 && settings.checkpoint.empty()) {
    bad_input("--save-every: say where with --checkpoint FILE");
  }
  if (settings.evaluate_every > 0 && settings.evaluate.empty()) {
    bad_input("--evaluate-every: name the text with --evaluate FILE");
  }
  if (!texts.hbm.empty()) settings.hbm = amount_of("--hbm", texts.hbm);
  if (!texts.emulated_capacity.empty()) {
    const Amount amount = amount_of("--emulated-capacity", texts.emulated_capacity);
    if (amount.form != Amount::Form::kBytes || amount.bytes == 0_B) {
      bad_input(R"(--emulated-capacity: use a size like "4GiB")");
    }
    settings.emulated_capacity = amount.bytes;
  }
  if (!texts.recompute.empty()) {
    settings.recompute = texts.recompute == "none" ? Recompute::kNone : Recompute::kFull;
  }
  if (!texts.swapcore.empty()) {
    settings.swapcore = texts.swapcore == "off" ? SwapMode::kOff : SwapMode::kAuto;
  }
}

}  // namespace

ParsedSettings parse_command_line(int argc, const char* const* argv) {
  CLI::App app("Trains a small mixture-of-experts language model on text, within a memory budget.",
               "moe_trainer");
  Settings settings;
  Texts texts;
  declare(app, settings, texts);
  const CLI::App* parity = declare_parity(app, settings);
  try {
    app.parse(argc, argv);
    if (texts.sites) settings.command = Command::kSites;
    if (parity->parsed()) settings.command = Command::kParity;
    read(texts, settings);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return {std::nullopt, static_cast<int>(ExitCode::kFinished)};
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "moe_trainer: %s; see moe_trainer --help\n", error.what());
    return {std::nullopt, static_cast<int>(ExitCode::kBadInput)};
  }
  return {std::move(settings), 0};
}

Config config_of(const Settings& settings, const Config* of_model) {
  Config config;
  if (of_model != nullptr) {
    config = *of_model;
    if (settings.config.empty()) {
      config.train = parse_config(kDefaultConfig, "built-in configuration").train;
    } else {
      const RunConfig run = load_run_config(settings.config);
      config.train = run.train;
      config.lora = run.lora;
      config.images = run.images;
    }
    if (config.lora.rank > 0 && !settings.export_to.empty()) {
      bad_input("--export: adapters are no part of the model's file; keep them with --checkpoint");
    }
    if (config.images.patch > 0 && !settings.export_to.empty()) {
      bad_input("--export: the patch embedder is no part of the model's file; keep it with --checkpoint");
    }
    if (config.model.vocabulary < kByteVocabulary) {
      bad_input(settings.model + ": has a vocabulary of " + std::to_string(config.model.vocabulary) +
                "; text is bytes, which need " + std::to_string(kByteVocabulary));
    }
  } else {
    config = settings.config.empty() ? parse_config(kDefaultConfig, "built-in configuration")
                                     : load_config(settings.config);
  }
  if (config.images.patch > 0 && !settings.data.empty()) {
    bad_input("--data: [images] trains on captions alone; leave it out, or name a folder with --images");
  }
  if (config.images.patch > 0 && !settings.evaluate.empty()) {
    bad_input("--evaluate: is of text, and [images] trains on images; leave it out");
  }
  if (config.images.patch == 0 && !settings.images.empty()) {
    bad_input("--images: the configuration has no [images]; add patch and size, as configs/images.toml does");
  }
  if (!settings.base.empty() && config.lora.rank == 0) {
    bad_input("--base: the configuration trains the whole model; add [lora] rank and targets to --config");
  }
  if (settings.steps) config.train.steps = *settings.steps;
  if (settings.length) config.train.length = *settings.length;
  if (settings.batch) config.train.batch = *settings.batch;
  if (settings.recompute) config.train.recompute = *settings.recompute;
  return config;
}

Policy policy_of(const Settings& settings) {
  std::string path = settings.policy;
  if (const char* set = std::getenv("TERRACE_POLICY"); path.empty() && set != nullptr) path = set;
  Policy policy;
  if (!path.empty()) {
    auto loaded = load_policy(path);
    if (!loaded.ok()) bad_input(loaded.error().text);
    policy = std::move(*loaded);
  }
  if (settings.hbm) policy.hbm.budget = *settings.hbm;
  if (settings.swapcore) policy.swapcore.mode = *settings.swapcore;
  if (settings.swapcore == SwapMode::kOff) policy.swapcore.rules.clear();
  return policy;
}

}  // namespace terrace::trainer
