// Growth and shrink by negotiation, over a real socket: links, and sessions that train.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "daemon/observer.hpp"
#include "runtime/emulated/emulated_device.hpp"
#include "swapcore/session.hpp"
#include "swapcore/stash/process_lease.hpp"
#include "tests/daemon/process.hpp"
#include "tests/daemon/running_server.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using test::eventually;
using test::RunningServer;
using test::TestClient;

constexpr milliseconds kLong{60000};

class NegotiationTest : public testing::Test {
 protected:
  [[nodiscard]] nlohmann::json status() const {
    auto observer = Observer::connect(socket_);
    const auto text = observer ? observer->status(0) : Result<std::string>(observer.error());
    return text ? nlohmann::json::parse(*text) : nlohmann::json();
  }
  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
};

void give_all_that_is_asked(DaemonLink& link, const DaemonLink::Ask& ask) {
  link.answer(ask, saturating_sub(link.lease(ask.tier), ask.target));
}

TEST_F(NegotiationTest, ANewcomerWaitsForItsShareAndGetsTheRestLater) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  auto one = std::make_unique<TestClient>(socket_, "a", give_all_that_is_asked);
  EXPECT_EQ(*one->link().request_and_keep(TierId::kHbm, 8_GiB, kLong), 8_GiB);
  TestClient two(socket_, "b", give_all_that_is_asked);
  EXPECT_EQ(*two.link().request_and_keep(TierId::kHbm, 7_GiB, kLong), 4_GiB);
  EXPECT_EQ(one->link().lease(TierId::kHbm), 4_GiB);
  EXPECT_EQ(server.leased(TierId::kHbm), 8_GiB);
  one.reset();
  EXPECT_TRUE(eventually([&] { return two.link().lease(TierId::kHbm) == 7_GiB; }));
  EXPECT_EQ(server.leased(TierId::kHbm), 7_GiB);
}

TEST_F(NegotiationTest, WhoWaitsForRoomAtOnceWantsNothingLater) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  TestClient one(socket_, "a", give_all_that_is_asked);
  EXPECT_EQ(*one.link().request_and_keep(TierId::kHbm, 8_GiB, kLong), 8_GiB);
  auto two = std::make_unique<TestClient>(socket_, "b", give_all_that_is_asked);
  EXPECT_EQ(*two->link().request_and_wait(TierId::kHbm, 3_GiB, kLong), 3_GiB);
  EXPECT_EQ(one.link().lease(TierId::kHbm), 5_GiB);
  TestClient three(socket_, "c", [](DaemonLink& link, const DaemonLink::Ask& ask) { link.answer(ask, 0_B); });
  EXPECT_GT(*three.link().request_and_keep(TierId::kHbm, 2_GiB, kLong), 0_B);
  EXPECT_LT(*two->link().request_and_wait(TierId::kHbm, 8_GiB, milliseconds(0)), 8_GiB);
  const Bytes held = two->link().lease(TierId::kHbm);
  three.link().release(TierId::kHbm, 2_GiB);
  EXPECT_TRUE(eventually([&] { return server.leased(TierId::kHbm) == 8_GiB; })) << "the first takes it";
  EXPECT_EQ(two->link().lease(TierId::kHbm), held);
}

// The wall of a preload library, as a process lease sees it.
std::atomic<std::uint64_t> wall_used{0}, wall_limit{0};

struct LeaseCase {
  const char* name;
  Bytes walled;  // what the wall counts; zero: there is no wall
  Bytes left;    // when 2 GiB are held, 3 GiB needed and 1 GiB wanted
};
class StashLease : public NegotiationTest, public testing::WithParamInterface<LeaseCase> {};

