// Nobody dies with anybody: daemons and clients come and go.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include "daemon/socket_claim.hpp"
#include "tests/daemon/process.hpp"
#include "tests/daemon/running_server.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

using test::eventually;
using test::RunningServer;
using test::TestClient;

const RunningServer::Limits kLimits{.hbm = 8_GiB, .ddr = 2_GiB};

class RestartTest : public testing::Test {
 protected:
  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
};

TEST_F(RestartTest, AClientCarriesOnAndJoinsTheSuccessor) {
  auto first = std::make_unique<RunningServer>(socket_, kLimits);
  TestClient client(socket_, "a");
  client.page().add<Metric::kSteps>(3);
  EXPECT_EQ(client.ask(TierId::kHbm, 5_GiB), 5_GiB);
  first.reset();
  EXPECT_TRUE(eventually([&] { return !client.link().connected(); }));
  EXPECT_EQ(client.link().lease(TierId::kHbm), 5_GiB);
  EXPECT_EQ(client.link().request(TierId::kHbm, 1_GiB).error().code, Errc::kNotFound);
  client.link().release(TierId::kHbm, 1_GiB);
  RunningServer second(socket_, kLimits);
  EXPECT_TRUE(eventually([&] { return client.link().joins() == 2; }));
  EXPECT_EQ(second.leased(TierId::kHbm), 4_GiB);
  const auto view = second->registry().view();
  EXPECT_EQ(view.live.size(), 1U);
  EXPECT_EQ(view.jobs.at("a").values[first_slot(Metric::kSteps)], 3U);
  EXPECT_EQ(client.ask(TierId::kHbm, 9_GiB), 4_GiB);
}

TEST_F(RestartTest, ADaemonThatStopsLeavesItsClientsTheirPlace) {
  auto first = std::make_unique<RunningServer>(socket_, kLimits);
  {
    TestClient client(socket_, "a");
    EXPECT_EQ(client.ask(TierId::kHbm, 8_GiB), 8_GiB);
    first.reset();
    RunningServer second(socket_, kLimits);
    TestClient newcomer(socket_, "b");
    EXPECT_EQ(newcomer.ask(TierId::kHbm, 8_GiB), 0_B) << "the first client holds it all";
    EXPECT_EQ(second.leased(TierId::kHbm), 8_GiB);
    first = nullptr;
  }
  RunningServer third(socket_, kLimits);
  EXPECT_EQ(third.clients(), 0U);
}

TEST_F(RestartTest, AClientThatComesBackToTheSameDaemonIsCountedOnce) {
  RunningServer server(socket_, kLimits);
  auto page = SharedPage::create("a");
  ASSERT_TRUE(page.ok());
  (*page)->metrics().add<Metric::kSteps>(5);
  for (int round = 0; round < 3; ++round) {
    DaemonLink::Options options;
    options.socket = socket_;
    options.job = "a";
    options.page_fd = (*page)->fd();
    auto link = DaemonLink::start(options);
    ASSERT_TRUE(link.ok());
    ASSERT_TRUE((*link)->connected());
    (*page)->metrics().add<Metric::kSteps>(1);
    const auto steps = [&] {
      return server->registry().view().jobs.at("a").values[first_slot(Metric::kSteps)];
    };
    EXPECT_EQ(steps(), static_cast<std::uint64_t>(6 + round));
    link->reset();
    EXPECT_TRUE(eventually([&] { return server.clients() == 0; }));
    EXPECT_EQ(steps(), static_cast<std::uint64_t>(6 + round));
  }
}

TEST_F(RestartTest, TheSuccessorIsToldWhatIsReallyHeld) {
  auto page = SharedPage::create("a");
  ASSERT_TRUE(page.ok());
  RunningServer server(socket_, kLimits);
  DaemonLink::Options options;
  options.socket = socket_;
  options.page_fd = (*page)->fd();
  options.holdings = [] {
    DaemonLink::Holdings held;
    held[0] = 3_GiB;
    return held;
  };
  const auto link = DaemonLink::start(options);
  ASSERT_TRUE(link.ok());
  EXPECT_EQ(server.leased(TierId::kHbm), 3_GiB);
}

