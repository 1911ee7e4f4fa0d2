// Steps of a program that uses all of its blocks in order, over the stable-address form on an emulated device
// whose link has a set rate: how long a step takes over its floor, and where it waited. The program of
// guests/oversubscribed.cu, where no GPU is.
//
//   for each block b:   a kernel of --kernel-ms that uses block[b] and block[b + 1], on one stream
//
// The floor of a step is the larger of its kernels' time and that of the copies of what cannot stay. Copies
// take what the link says; remapping takes what the system's own takes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "runtime/clock.hpp"
#include "runtime/emulated/emulated_device.hpp"
#include "swapcore/stable/stable_pager.hpp"

namespace terrace {
namespace {

struct Options {
  std::size_t blocks = 64, slots = 31;
  Bytes block = 1_MiB;
  int steps = 12;
  double copy_ms = 5.8;  // of a block, one way, with the other way busy too
  double kernel_ms = 3.1;
};

template <typename T>
T take(Result<T> result) {
  if (result.ok()) return std::move(*result);
  std::fprintf(stderr, "stable_steps: %s\n", result.error().text.c_str());
  std::exit(1);
}

struct Program {
  explicit Program(const Options& with) : options(with) {
    const double rate = static_cast<double>(options.block.count()) / (options.copy_ms * 1e-3);
    device = take(EmulatedDevice::create({.capacity = options.block * (options.blocks + 8),
                                          .granularity = 64_KiB,
                                          .h2d_bytes_per_second = rate,
                                          .d2h_bytes_per_second = rate}));
    copies = take(CopyEngine::create(*device));
    streams = std::make_unique<DeviceStreams>(*device);
    stream = take(device->create_stream(StreamPriority::kNormal));
    slot = streams->add(stream);
    lease = std::make_shared<HostLease>(options.block * (options.blocks + 8));
    space = take(StableSpace::create(*device, *copies, *streams,
                                     {.span = options.block * options.blocks * 2,
                                      .hbm_budget = options.block * options.slots,
                                      .batch = options.block / 4,
                                      .lease = lease}));
    space->let_out_of_reach();
    pager = std::make_unique<StablePager>(*space, StablePager::Options{.bytes_ahead = 64_GiB});
    for (std::size_t i = 0; i < options.blocks; ++i) {
      blocks.push_back(take(pager->allocate(options.block)));
      launch({blocks.back()});
    }
  }
  void launch(const std::vector<const void*>& pointers) {
    StableSpace::Uses uses(*space);
    pager->begin(uses, pointers, slot);
    const auto length = std::chrono::duration<double, std::milli>(options.kernel_ms);
    (void)device->launch_host(stream, [length] { std::this_thread::sleep_for(length); });
  }
  double step() {
    const Nanoseconds from = steady_clock().now();
    for (std::size_t b = 0; b < blocks.size(); ++b) launch({blocks[b], blocks[(b + 1) % blocks.size()]});
    (void)device->synchronize(stream);
    return seconds_of(steady_clock().now() - from) * 1e3;
  }

  const Options options;
  std::unique_ptr<EmulatedDevice> device;
  std::unique_ptr<CopyEngine> copies;
  std::unique_ptr<DeviceStreams> streams;
  Stream stream{};
  StreamSlot slot{};
  std::shared_ptr<HostLease> lease;
  std::unique_ptr<StableSpace> space;
  std::unique_ptr<StablePager> pager;
  std::vector<Address> blocks;
};

struct Row {
  const char* metric;
  double value;
  const char* unit;
};
void print(const Options& options, const Row& row) {
  nlohmann::json line{
      {"bench", "stable_steps"},
      {"case", std::to_string(options.blocks) + " blocks in " + std::to_string(options.slots)},
      {"system", "terrace"},
      {"metric", row.metric},
      {"value", row.value},
      {"unit", row.unit},
      {"floor", nullptr}};
  std::printf("%s\n", line.dump().c_str());
}

int run(const Options& options) {
  Program program(options);
  std::vector<double> steps;
  StableSpace::Counters before{};
  StablePager::Counters asked{};
  const int settling = options.steps / 2;
  for (int step = 0; step < options.steps; ++step) {
    if (step == settling) {
      before = program.space->counters();
      asked = program.pager->counters();
    }
    steps.push_back(program.step());
    std::fprintf(stderr, "step %d: %.1f ms\n", step, steps.back());
  }
  const StableSpace::Counters after = program.space->counters();
  const StablePager::Counters end = program.pager->counters();
  std::vector<double> settled(steps.begin() + settling, steps.end());
  std::sort(settled.begin(), settled.end());
  const double measured = static_cast<double>(settled.size());
  const double absent = static_cast<double>(options.blocks) - static_cast<double>(options.slots);
  const double floor =
      std::max(absent * options.copy_ms, static_cast<double>(options.blocks) * options.kernel_ms);
  const double middle = settled[settled.size() / 2];
  const auto a_step = [measured](double all) { return all / measured; };
  const auto over_absent = [&](std::uint64_t moves) { return a_step(static_cast<double>(moves)) / absent; };
  for (const Row& row : std::initializer_list<Row>{
           {"step", middle, "ms"},
           {"step_over_floor", middle / floor, "ratio"},
           {"spilled_over_absent", over_absent(after.spills - before.spills), "ratio"},
           {"restored_over_absent", over_absent(after.restores - before.restores), "ratio"},
           {"waited_to_come_back", a_step(seconds_of(end.restore_wait - asked.restore_wait) * 1e3), "ms"},
           {"waited_at_gates", a_step((after.wait_seconds - before.wait_seconds) * 1e3), "ms"},
           {"moving", a_step((after.moving_seconds - before.moving_seconds) * 1e3), "ms"},
           {"moving_both_ways", a_step((after.both_ways_seconds - before.both_ways_seconds) * 1e3), "ms"},
           {"remapping", a_step((after.remap_seconds - before.remap_seconds) * 1e3), "ms"}}) {
    print(options, row);
  }
  for (const Address at : program.blocks) (void)program.pager->free(at);
  return 0;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  CLI::App app{"Steps of a program with more blocks than fit, over an emulated link of a set rate."};
  terrace::Options options;
  std::string device, build;
  app.add_option("--device", device, "emulated, whatever is said")
      ->check(CLI::IsMember({"auto", "emulated"}));
  app.add_option("--build", build, "the build folder; nothing of it is read");
  app.add_option("--blocks", options.blocks, "all used in every step")->check(CLI::Range(3, 4096));
  app.add_option("--slots", options.slots, "blocks that fit into HBM")->check(CLI::Range(2, 4095));
  app.add_option("--steps", options.steps, "the first half is for learning")->check(CLI::Range(2, 1000));
  app.add_option("--copy-ms", options.copy_ms, "of a block, one way")->check(CLI::Range(0.1, 1000.0));
  app.add_option("--kernel-ms", options.kernel_ms, "of each launch")->check(CLI::Range(0.01, 1000.0));
  CLI11_PARSE(app, argc, argv);
  if (options.slots >= options.blocks) {
    std::fprintf(stderr, "stable_steps: --slots %zu: fewer than the %zu blocks, or nothing travels\n",
                 options.slots, options.blocks);
    return 2;
  }
  return terrace::run(options);
}
