// A process that trains in small, for tests of the daemon: a session whose cached outputs must come back as
// they were, under budgets that change while it runs. Prints a line a step; ends after so many steps, or at
// SIGTERM, with 0 where every byte was right.
//   terrace_training_client STEPS WEIGHTS_KIB
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "swapcore/session.hpp"

using namespace terrace;

namespace {

constexpr int kLayers = 4;
constexpr Bytes kOutput = 256_KiB;
constexpr Bytes kHbm = 32_MiB;
constexpr std::chrono::milliseconds kPause{2};  // a step must not take a core of its own

std::atomic<bool> stopping{false};
static_assert(std::atomic<bool>::is_always_lock_free);

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(3);
}
template <typename T>
T must(Result<T> result) {
  if (!result) fail(result.error().text);
  return *std::move(result);
}

struct Model {
  Device& device;
  Session& session;
  std::vector<SiteId> sites;
  std::uint64_t step = 0;

  [[nodiscard]] std::uint8_t value(int layer) const {
    return static_cast<std::uint8_t>(step * 7 + layer + 1);
  }
  BlockRef computed(int layer) {
    BlockRef block = must(session.allocate(kOutput, Pool::kActivation));
    if (!device.fill(session.compute(), block->address, value(layer), kOutput))
      fail("the device cannot fill");
    return block;
  }
  void check(int layer, const Block& block) {
    if (!device.synchronize(session.compute())) fail("the device is gone");
    const auto same = [expected = std::byte(value(layer))](std::byte byte) { return byte == expected; };
    if (!std::all_of(block.address, block.address + kOutput.count(), same))
      fail("layer " + std::to_string(layer) + " of step " + std::to_string(step) + " came back wrong");
  }
  void run_step() {
    session.begin_step();
    for (int l = 0; l < kLayers; ++l) {
      session.enter_forward(l);
      const BlockRef output = computed(l);
      session.offer({sites[static_cast<std::size_t>(l)]}, output);
    }
    session.enter_head();
    for (int l = kLayers; l-- > 0;) {
      session.enter_backward(l);
      BlockRef block = session.fetch({sites[static_cast<std::size_t>(l)]}, kOutput);
      if (!block) block = computed(l);
      check(l, *block);
    }
    session.end_step();
    ++step;
  }
};

Policy small_policy() {
  Policy policy;
  policy.hbm.budget = Amount::of(kHbm);
  policy.hbm.reserve = Amount::of(0_B);
  policy.ddr.budget = Amount::of(kHbm);
  for (const auto& [match, action] :
       {std::pair{"layer.*.a", RuleAction::kHbm}, {"layer.*.b", RuleAction::kDdr}}) {
    Rule rule;
    rule.match = match;
    rule.action = action;
    policy.swapcore.rules.push_back(rule);
  }
  return policy;
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t steps = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10;
  const Bytes weights(argc > 2 ? std::strtoull(argv[2], nullptr, 10) << 10 : 1 << 20);
  std::signal(SIGTERM, [](int) { stopping.store(true); });
  EmulatedOptions emulated;
  emulated.capacity = kHbm;
  const auto device = must(open_emulated_device(emulated));
  const Stream compute = must(device->create_stream(StreamPriority::kNormal));
  {
    auto session = must(Session::open(*device, {.policy = small_policy(), .compute = compute}));
    Model model{*device, *session, {}};
    for (int l = 0; l < kLayers; ++l) {
      const char* name = l % 2 == 0 ? "a" : "b";
      model.sites.push_back(
          session->declare({"layer." + std::to_string(l) + "." + name, SiteKind::kMatmul, l, name}));
    }
    const BlockRef held = must(session->allocate(weights, Pool::kWeights));
    while (model.step < steps && !stopping.load()) {
      model.run_step();
      std::printf("%llu\n", static_cast<unsigned long long>(model.step));
      std::fflush(stdout);
      std::this_thread::sleep_for(kPause);
    }
  }
  device->destroy_stream(compute);
  return 0;
}