TEST_P(StashLease, GivesWayDownToWhatItNeedsAndGrowsAgain) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  ::setenv("TERRACE_SOCKET", socket_.c_str(), 1);
  const auto device = EmulatedDevice::create({.capacity = 64_MiB});
  ASSERT_TRUE(device);
  ProcessLease::Options options;
  options.budgets.hbm = 6_GiB;
  options.budgets.ddr = 1_GiB;
  wall_used = GetParam().walled.count();
  wall_limit = 0;
  const bool walled = GetParam().walled > 0_B;
  if (walled) {
    options.wall = {[](int) { return wall_used.load(); },
                    [](int, std::uint64_t limit) { wall_limit = limit; },
                    [](int) { return std::uint64_t{5} << 20; }, [](int) { return std::uint64_t{7}; }};
  }
  const auto lease = ProcessLease::join(**device, options);
  ::unsetenv("TERRACE_SOCKET");
  ASSERT_TRUE(lease) << lease.error().text;
  EXPECT_EQ((*lease)->state().hbm, 6_GiB);
  EXPECT_EQ((*lease)->state().overflow, walled ? 5_MiB : 0_B);
  EXPECT_EQ((*lease)->state().refusals, walled ? 7U : 0U);
  EXPECT_EQ(server.leased(TierId::kHbm), 6_GiB) << "and not what the wall counts on top";
  EXPECT_EQ((*lease)->ddr(), 1_GiB);
  EXPECT_EQ(Bytes(wall_limit.load()), walled ? 6_GiB : 0_B);
  (*lease)->give_way(0_B, 0_B);
  EXPECT_EQ((*lease)->state().hbm, 6_GiB) << "nobody has asked";
  auto other = std::make_unique<TestClient>(socket_, "b");
  std::thread asking([&] { (void)other->link().request_and_keep(TierId::kHbm, 7_GiB, kLong); });
  EXPECT_TRUE(eventually([&] { return (*lease)->state().target == 4_GiB; }));
  EXPECT_EQ((*lease)->state().hbm, 6_GiB) << "asked, and not given yet";
  (*lease)->give_way(2_GiB, 3_GiB);
  asking.join();
  EXPECT_EQ((*lease)->state().hbm, GetParam().left);
  EXPECT_EQ(Bytes(wall_limit.load()), walled ? GetParam().left : 0_B);
  EXPECT_EQ(server.leased(TierId::kHbm), 8_GiB);
  other.reset();
  EXPECT_TRUE(eventually([&] { return (*lease)->state().hbm == 6_GiB; })) << "what was asked for first";
  EXPECT_EQ(Bytes(wall_limit.load()), walled ? 6_GiB : 0_B);
}
INSTANTIATE_TEST_SUITE_P(NegotiationTest, StashLease,
                         testing::Values(LeaseCase{"alone", 0_B, 4_GiB}, LeaseCase{"walled", 1_GiB, 4_GiB},
                                         LeaseCase{"charged_more", 5_GiB, 5_GiB}),
                         [](const auto& info) { return info.param.name; });

TEST_F(NegotiationTest, WhoCannotGiveWayKeepsItAndNobodyWaitsForIt) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  TestClient one(socket_, "a");  // has no way to give anything back
  EXPECT_EQ(one.ask(TierId::kHbm, 6_GiB), 6_GiB);
  TestClient two(socket_, "b");
  EXPECT_EQ(*two.link().request_and_keep(TierId::kHbm, 8_GiB, kLong), 2_GiB);
  EXPECT_EQ(one.link().lease(TierId::kHbm), 6_GiB);
}

TEST_F(NegotiationTest, ADeafClientIsReportedAndHeardAgainWhenItAnswers) {
  RunningServer server(
      socket_,
      {.hbm = 8_GiB, .ddr = 2_GiB, .listen = "127.0.0.1:0", .manners = {milliseconds(50), milliseconds(20)}});
  std::mutex mutex;
  std::optional<DaemonLink::Ask> asked;
  TestClient one(socket_, "a", [&](DaemonLink&, const DaemonLink::Ask& ask) {
    const std::lock_guard lock(mutex);
    asked = ask;
  });
  EXPECT_EQ(one.ask(TierId::kHbm, 8_GiB), 8_GiB);
  TestClient two(socket_, "b");
  EXPECT_EQ(*two.link().request_and_keep(TierId::kHbm, 8_GiB, kLong), 0_B) << "told when the patience ends";
  EXPECT_TRUE(status()["clients"][0]["deaf"].get<bool>());
  EXPECT_EQ(status()["clients"][1]["waiting"]["hbm"], 8ULL << 30);
  const auto metric = [&](const char* name) {
    return test::sample(test::http_get(server->listen_address(), "/metrics").body, name).value_or(-1);
  };
  EXPECT_EQ(metric("terrace_deaf_clients"), 1);
  EXPECT_GE(metric("terrace_shrink_requests_total"), 1);
  EXPECT_EQ(one.link().lease(TierId::kHbm), 8_GiB);
  const std::lock_guard lock(mutex);
  ASSERT_TRUE(asked);
  EXPECT_EQ(asked->target, 4_GiB);
  one.link().answer(*asked, 4_GiB);
  EXPECT_TRUE(eventually([&] { return two.link().lease(TierId::kHbm) == 4_GiB; }));
  EXPECT_FALSE(status()["clients"][0]["deaf"].get<bool>());
}

