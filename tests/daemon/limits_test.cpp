// Clients that talk too much, say too little, or lie in their shared pages: nobody else is harmed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <sstream>
#include <thread>

#include "daemon/message_rate.hpp"
#include "tests/daemon/process.hpp"
#include "tests/daemon/running_server.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using test::eventually;
using test::RunningServer;
using test::TestClient;

TEST(MessageRate, ABurstIsFreeAndTheRestComesAtARate) {
  MessageRate rate;
  milliseconds now{5000};
  std::int64_t taken = 0;
  while (rate.take(now)) ++taken;
  EXPECT_EQ(taken, MessageRate::kBurst);
  EXPECT_GT(rate.opens_at(), now);
  EXPECT_FALSE(rate.take(now));
  now += 10 * MessageRate::kEach;
  for (taken = 0; rate.take(now); ++taken) {
  }
  EXPECT_EQ(taken, 10);
  // Looked at often or seldom, it is the same.
  taken = 0;
  for (const milliseconds end = now + 100 * MessageRate::kEach; now < end; now += milliseconds(1))
    taken += rate.take(now) ? 1 : 0;
  EXPECT_NEAR(static_cast<double>(taken), 100, 1);
  now += std::chrono::hours(1);
  for (taken = 0; rate.take(now); ++taken) {
  }
  EXPECT_EQ(taken, MessageRate::kBurst);
}

class LimitsTest : public testing::Test {
 protected:
  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
};

TEST_F(LimitsTest, WhoTalksTooFastWaitsAndOthersDoNot) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  TestClient loud(socket_, "loud"), quiet(socket_, "quiet");
  std::atomic<std::int64_t> answered{0};
  std::atomic<bool> stop{false};
  std::thread talking([&] {
    while (!stop) {
      (void)loud.ask(TierId::kDdr, 0_B);
      ++answered;
    }
  });
  EXPECT_TRUE(eventually([&] { return answered >= MessageRate::kBurst - 1; }));
  // From here on the loud one comes as often as the rate allows; each of these would else be behind many of
  // its.
  const std::int64_t before = answered;
  for (int i = 0; i < 50; ++i) EXPECT_EQ(quiet.ask(TierId::kHbm, 1_MiB), 1_MiB);
  EXPECT_TRUE(eventually([&] { return answered > before; })) << "it waits, and is heard again";
  stop = true;
  talking.join();
  EXPECT_TRUE(loud.link().connected());
}

TEST_F(LimitsTest, APausedClientThatEndsIsNoticed) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  {
    TestClient loud(socket_, "loud");
    for (std::int64_t i = 0; i < MessageRate::kBurst + 5; ++i) (void)loud.ask(TierId::kDdr, 1_B);
  }
  EXPECT_TRUE(eventually([&] { return server.clients() == 0; }));
  EXPECT_EQ(server.leased(TierId::kDdr), 0_B);
}

TEST_F(LimitsTest, GarbageInAPageIsTheLiarsOwn) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB, .listen = "127.0.0.1:0"});
  TestClient honest(socket_, "honest"), liar(socket_, "liar"), accomplice(socket_, "liar");
  honest.page().add<Metric::kSteps>(7);
  auto* slots = reinterpret_cast<std::uint64_t*>(&liar.page());
  std::fill_n(slots, kMetricSlots, UINT64_MAX);
  std::fill_n(reinterpret_cast<std::uint64_t*>(&accomplice.page()), kMetricSlots, UINT64_MAX);
  const auto metrics = [&] { return test::http_get(server->listen_address(), "/metrics"); };
  EXPECT_EQ(metrics().status, 200);
  EXPECT_EQ(test::sample(metrics().body, "terrace_steps_total{job=\"honest\"}"), 7.0);
  const auto lied = test::sample(metrics().body, "terrace_steps_total{job=\"liar\"}");
  std::fill_n(slots, kMetricSlots, 0U);
  EXPECT_GE(test::sample(metrics().body, "terrace_steps_total{job=\"liar\"}"), lied)
      << "a counter never falls";
  EXPECT_EQ(server.leased(TierId::kHbm), 0_B) << "what a page says of leases counts for nothing";
}

