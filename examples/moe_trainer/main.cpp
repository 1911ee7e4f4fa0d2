// moe_trainer: from the command line to a trained model. docs/TRAINER.md is the manual.
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "examples/moe_trainer/base.hpp"
#include "examples/moe_trainer/checkpoint.hpp"
#include "examples/moe_trainer/device_choice.hpp"
#include "examples/moe_trainer/evaluation.hpp"
#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/families/model_folder.hpp"
#include "examples/moe_trainer/families/parity.hpp"
#include "examples/moe_trainer/report.hpp"
#include "examples/moe_trainer/settings.hpp"
#include "examples/moe_trainer/site_list.hpp"
#include "examples/moe_trainer/stop_signal.hpp"
#include "examples/moe_trainer/trainer.hpp"

namespace terrace::trainer {
namespace {

// Ends with everything that was launched on it.
class ComputeStream {
 public:
  explicit ComputeStream(Device& device)
      : device_(device), stream_(require(device.create_stream(StreamPriority::kNormal))) {}
  ~ComputeStream() { device_.destroy_stream(stream_); }
  ComputeStream(const ComputeStream&) = delete;
  ComputeStream& operator=(const ComputeStream&) = delete;
  [[nodiscard]] Stream get() const { return stream_; }

 private:
  Device& device_;
  Stream stream_;
};

std::unique_ptr<Session> open_session(Device& device, const Settings& settings, Stream compute,
                                      RunTimeline* timeline) {
  Session::Options options;
  options.policy = policy_of(settings);
  const char* job = std::getenv("TERRACE_JOB");
  options.job = job != nullptr && *job != '\0' ? job : "moe_trainer";
  options.compute = compute;
  options.timeline = timeline;
  return require(Session::open(device, std::move(options)));
}

void run_step(Trainer& trainer, Session& session, RunRecord& record) {
  (void)record.take_peaks(session);
  const auto before = std::chrono::steady_clock::now();
  record.losses.push_back(trainer.step());
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - before;
  record.step_seconds.push_back(taken.count());
  record.step_peaks.push_back(record.take_peaks(session));
}

void evaluate(Trainer& trainer, Evaluator* evaluator, RunRecord& record) {
  if (evaluator == nullptr) return;
  if (!record.evaluations.empty() && record.evaluations.back().step == trainer.steps_done()) return;
  record.evaluations.push_back(
      {.step = trainer.steps_done(), .loss = evaluator->loss(trainer.model(), trainer.ops())});
}

struct Running {
  Trainer& trainer;
  Session& session;
  Evaluator* evaluator;  // null: nothing is held out
};

// Steps until done or told to stop, evaluating and saving on the way.
void run_steps(const Running& running, const Settings& settings, RunRecord& record) {
  Trainer& trainer = running.trainer;
  const std::int64_t steps = trainer.config().train.steps;
  record.tokens_per_step = trainer.config().tokens_per_step();
  Progress progress(settings.no_progress ? Progress::Show::kNever : Progress::Show::kOnTerminal, steps);
  std::int64_t saved_at = trainer.steps_done();
  evaluate(trainer, running.evaluator, record);
  while (trainer.steps_done() < steps && stop_signal() == 0) {
    run_step(trainer, running.session, record);
    if (settings.evaluate_every > 0 && trainer.steps_done() % settings.evaluate_every == 0) {
      evaluate(trainer, running.evaluator, record);
    }
    progress.update(trainer.steps_done(), record);
    if (settings.save_every > 0 && trainer.steps_done() % settings.save_every == 0) {
      trainer.save(settings.checkpoint);
      saved_at = trainer.steps_done();
    }
  }
  evaluate(trainer, running.evaluator, record);
  if (record.base) record.base->fingerprint_after = base_fingerprint(running.session, trainer.model());
  if (!settings.checkpoint.empty() && saved_at != trainer.steps_done()) trainer.save(settings.checkpoint);
  if (!settings.export_to.empty()) trainer.export_model(settings.export_to);
}

// A folder that is not there, or not ours to write to, is found before hours of training and not after.
void check_writable(const std::string& path) {
  if (path.empty()) return;
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  if (access(folder.c_str(), W_OK | X_OK) == 0) return;
  bad_input(path + ": cannot write in " + folder.string() + ": " + std::strerror(errno) +
            "; name another folder");
}

void print_summary(const Trainer& trainer, const RunRecord& record, const Session& session,
                   const Settings& settings) {
  if (record.losses.empty()) return;
  std::printf(
      "%ld steps on %s: loss %.4f to %.4f, %.1f ms per step, %.0f tokens per second, HBM peak %s of %s\n",
      static_cast<long>(trainer.steps_done()), session.device().info().name.c_str(),
      static_cast<double>(record.losses.front()), static_cast<double>(record.losses.back()),
      record.ms_per_step(), record.tokens_per_second(), format_bytes(record.peaks.hbm_mapped).c_str(),
      format_bytes(session.hbm_usage().budget).c_str());
  if (!record.evaluations.empty()) {
    const Evaluation& first = record.evaluations.front();
    const Evaluation& last = record.evaluations.back();
    std::printf("held-out loss %.4f to %.4f, perplexity %.3f to %.3f\n", first.loss, last.loss,
                first.perplexity(), last.perplexity());
  }
  if (!settings.checkpoint.empty()) std::printf("saved to %s\n", settings.checkpoint.c_str());
  if (!settings.export_to.empty()) std::printf("model written to %s\n", settings.export_to.c_str());
}

std::optional<RunRecord::Streamed> streamed_of(Trainer& trainer, const Session& session) {
  const ExpertStore* experts = trainer.model().expert_store();
  if (experts == nullptr && trainer.state() == nullptr) return std::nullopt;
  RunRecord::Streamed streamed;
  if (experts != nullptr) {
    const ExpertStore::Report report = experts->report();
    streamed.experts_in = experts->counters().fetched;
    streamed.experts_nvme = trainer.model().nvme_bytes(Pool::kExpert);
    streamed.experts_from_nvme = experts->counters().from_tier;
    streamed.experts_kept = report.kept;
    streamed.experts_from_kept = experts->counters().from_kept;
    streamed.experts_load = name_of(report.load);
    streamed.experts_fired_share = report.fired_share;
    streamed.experts_break_even_share = report.break_even_share;
    constexpr auto kExperts = static_cast<std::size_t>(Pool::kExpert);
    streamed.experts_resident = session.hbm_usage().live_by_pool[kExperts];
    streamed.experts_streamed = session.ddr_usage().live_by_pool[kExperts];
  }
  if (trainer.state() != nullptr) {
    streamed.state_in = trainer.state()->counters().fetched;
    streamed.state_out = trainer.state()->counters().written_back;
    streamed.state_nvme = trainer.model().nvme_bytes(Pool::kOptimizer);
    streamed.state_from_nvme = trainer.state()->counters().from_tier;
    streamed.state_to_nvme = trainer.state()->counters().to_tier;
  }
  if (const ExpertGradients* gradients = trainer.model().expert_gradients()) {
    streamed.state_in += gradients->counters().fetched;
    streamed.state_out += gradients->counters().written_back;
  }
  return streamed;
}

int run_parity(const Settings& settings) {
  const Parity parity = Parity::open(settings.model);
  const auto device = open_training_device(settings, parity.config());
  const ComputeStream compute(*device);
  const auto session = open_session(*device, settings, compute.get(), nullptr);
  const ParityReport report = parity.run(*session);
  if (settings.json_to_stdout) {
    std::printf("%s\n", json_text(report, device->info().kind).c_str());
  } else {
    const TensorError worst = report.worst_gradient();
    std::printf(
        "%s on %s: loss %.7f (reference %.7f, error %.1e), logits %.1e, gradients at most %.1e (%s): %s\n",
        report.model_type.c_str(), device->info().name.c_str(), report.loss, report.reference_loss,
        report.loss_error, report.logits_error, worst.error, worst.name.c_str(),
        report.passed() ? "the same" : "not the same");
  }
  return static_cast<int>(report.passed() ? ExitCode::kFinished : ExitCode::kFailed);
}

// All that can be wrong with the input is found before the device is touched.
int run(const Settings& settings) {
  std::optional<ModelFolder> folder;
  if (!settings.model.empty()) folder = ModelFolder::open(settings.model);
  Trainer::Options options{.config = config_of(settings, folder ? &folder->family().config : nullptr),
                           .seed = settings.seed.value_or(1),
                           .model = folder ? &*folder : nullptr,
                           .base = settings.base};
  (void)policy_of(settings);
  check_writable(settings.checkpoint);
  check_writable(settings.json);
  check_writable(settings.trace);
  if (!settings.resume.empty()) {
    const CheckpointInfo info = read_checkpoint_info(settings.resume);
    if (!settings.seed) options.seed = info.seed;
    if (info.steps_done >= options.config.train.steps) {
      bad_input(settings.resume + ": has " + std::to_string(info.steps_done) +
                " steps already; ask for more with --steps");
    }
  }
  Corpus corpus;
  std::unique_ptr<ImageSource> images;
  if (options.config.images.patch > 0) {
    images = open_images(settings.images, options.config, options.seed);
    options.images = images.get();
  } else {
    corpus = Corpus::load(settings.data);
    (void)Sampler(corpus, {.seed = options.seed, .length = options.config.train.length});
  }

  Corpus held_out;
  if (!settings.evaluate.empty()) held_out = Corpus::load(settings.evaluate);

  const auto device = open_training_device(settings, options.config);
  const ComputeStream compute(*device);
  const std::unique_ptr<RunTimeline> timeline =
      settings.trace.empty() ? nullptr : require(RunTimeline::create(*device, compute.get(), settings.trace));
  const auto session = open_session(*device, settings, compute.get(), timeline.get());
  Trainer trainer(*session, corpus, options);
  if (!settings.resume.empty()) trainer.resume(settings.resume);
  std::optional<Evaluator> evaluator;
  if (!settings.evaluate.empty()) {
    evaluator.emplace(*session, trainer.memory(), trainer.config(), held_out);
  }
  RunRecord record;
  if (trainer.base_fingerprint() != 0) record.base.emplace().fingerprint = trainer.base_fingerprint();
  try {
    run_steps({.trainer = trainer, .session = *session, .evaluator = evaluator ? &*evaluator : nullptr},
              settings, record);
  } catch (...) {
    // What was trained is told even where saving it failed.
    if (!settings.json.empty() && !record.losses.empty()) write_report(settings.json, record, *session);
    throw;
  }
  record.streamed = streamed_of(trainer, *session);
  if (!settings.json.empty()) write_report(settings.json, record, *session);
  if (timeline != nullptr) require(timeline->status());
  print_summary(trainer, record, *session, settings);
  return stop_signal() == 0 ? 0 : 128 + stop_signal();
}

int main_of_program(int argc, char** argv) {
  try {
    watch_stop_signals();
    const ParsedSettings parsed = parse_command_line(argc, argv);
    if (!parsed.settings) return parsed.exit_code;
    switch (parsed.settings->command) {
      case Command::kParity:
        return run_parity(*parsed.settings);
      case Command::kSites:
        std::printf("%s\n", sites_json(*parsed.settings).c_str());
        return static_cast<int>(ExitCode::kFinished);
      case Command::kTrain:
        break;
    }
    return run(*parsed.settings);
  } catch (const Failure& failure) {
    std::fprintf(stderr, "moe_trainer: %s\n", failure.what());
    return static_cast<int>(failure.exit_code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moe_trainer: %s\n", error.what());
    return static_cast<int>(ExitCode::kFailed);
  }
}

}  // namespace
}  // namespace terrace::trainer

int main(int argc, char** argv) { return terrace::trainer::main_of_program(argc, argv); }