TEST_F(NegotiationTest, WhatWasKeptIsAskedOfTheSuccessorToo) {
  auto first = std::make_unique<RunningServer>(socket_, RunningServer::Limits{.hbm = 8_GiB, .ddr = 2_GiB});
  auto one = std::make_unique<TestClient>(socket_, "a");
  EXPECT_EQ(one->ask(TierId::kHbm, 6_GiB), 6_GiB);
  TestClient two(socket_, "b");
  EXPECT_EQ(*two.link().request_and_keep(TierId::kHbm, 8_GiB, kLong), 2_GiB);
  first.reset();
  RunningServer second(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  EXPECT_TRUE(eventually([&] { return second.clients() == 2; }));
  one.reset();
  EXPECT_TRUE(eventually([&] { return two.link().lease(TierId::kHbm) == 8_GiB; }));
  EXPECT_EQ(second.leased(TierId::kHbm), 8_GiB);
}

// --- Sessions ---

constexpr int kLayers = 6;
constexpr Bytes kOutput = 6_MiB;
constexpr Bytes kHbm = 64_MiB;

// A trainer of one site a layer. What is fetched must be what was offered, bit by bit.
class Trainer {
 public:
  Trainer(const std::string& socket, const std::string& job, Bytes weights = 4_MiB) {
    ::setenv("TERRACE_SOCKET", socket.c_str(), 1);
    ::setenv("TERRACE_JOB", job.c_str(), 1);
    EmulatedOptions emulated;
    emulated.capacity = kHbm;
    device_ = open_emulated_device(emulated).value();
    compute_ = *device_->create_stream(StreamPriority::kNormal);
    Policy policy;
    policy.hbm.budget = Amount::of(kHbm);
    policy.hbm.reserve = Amount::of(0_B);
    policy.ddr.budget = Amount::of(kHbm);
    Rule rule;
    rule.match = "*";
    rule.action = RuleAction::kHbm;
    policy.swapcore.rules.push_back(rule);
    auto opened = Session::open(*device_, {.policy = policy, .job = job, .compute = compute_});
    EXPECT_TRUE(opened.ok()) << (opened ? "" : opened.error().text);
    ::unsetenv("TERRACE_SOCKET");
    ::unsetenv("TERRACE_JOB");
    if (!opened) return;
    session_ = *std::move(opened);
    for (int l = 0; l < kLayers; ++l)
      sites_.push_back(session_->declare({"layer." + std::to_string(l) + ".fc", SiteKind::kMatmul, l, "fc"}));
    weights_ = *session_->allocate(weights, Pool::kWeights);
  }
  ~Trainer() {
    weights_.reset();
    session_.reset();
    device_->destroy_stream(compute_);
  }

  // `between`: called after forward, where the outputs are held.
  void step(const std::function<void()>& between = {}) {
    session_->begin_step();
    for (int l = 0; l < kLayers; ++l) {
      session_->enter_forward(l);
      const BlockRef output = computed(l);
      session_->offer({sites_[static_cast<std::size_t>(l)]}, output);
    }
    if (between) between();
    session_->enter_head();
    for (int l = kLayers; l-- > 0;) {
      session_->enter_backward(l);
      BlockRef block = session_->fetch({sites_[static_cast<std::size_t>(l)]}, kOutput);
      ++(block ? hits_ : misses_);
      if (!block) block = computed(l);
      expect_output(l, *block);
    }
    session_->end_step();
  }
  [[nodiscard]] Session& session() { return *session_; }
  [[nodiscard]] int hits() const { return hits_; }
  [[nodiscard]] int misses() const { return misses_; }

 private:
  BlockRef computed(int layer) {
    BlockRef block = *session_->allocate(kOutput, Pool::kActivation);
    EXPECT_TRUE(device_->fill(compute_, block->address, static_cast<std::uint8_t>(layer + 1), kOutput).ok());
    return block;
  }
  void expect_output(int layer, const Block& block) {
    EXPECT_TRUE(device_->synchronize(compute_).ok());
    // The emulated device's memory is the host's.
    const auto same = [layer](std::byte byte) { return byte == std::byte(layer + 1); };
    EXPECT_TRUE(std::all_of(block.address, block.address + kOutput.count(), same)) << "layer " << layer;
  }

  std::unique_ptr<Device> device_;
  Stream compute_;
  std::unique_ptr<Session> session_;
  std::vector<SiteId> sites_;
  BlockRef weights_;
  int hits_ = 0, misses_ = 0;
};

TEST_F(NegotiationTest, ALiveSessionGivesWayInTheMiddleOfAStepAndComputesTheSame) {
  RunningServer server(socket_, {.hbm = kHbm, .ddr = kHbm});
  Trainer trainer(socket_, "a");
  for (int i = 0; i < 4; ++i) trainer.step();
  EXPECT_EQ(server.leased(TierId::kHbm), kHbm);
  EXPECT_EQ(trainer.session().hbm_usage().budget, kHbm);
  TestClient newcomer(socket_, "b");
  EXPECT_EQ(trainer.session().counters().evictions, 0U);
  std::thread asking;
  trainer.step([&] {
    asking =
        std::thread([&] { EXPECT_EQ(*newcomer.link().request_and_keep(TierId::kHbm, kHbm, kLong), 32_MiB); });
    EXPECT_TRUE(eventually([&] {
      trainer.session().enter_head();
      return trainer.session().hbm_usage().budget == 32_MiB;
    }));
  });
  asking.join();
  EXPECT_GT(trainer.session().counters().evictions, 0U) << "outputs were held, and more than what is left";
  EXPECT_LE(trainer.session().hbm_usage().mapped, 32_MiB);
  EXPECT_EQ(server.leased(TierId::kHbm), kHbm);
  for (int i = 0; i < 3; ++i) trainer.step();
}

TEST_F(NegotiationTest, ASessionNeverGivesWhatItsStepNeeds) {
  RunningServer server(socket_,
                       {.hbm = kHbm, .ddr = kHbm, .manners = {milliseconds(10000), milliseconds(20)}});
  Trainer trainer(socket_, "a", 30_MiB);
  TestClient greedy(socket_, "b");
  std::atomic<bool> told{false};
  // Nobody knows yet what a step needs.
  std::thread early([&] {
    EXPECT_EQ(*greedy.link().request_and_keep(TierId::kHbm, kHbm, kLong), 0_B);
    told = true;
  });
  EXPECT_TRUE(eventually([&] {
    trainer.session().enter_forward(0);
    return told.load();
  }));
  early.join();
  EXPECT_TRUE(eventually([&] {
    trainer.step();
    return greedy.link().lease(TierId::kHbm) > 0_B;
  }));
  for (int i = 0; i < 4; ++i) trainer.step();
  EXPECT_GT(trainer.session().hbm_usage().budget, 36_MiB) << "half would not do";
}

TEST_F(NegotiationTest, ASessionGrowsWhenOthersLeave) {
  RunningServer server(socket_, {.hbm = kHbm, .ddr = kHbm});
  auto other = std::make_unique<TestClient>(socket_, "b");
  EXPECT_EQ(other->ask(TierId::kHbm, 40_MiB), 40_MiB);
  Trainer trainer(socket_, "a");
  EXPECT_EQ(trainer.session().hbm_usage().budget, 24_MiB);
  for (int i = 0; i < 4; ++i) trainer.step();
  other.reset();
  EXPECT_TRUE(eventually([&] {
    trainer.step();
    return trainer.session().hbm_usage().budget == kHbm;
  }));
  EXPECT_EQ(server.leased(TierId::kHbm), kHbm);
}

TEST_F(NegotiationTest, AProcessIsSwitchedOffAndOnWhileItTrains) {
  RunningServer server(socket_, {.hbm = kHbm, .ddr = kHbm});
  Trainer trainer(socket_, "a");
  for (int i = 0; i < 3; ++i) trainer.step();
  EXPECT_GT(trainer.hits(), 0);
  auto observer = Observer::connect(socket_);
  ASSERT_TRUE(observer.ok());
  EXPECT_EQ(observer->steer(1, Course::kPassthrough).error().code, Errc::kNotFound);
  ASSERT_TRUE(observer->steer(::getpid(), Course::kPassthrough).ok());
  EXPECT_TRUE(status()["clients"][0]["passthrough"].get<bool>());
  const auto all_miss = [&] {
    const int hits = trainer.hits();
    trainer.step();
    return trainer.hits() == hits;
  };
  EXPECT_TRUE(eventually(all_miss));
  EXPECT_TRUE(all_miss());
  ASSERT_TRUE(observer->steer(::getpid(), Course::kTiering).ok());
  EXPECT_TRUE(eventually([&] { return !all_miss(); }));
}

}  // namespace
}  // namespace terrace
