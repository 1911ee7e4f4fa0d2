// Ten thousand random steps with faults against a simple reference: what a fetch returns is what was offered,
// or it is a miss; what a load returns is what was saved; budgets hold at every moment; all bytes go back;
// counters add up.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "runtime/fault.hpp"
#include "swapcore/session.hpp"

namespace terrace {
namespace {

constexpr int kSchedules = 10'000;
constexpr int kSchedulesOfASession = 100;
constexpr int kLayers = 3;
constexpr int kSitesOfALayer = 2;
constexpr Bytes kUnit = 8_KiB;

constexpr FaultPoint kPoints[] = {
    FaultPoint::kDeviceCopy,           FaultPoint::kDeviceRecord, FaultPoint::kDeviceWait,
    FaultPoint::kDeviceCreateEvent,    FaultPoint::kDevicePin,    FaultPoint::kHostMap,
    FaultPoint::kDeviceCreatePhysical, FaultPoint::kDeviceMap};

class Random {
 public:
  explicit Random(unsigned seed) : bits_(seed) {}
  // From 0 to `below` - 1.
  [[nodiscard]] std::uint64_t pick(std::uint64_t below) { return bits_() % below; }
  [[nodiscard]] bool one_in(std::uint64_t n) { return pick(n) == 0; }

 private:
  std::mt19937 bits_;
};

// What goes otherwise than in the step that was learned.
struct Variation {
  std::uint32_t micro_batches = 1;
  std::uint64_t units = 4;  // of an output
  bool backward = true;
  bool another_order = false;
  bool forward_between = false;  // an evaluation through the same sites, before backward
  bool other_shape_again = false;
  int stop_after = -1;  // operations
};

struct Totals {
  std::uint64_t fetches = 0, hits = 0, spilled = 0, restored = 0, cancelled = 0;
  std::array<std::uint64_t, kFallbackReasonCount> fallbacks{};
};

class Job {
 public:
  Job(Device& device, Stream compute, Random& random) : device_(device), compute_(compute), random_(random) {
    Policy policy;
    hbm_ = Bytes((32 + random.pick(96)) * kUnit.count() * 2);
    ddr_ = Bytes((8 + random.pick(100)) * kUnit.count());
    policy.hbm.budget = Amount::of(hbm_);
    policy.ddr.budget = Amount::of(ddr_);
    policy.ddr.hugepages = HugePages::kOff;
    if (random.one_in(3)) policy.checkpoint.budget = Amount::of(Bytes((4 + random.pick(24)) * kUnit.count()));
    if (random.one_in(4)) policy.swapcore.verify = Verify::kAlways;
    if (random.one_in(4)) policy.checkpoint.contingency = Contingency::kRecompute;
    add_rules(policy);
    auto session = Session::open(device, {.policy = policy, .join_daemon = false, .compute = compute});
    if (!session) ADD_FAILURE() << session.error().text;
    session_ = std::move(session).value();
    for (int l = 0; l < kLayers; ++l) {
      for (int s = 0; s < kSitesOfALayer; ++s) {
        const std::string group = "op" + std::to_string(s);
        sites_.push_back(
            session_->declare({"layer." + std::to_string(l) + "." + group, SiteKind::kMatmul, l, group}));
      }
    }
  }

  // One schedule. Failing calls of the device end it as an exception would end a trainer's step.
  void run(const Variation& how) {
    how_ = how;
    operations_ = 0;
    offered_.clear();
    saved_.clear();
    session_->begin_step();
    const bool finished = take_step();
    EXPECT_TRUE(device_.synchronize(compute_));
    EXPECT_TRUE(right_) << "bytes of another output";
    if (finished) {
      session_->end_step();
    } else if (random_.one_in(2)) {
      session_->cancel_step();  // else the next begin_step() finds out
    }
    EXPECT_LE(session_->hbm_usage().mapped_peak, hbm_);
    EXPECT_LE(session_->ddr_usage().mapped_peak, ddr_);
  }

  void close(Totals& totals) {
    session_->begin_step();
    session_->cancel_step();  // waits for what copies still hold
    const SessionCounters counters = session_->counters();
    EXPECT_EQ(counters.hits + counters.misses + counters.late, fetches_);
    EXPECT_LE(counters.hits + counters.late, offers_);
    EXPECT_EQ(session_->hbm_usage().live, 0_B);
    EXPECT_EQ(session_->ddr_usage().live, 0_B);
    totals.fetches += fetches_;
    totals.hits += counters.hits + counters.late;
    totals.spilled += counters.spilled.count();
    totals.restored += counters.restored.count();
    for (std::size_t i = 0; i < counters.fallbacks.size(); ++i) totals.fallbacks[i] += counters.fallbacks[i];
    session_.reset();
  }