TEST_F(LimitsTest, AJobsNameBreaksNoLineOfTheLog) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  {
    RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
    auto page = SharedPage::create("a");
    auto connection = WireConnection::connect(socket_);
    ASSERT_TRUE(connection.ok());
    Hello hello;
    hello.job = WireText<64>("a\nclient 1 has ended\x1b[2J");
    ASSERT_TRUE(connection->send(hello, 1, (*page)->fd()).ok());
    ASSERT_TRUE(connection->receive(std::chrono::seconds(30)).ok());
  }
  spdlog::set_default_logger(before);
  EXPECT_NE(log.str().find("job a_client_1_has_ended__2J"), std::string::npos) << log.str();
  EXPECT_EQ(log.str().find('\x1b'), std::string::npos);
}

// All descriptors of this process are used up, the server's with them. It says so once for each time that it
// tries, and then sleeps: one that is woken at once would say it thousands of times.
TEST_F(LimitsTest, WithoutDescriptorsTheServerWaitsAndGoesOnLater) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  {
    RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
    rlimit limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    rlimit small = limit;
    small.rlim_cur = 128;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &small), 0);
    std::vector<OwnedFd> all;
    for (;;) {
      OwnedFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!fd.valid()) break;
      all.push_back(std::move(fd));
    }
    all.pop_back();  // for the client's side
    auto connection = WireConnection::connect(socket_);
    ASSERT_TRUE(connection.ok()) << connection.error().text;
    Hello observer;
    observer.role = Role::kObserver;
    ASSERT_TRUE(connection->send(observer, 1).ok());
    EXPECT_EQ(connection->receive(milliseconds(300)).error().code, Errc::kTimeout);
    all.clear();
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    const auto welcome = connection->receive(std::chrono::seconds(30));
    ASSERT_TRUE(welcome.ok()) << welcome.error().text;
    EXPECT_TRUE(std::holds_alternative<Welcome>(welcome->message));
  }
  spdlog::set_default_logger(before);
  const std::string said = log.str();
  std::size_t tries = 0;
  for (std::size_t at = said.find("nobody more can connect"); at != std::string::npos;
       at = said.find("nobody more can connect", at + 1))
    ++tries;
  EXPECT_GE(tries, 1U) << said;
  EXPECT_LT(tries, 40U) << "more than a second apart";
}

TEST_F(LimitsTest, APageCannotBeTakenAwayFromItsReader) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  auto page = SharedPage::create("a");
  ASSERT_TRUE(page.ok());
  EXPECT_NE(::ftruncate((*page)->fd(), 0), 0);
  EXPECT_NE(::ftruncate((*page)->fd(), 1 << 20), 0);
  const OwnedFd open_to_change(::memfd_create("terrace-metrics", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(open_to_change.get(), 1 << 20), 0);
  auto connection = WireConnection::connect(socket_);
  ASSERT_TRUE(connection.ok());
  ASSERT_TRUE(connection->send(Hello{}, 1, open_to_change.get()).ok());
  const auto reply = connection->receive(std::chrono::seconds(30));
  ASSERT_TRUE(reply.ok());
  EXPECT_NE(std::get<Refusal>(reply->message).text.find("not sealed"), std::string::npos);
}

TEST_F(LimitsTest, AnsweringWhatWasNotAskedGainsNothing) {
  RunningServer server(socket_, {.hbm = 8_GiB, .ddr = 2_GiB});
  TestClient client(socket_, "a");
  EXPECT_EQ(client.ask(TierId::kHbm, 3_GiB), 3_GiB);
  client.link().answer({.tier = TierId::kHbm, .number = 99, .target = 0_B}, 1_GiB);
  EXPECT_TRUE(eventually([&] { return server.leased(TierId::kHbm) == 2_GiB; }));
  client.link().answer({.tier = TierId::kHbm, .number = 99, .target = 0_B}, 100_GiB);
  EXPECT_TRUE(eventually([&] { return server.leased(TierId::kHbm) == 0_B; }));
  EXPECT_EQ(client.ask(TierId::kHbm, 9_GiB), 8_GiB);
}

}  // namespace
}  // namespace terrace
