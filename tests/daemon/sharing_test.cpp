// What a live daemon and its clients make of a device together: the time of its link, and HBM that a dead
// client's children hold open.
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "daemon/observer.hpp"
#include "runtime/copy_engine.hpp"
#include "swapcore/session.hpp"
#include "tests/daemon/process.hpp"
#include "tests/daemon/running_server.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

using test::eventually;
using test::RunningServer;
using test::TestClient;

class SharingTest : public testing::Test {
 protected:
  [[nodiscard]] nlohmann::json status() const {
    auto observer = Observer::connect(socket_);
    const auto text = observer ? observer->status(0) : Result<std::string>(observer.error());
    return text ? nlohmann::json::parse(*text) : nlohmann::json();
  }
  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
};

// As a copy engine does that is held back by what it may use.
void want_all(TestClient& client) {
  LinkView down(client.link_time(), 1);
  (void)down.usable(steady_clock().now());
  down.note_limited(steady_clock().now());
}
std::uint32_t leased(TestClient& client) {
  const auto seat = client.link_time().seat();
  return seat.board == nullptr ? 0 : seat.own().lease[1].load();
}
// Both want all of it until they have what they shall have.
bool come_to(TestClient& one, std::uint32_t first, TestClient& two, std::uint32_t second) {
  return eventually([&] {
    want_all(one);
    want_all(two);
    return leased(one) == first && leased(two) == second;
  });
}

TEST_F(SharingTest, LinkTimeIsDividedByPriorityAndComesBackFromTheDead) {
  JobRule first;
  first.match = "first";
  first.priority = 3;
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB, .listen = "127.0.0.1:0", .jobs = {first}});
  TestClient one(socket_, "first");
  EXPECT_EQ(leased(one), kLinkWhole) << "alone";
  auto two = std::make_unique<TestClient>(socket_, "second");
  EXPECT_TRUE(come_to(one, kLinkWhole / 4 * 3, *two, kLinkWhole / 4));
  const auto now = status();
  EXPECT_EQ(now["clients"][0]["link"]["d2h"], 0.75);
  EXPECT_EQ(now["clients"][1]["link"]["d2h"], 0.25);
  const auto body = test::http_get(server->listen_address(), "/metrics").body;
  const char* lease = "terrace_link_lease_ratio{job=\"second\",device=\"emulated:0\",direction=\"d2h\"}";
  EXPECT_EQ(test::sample(body, lease), 0.25);
  const auto page = nlohmann::json::parse(test::http_get(server->listen_address(), "/api/v1/now").body);
  EXPECT_EQ(page["jobs"]["first"]["link_lease_ratio"]["emulated:0"]["d2h"], 0.75);
  two.reset();
  EXPECT_TRUE(eventually([&] { return leased(one) == kLinkWhole; }));
}

TEST_F(SharingTest, CopiesFollowTheirLeaseAndGoOnWithoutADaemon) {
  auto server = std::make_unique<RunningServer>(socket_, RunningServer::Limits{.hbm = 8_GiB, .ddr = 2_GiB});
  const auto device = open_emulated_device({.capacity = 16_MiB, .d2h_bytes_per_second = 4e9}).value();
  const auto engine = CopyEngine::create(*device).value();
  TestClient one(socket_, "a"), two(socket_, "b");
  ASSERT_TRUE(come_to(one, kLinkWhole / 2, two, kLinkWhole / 2));
  const auto seat = one.link_time().seat();
  device->link_time().take_seat(seat.board, seat.slot);
  const auto cap = [&] {
    engine->set_cap(Direction::kD2H, 0);  // looks
    return engine->cap(Direction::kD2H);
  };
  EXPECT_TRUE(eventually([&] {
    want_all(one);
    want_all(two);
    return cap() == 2e9;
  }));
  server.reset();
  EXPECT_TRUE(eventually([&] { return cap() == 0; })) << "what a dead daemon wrote binds nobody";
}