TEST_F(RestartTest, NoDaemonIsSaidOnceAndNothingFails) {
  int lines = 0;
  DaemonLink::Options options;
  options.socket = socket_;
  options.first_pause = options.longest_pause = std::chrono::milliseconds(1);
  options.say = [&](std::string_view) { ++lines; };
  {
    const auto link = DaemonLink::start(options);
    ASSERT_TRUE(link.ok());
    EXPECT_EQ((*link)->request(TierId::kHbm, 1_GiB).error().code, Errc::kNotFound);
    (*link)->release(TierId::kHbm, 1_GiB);
    EXPECT_EQ((*link)->lease(TierId::kHbm), 0_B);
    const auto failed = [] { return metrics().value<Metric::kFaults>(FaultPoint::kWireConnect); };
    const auto before = failed();
    EXPECT_TRUE(eventually([&] { return failed() > before + 3; }));  // it goes on trying
  }
  EXPECT_EQ(lines, 1);
  const auto silent = DaemonLink::start({});
  ASSERT_TRUE(silent.ok());
  EXPECT_FALSE((*silent)->connected());
}

TEST_F(RestartTest, AKilledClientsLeasesComeBackAlsoWhereAForkedChildLivesOn) {
  RunningServer server(socket_, kLimits);
  test::ChildProcess client({test::program("terrace_test_client").string(), "fork"},
                            {{"TERRACE_SOCKET", socket_}});
  ASSERT_TRUE(eventually([&] { return client.out() == "forked\n"; })) << client.out() << client.err();
  EXPECT_EQ(server.leased(TierId::kDdr), 1_MiB);
  client.kill(SIGKILL);
  EXPECT_EQ(client.wait(), 128 + SIGKILL);
  EXPECT_TRUE(eventually([&] { return server.leased(TierId::kDdr) == 0_B; }));
  EXPECT_EQ(server.clients(), 0U);
  EXPECT_EQ(::kill(-client.pid(), SIGKILL), 0) << "the forked child is in the same group and still lives";
}

TEST_F(RestartTest, OneDaemonASocket) {
  auto claim = SocketClaim::claim(socket_);
  ASSERT_TRUE(claim.ok()) << claim.error().text;
  const auto second = SocketClaim::claim(socket_);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.error().text.find("taken by another daemon"), std::string::npos);
}

TEST_F(RestartTest, AStaleSocketIsReplacedAndAFileIsNot) {
  EXPECT_FALSE(SocketClaim::claim(folder_.write("file", "precious")).ok());
  EXPECT_EQ(test::text_of(folder_.file("file")), "precious");
  const pid_t child = ::fork();
  if (child == 0) {
    const auto claim = SocketClaim::claim(socket_);
    ::_exit(claim.ok() ? 0 : 1);  // without a destructor: as if killed
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_TRUE(std::filesystem::exists(socket_));
  const auto claim = SocketClaim::claim(socket_);
  ASSERT_TRUE(claim.ok()) << claim.error().text;
  EXPECT_TRUE(claim->replaced_stale());
}

// What the first daemon granted is not granted again before its holder has come back.
TEST_F(RestartTest, AfterAKilledDaemonNewcomersWaitForThoseWhoHoldLeases) {
  const pid_t killed = ::fork();
  if (killed == 0) {
    const auto claim = SocketClaim::claim(socket_);
    ::_exit(claim.ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(killed, &status, 0), killed);
  RunningServer successor(socket_, kLimits);
  TestClient newcomer(socket_);
  Bytes granted;
  std::thread asking([&] { granted = newcomer.ask(TierId::kHbm, 8_GiB); });
  auto page = SharedPage::create("a");
  ASSERT_TRUE(page.ok());
  DaemonLink::Options options;
  options.socket = socket_;
  options.device = "emulated:0";
  options.page_fd = (*page)->fd();
  options.holdings = [] {
    DaemonLink::Holdings held;
    held[0] = 5_GiB;
    return held;
  };
  const auto holder = DaemonLink::start(options);
  ASSERT_TRUE(holder.ok());
  asking.join();
  EXPECT_EQ(granted, 3_GiB);
}

}  // namespace
}  // namespace terrace