 private:
  struct Offered {
    std::uint64_t value;
    Bytes size;
  };

  void add_rules(Policy& policy) {
    const std::uint64_t kind = random_.pick(4);
    if (kind == 0) return;
    if (kind == 1) policy.swapcore.mode = SwapMode::kRules;
    for (int l = 0; l < kLayers; ++l) {
      constexpr RuleAction kActions[] = {RuleAction::kDdr, RuleAction::kDdr, RuleAction::kHbm,
                                         RuleAction::kDiscard};
      policy.swapcore.rules.push_back({.match = "layer." + std::to_string(l) + ".*",
                                       .kind = {},
                                       .action = kActions[random_.pick(std::size(kActions))]});
    }
  }

  // False: stop here, as after an exception.
  [[nodiscard]] bool go_on() { return how_.stop_after < 0 || operations_++ < how_.stop_after; }

  // A block full of a value of its own; null where there is no memory. Work holds addresses: a block that is
  // let go on the stream's own thread could wait for that stream.
  BlockRef computed(Bytes size, std::uint64_t value) {
    auto block = session_->allocate(size, Pool::kActivation);
    if (!block) return nullptr;
    EXPECT_TRUE(device_.launch_host(compute_, [at = (*block)->address, size, value] {
      auto* words = reinterpret_cast<std::uint64_t*>(at);
      std::fill(words, words + size.count() / sizeof value, value);
    }));
    return *block;
  }
  void expect_value(const BlockRef& block, std::uint64_t value) {
    EXPECT_TRUE(device_.launch_host(compute_, [this, at = block->address, size = block->size, value] {
      const auto* words = reinterpret_cast<const std::uint64_t*>(at);
      const std::size_t count = size.count() / sizeof value;
      for (std::size_t i = 0; i < count; i += 64) right_ = right_ && words[i] == value;
      right_ = right_ && words[count - 1] == value;
    }));
  }

  [[nodiscard]] SiteId site(int layer, int s) const {
    return sites_[static_cast<std::size_t>(layer * kSitesOfALayer + s)];
  }

  [[nodiscard]] bool forward(int layer, std::uint32_t micro_batch, bool saves) {
    session_->enter_forward(layer, micro_batch);
    if (saves) {
      BlockRef input = computed(Bytes(how_.units * kUnit.count()), ++value_);
      if (input == nullptr) return false;
      if (!session_->save({.layer = layer, .micro_batch = micro_batch}, input)) return false;
      saved_[{layer, micro_batch}] = value_;
    }
    for (int s = 0; s < kSitesOfALayer; ++s) {
      if (!go_on()) return false;
      const BlockRef output = computed(Bytes(how_.units * kUnit.count()), ++value_);
      if (output == nullptr) return false;
      const SiteKey key{site(layer, s), micro_batch};
      session_->offer(key, output);
      ++offers_;
      offered_[key].push_back({value_, output->size});
    }
    return true;
  }

  [[nodiscard]] bool backward(int layer, std::uint32_t micro_batch) {
    session_->enter_backward(layer, micro_batch);
    if (!go_on()) return false;
    const auto input = session_->load({.layer = layer, .micro_batch = micro_batch});
    if (!input) {
      EXPECT_NE(input.error().code, Errc::kNotFound) << "it was saved";
      return false;
    }
    expect_value(*input, saved_[{layer, micro_batch}]);
    for (int s = 0; s < kSitesOfALayer; ++s) {
      if (!go_on()) return false;
      if (!recompute({site(layer, s), micro_batch})) return false;
      if (random_.one_in(50)) (void)recompute({site(layer, s), micro_batch});  // asked for twice
    }
    return true;
  }