TEST_F(SharingTest, ASessionHasASeatForItsDevicesCopies) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  const auto device = open_emulated_device({.capacity = 16_MiB}).value();
  const Stream compute = *device->create_stream(StreamPriority::kNormal);
  Policy policy;
  policy.hbm.budget = Amount::of(8_MiB);
  policy.hbm.reserve = Amount::of(0_B);
  ::setenv("TERRACE_SOCKET", socket_.c_str(), 1);
  {
    auto session = Session::open(*device, {.policy = policy, .job = "a", .compute = compute});
    ::unsetenv("TERRACE_SOCKET");
    ASSERT_TRUE(session.ok()) << session.error().text;
    const auto seat = device->link_time().seat();
    EXPECT_TRUE(seat.shared);
    EXPECT_EQ(seat.own().usable[0].load(), kLinkWhole);
    EXPECT_TRUE(device->link_time().anybody_listens());
  }
  EXPECT_FALSE(device->link_time().seat().shared);
  device->destroy_stream(compute);
}

TEST_F(SharingTest, ASuccessorDividesTheLinkAnew) {
  auto first = std::make_unique<RunningServer>(socket_, RunningServer::Limits{.hbm = 8_GiB, .ddr = 2_GiB});
  TestClient one(socket_, "a"), two(socket_, "b");
  ASSERT_TRUE(come_to(one, kLinkWhole / 2, two, kLinkWhole / 2));
  const auto old = one.link_time().seat().board;
  first.reset();
  EXPECT_TRUE(eventually([&] { return !one.link_time().seat().shared; }));
  RunningServer second(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  EXPECT_TRUE(come_to(one, kLinkWhole / 2, two, kLinkWhole / 2));
  EXPECT_NE(one.link_time().seat().board, old);
}

TEST_F(SharingTest, AnAnnouncementReachesTheOtherProcessesOfTheDevice) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  auto one = std::make_unique<TestClient>(socket_, "a");
  TestClient two(socket_, "b");
  LinkView down(two.link_time(), 1);
  EXPECT_FALSE(down.collective_runs(steady_clock().now()));
  one->link_time().seat().own().lanes[0].begun = 1;  // as the device writes it
  EXPECT_TRUE(down.collective_runs(steady_clock().now()));
  one.reset();  // and never ends
  EXPECT_TRUE(eventually([&] { return !down.collective_runs(steady_clock().now()); }));
}

// --- HBM of the dead ---

// A device of 8 GiB as its driver sees it.
struct Driver {
  std::atomic<std::uint64_t> held{0};
  [[nodiscard]] DriverMemory memory() {
    return [this](const std::string& device) -> std::optional<Bytes> {
      if (device != "emulated:0") return std::nullopt;
      return 8_GiB - Bytes(held.load());
    };
  }
};

TEST_F(SharingTest, WhatADeadClientsChildHoldsIsNotLeasedAgainUntilItEnds) {
  Driver driver;
  RunningServer server(
      socket_, {.hbm = 8_GiB, .ddr = 2_GiB, .listen = "127.0.0.1:0", .driver_memory = driver.memory()});
  test::ChildProcess client({test::program("terrace_test_client").string(), "fork"},
                            {{"TERRACE_SOCKET", socket_}, {"TERRACE_TEST_HBM", "6"}});
  ASSERT_TRUE(eventually([&] { return client.out() == "forked\n"; })) << client.out() << client.err();
  ASSERT_EQ(server.leased(TierId::kHbm), 6_GiB);
  driver.held = (6_GiB).count();
  client.kill(SIGKILL);  // the parent alone
  EXPECT_EQ(client.wait(), 128 + SIGKILL);
  ASSERT_TRUE(eventually([&] { return server.clients() == 0; }));
  EXPECT_EQ(server.leased(TierId::kHbm), 0_B);

  TestClient other(socket_, "b", [](DaemonLink& link, const DaemonLink::Ask& ask) { link.answer(ask, 0_B); });
  EXPECT_EQ(other.ask(TierId::kHbm, 8_GiB), 2_GiB) << "the child holds the rest";
  std::this_thread::sleep_for(
      std::chrono::milliseconds(150));  // the driver is asked again, and nothing is taken yet
  EXPECT_EQ(*other.link().request_and_keep(TierId::kHbm, 6_GiB, std::chrono::milliseconds(0)), 0_B);
  driver.held = (8_GiB).count();  // what it was granted it has taken
  other.page().set<Metric::kTierMappedBytes>(TierId::kHbm, 2_GiB);
  EXPECT_EQ(status()["accounts"][0]["withheld"], (6_GiB).count());
  const auto body = test::http_get(server->listen_address(), "/metrics").body;
  EXPECT_EQ(test::sample(body, "terrace_withheld_bytes{device=\"emulated:0\"}"), 6.0 * (1ULL << 30));

  EXPECT_EQ(::kill(-client.pid(), SIGKILL), 0);  // the child
  driver.held = (2_GiB).count();
  EXPECT_TRUE(eventually([&] { return other.link().lease(TierId::kHbm) == 8_GiB; })) << "without a restart";
  EXPECT_EQ(status()["accounts"][0]["withheld"], 0U);
}

