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
#include <string>
#include <utility>

#include "examples/moe_trainer/checkpoint.hpp"
#include "examples/moe_trainer/device_choice.hpp"
#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/report.hpp"
#include "examples/moe_trainer/settings.hpp"
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

std::unique_ptr<Session> open_session(Device& device, const Settings& settings, Stream compute) {
  Session::Options options;
  options.policy = policy_of(settings);
  const char* job = std::getenv("TERRACE_JOB");
  options.job = job != nullptr && *job != '\0' ? job : "moe_trainer";
  options.compute = compute;
  return require(Session::open(device, std::move(options)));
}

void run_step(Trainer& trainer, RunRecord& record) {
  const auto before = std::chrono::steady_clock::now();
  record.losses.push_back(trainer.step());
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - before;
  record.step_seconds.push_back(taken.count());
}

// Steps until done or told to stop, saving on the way.
void run_steps(Trainer& trainer, const Settings& settings, RunRecord& record) {
  const std::int64_t steps = trainer.config().train.steps;
  record.tokens_per_step = trainer.config().tokens_per_step();
  Progress progress(settings.no_progress ? Progress::Show::kNever : Progress::Show::kOnTerminal, steps);
  std::int64_t saved_at = trainer.steps_done();
  while (trainer.steps_done() < steps && stop_signal() == 0) {
    run_step(trainer, record);
    progress.update(trainer.steps_done(), record);
    if (settings.save_every > 0 && trainer.steps_done() % settings.save_every == 0) {
      trainer.save(settings.checkpoint);
      saved_at = trainer.steps_done();
    }
  }
  if (!settings.checkpoint.empty() && saved_at != trainer.steps_done()) trainer.save(settings.checkpoint);
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
      record.ms_per_step(), record.tokens_per_second(), format_bytes(session.hbm_usage().mapped_peak).c_str(),
      format_bytes(session.hbm_usage().budget).c_str());
  if (!settings.checkpoint.empty()) std::printf("saved to %s\n", settings.checkpoint.c_str());
}

// All that can be wrong with the input is found before the device is touched.
int run(const Settings& settings) {
  Trainer::Options options{.config = config_of(settings), .seed = settings.seed.value_or(1)};
  (void)policy_of(settings);
  check_writable(settings.checkpoint);
  check_writable(settings.json);
  if (!settings.resume.empty()) {
    const CheckpointInfo info = read_checkpoint_info(settings.resume);
    if (!settings.seed) options.seed = info.seed;
    if (info.steps_done >= options.config.train.steps) {
      bad_input(settings.resume + ": has " + std::to_string(info.steps_done) +
                " steps already; ask for more with --steps");
    }
  }
  const Corpus corpus = Corpus::load(settings.data);
  (void)Sampler(corpus, {.seed = options.seed, .length = options.config.train.length});

  const auto device = open_training_device(settings, options.config);
  const ComputeStream compute(*device);
  const auto session = open_session(*device, settings, compute.get());
  Trainer trainer(*session, corpus, options);
  if (!settings.resume.empty()) trainer.resume(settings.resume);
  RunRecord record;
  try {
    run_steps(trainer, settings, record);
  } catch (...) {
    // What was trained is told even where saving it failed.
    if (!settings.json.empty() && !record.losses.empty()) write_report(settings.json, record, *session);
    throw;
  }
  if (!settings.json.empty()) write_report(settings.json, record, *session);
  print_summary(trainer, record, *session, settings);
  return stop_signal() == 0 ? 0 : 128 + stop_signal();
}

int main_of_program(int argc, char** argv) {
  try {
    watch_stop_signals();
    const ParsedSettings parsed = parse_command_line(argc, argv);
    return parsed.settings ? run(*parsed.settings) : parsed.exit_code;
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