  [[nodiscard]] bool recompute(const SiteKey& key) {
    Bytes size(how_.units * kUnit.count());
    if (how_.other_shape_again && random_.one_in(2)) size += kUnit;
    const BlockRef found = session_->fetch(key, size);
    ++fetches_;
    std::deque<Offered>& offered = offered_[key];
    if (found != nullptr) {
      EXPECT_EQ(offered.size(), 1U) << "nobody can tell which one this is";
      if (offered.size() != 1) return false;
      EXPECT_EQ(found->size, size);
      expect_value(found, offered.front().value);
    }
    if (!offered.empty()) offered.pop_front();
    return found != nullptr || computed(size, ++value_) != nullptr;
  }

  [[nodiscard]] bool take_step() {
    for (std::uint32_t m = 0; m < how_.micro_batches; ++m) {
      std::vector<int> order(kLayers);
      std::iota(order.begin(), order.end(), 0);
      if (how_.another_order) std::swap(order[random_.pick(kLayers)], order[random_.pick(kLayers)]);
      for (const int layer : order)
        if (!forward(layer, m, how_.backward)) return false;
      if (how_.forward_between) {
        for (const int layer : order)
          if (!forward(layer, m, false)) return false;
      }
      if (!how_.backward) continue;
      session_->enter_head(m);
      // Memory that is needed all at once.
      if (random_.one_in(6)) (void)session_->allocate(Bytes(hbm_.count() / 2), Pool::kScratch);
      for (auto layer = order.rbegin(); layer != order.rend(); ++layer)
        if (!backward(*layer, m)) return false;
    }
    return true;
  }

  Device& device_;
  const Stream compute_;
  Random& random_;
  Bytes hbm_, ddr_;
  std::unique_ptr<Session> session_;
  std::vector<SiteId> sites_;
  Variation how_;
  int operations_ = 0;
  std::uint64_t value_ = 0, fetches_ = 0, offers_ = 0;
  std::map<SiteKey, std::deque<Offered>> offered_;  // in this step, and not asked for
  std::map<std::pair<int, std::uint32_t>, std::uint64_t> saved_;
  bool right_ = true;  // the compute stream's
};

Variation drawn(Random& random) {
  Variation how;
  if (random.one_in(2)) return how;
  switch (random.pick(7)) {
    case 0:
      how.micro_batches = 2;
      break;
    case 1:
      how.units = 1 + random.pick(6);
      break;
    case 2:
      how.backward = false;
      break;
    case 3:
      how.another_order = true;
      break;
    case 4:
      how.forward_between = true;
      break;
    case 5:
      how.other_shape_again = true;
      break;
    default:
      how.stop_after = static_cast<int>(random.pick(14));
  }
  return how;
}

TEST(SessionModel, NoScheduleAndNoFaultBreaksAPromise) {
  Totals totals;
  for (int first = 0; first < kSchedules; first += kSchedulesOfASession) {
    Random random(static_cast<unsigned>(first));
    const double rate = first % 2000 == 0 ? 2e8 : 8e9;
    const auto device =
        std::move(open_emulated_device(
                      {.capacity = 16_MiB, .h2d_bytes_per_second = rate, .d2h_bytes_per_second = rate}))
            .value();
    const Stream compute = *device->create_stream(StreamPriority::kNormal);
    {
      Job job(*device, compute, random);
      for (int i = 0; i < kSchedulesOfASession; ++i) {
        std::optional<ScopedFaults> faults;
        if (random.one_in(3)) {
          faults.emplace(FaultPlan{.nth = 1 + random.pick(24),
                                   .only = kPoints[random.pick(std::size(kPoints))],
                                   .repeat = random.one_in(4) ? 5U : 1U});
        }
        job.run(drawn(random));
        if (testing::Test::HasFailure()) FAIL() << "schedule " << first + i;
      }
      job.close(totals);
    }
    device->destroy_stream(compute);
    EXPECT_EQ(device->memory()->free, device->memory()->total);
    if (testing::Test::HasFailure()) FAIL() << "schedules from " << first;
  }
  // What was meant to happen did.
  EXPECT_GT(totals.hits, totals.fetches / 10);
  EXPECT_LT(totals.hits, totals.fetches);
  EXPECT_GT(totals.spilled, 0U);
  EXPECT_GT(totals.restored, 0U);
  for (int i = 0; i < kFallbackReasonCount; ++i) {
    const auto reason = static_cast<FallbackReason>(i);
    if (reason == FallbackReason::kDamaged || reason == FallbackReason::kChangedInPlace) continue;
    EXPECT_GT(totals.fallbacks[static_cast<std::size_t>(i)], 0U) << name_of(reason);
  }
}

}  // namespace
}  // namespace terrace