TEST_F(SharingTest, WhatTheDriverShowsFreeIsLeasedAtOnce) {
  Driver driver;
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB, .driver_memory = driver.memory()});
  auto one = std::make_unique<TestClient>(socket_, "a");
  EXPECT_EQ(one->ask(TierId::kHbm, 8_GiB), 8_GiB);
  one.reset();
  EXPECT_TRUE(eventually([&] { return server.clients() == 0; }));
  TestClient two(socket_, "b");
  EXPECT_EQ(two.ask(TierId::kHbm, 8_GiB), 8_GiB);
}

TEST_F(SharingTest, WhoComesBackHoldsWhatItHeld) {
  Driver driver;
  driver.held = (6_GiB).count();
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB, .driver_memory = driver.memory()});
  auto page = SharedPage::create("a");
  ASSERT_TRUE(page.ok());
  DaemonLink::Options options;
  options.socket = socket_;
  options.device = "emulated:0";
  options.page_fd = (*page)->fd();
  options.holdings = [] {
    DaemonLink::Holdings held;
    held[0] = 6_GiB;
    return held;
  };
  for (int round = 0; round < 2; ++round) {  // the connection broke, the process lives
    const auto link = DaemonLink::start(options);
    ASSERT_TRUE(link.ok() && (*link)->connected());
    EXPECT_EQ(server.leased(TierId::kHbm), 6_GiB);
    EXPECT_EQ(status()["accounts"][0]["withheld"], 0U);
    TestClient other(socket_, "b");
    EXPECT_EQ(other.ask(TierId::kHbm, 8_GiB), 2_GiB);
  }
}

// --- terrace off ---

TEST_F(SharingTest, WhoIsSwitchedOffIsSaidToBeAfterARestartOfTheDaemon) {
  auto first = std::make_unique<RunningServer>(socket_, RunningServer::Limits{.hbm = 8_GiB, .ddr = 2_GiB});
  TestClient client(socket_, "a");
  {
    auto observer = Observer::connect(socket_);
    ASSERT_TRUE(observer.ok());
    ASSERT_TRUE(observer->steer(::getpid(), Course::kPassthrough).ok());
  }
  ASSERT_TRUE(eventually([&] { return client.link().passthrough(); }));
  first.reset();
  RunningServer second(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  ASSERT_TRUE(eventually([&] { return second.clients() == 1; }));
  EXPECT_TRUE(status()["clients"][0]["passthrough"].get<bool>());
  EXPECT_TRUE(client.link().passthrough());
  auto observer = Observer::connect(socket_);
  ASSERT_TRUE(observer->steer(::getpid(), Course::kTiering).ok());
  EXPECT_TRUE(eventually([&] { return !client.link().passthrough(); }));
  EXPECT_FALSE(status()["clients"][0]["passthrough"].get<bool>());
}

}  // namespace
}  // namespace terrace
