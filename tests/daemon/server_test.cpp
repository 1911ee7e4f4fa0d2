#include "daemon/server.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <nlohmann/json.hpp>
#include <random>

#include "daemon/observer.hpp"
#include "runtime/fault.hpp"
#include "tests/daemon/process.hpp"
#include "tests/daemon/running_server.hpp"

namespace terrace {
namespace {

using test::eventually;
using test::RunningServer;
using test::TestClient;

const RunningServer::Limits kLimits{.hbm = 8_GiB, .ddr = 2_GiB};
const RunningServer::Limits kWithHttp{.hbm = 8_GiB, .ddr = 2_GiB, .listen = "127.0.0.1:0"};

class ServerTest : public testing::Test {
 protected:
  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
};

TEST_F(ServerTest, ClientsShareTheBudgetAndNeverMore) {
  RunningServer server(socket_, kLimits);
  TestClient one(socket_), two(socket_);
  EXPECT_TRUE(one.link().connected());
  EXPECT_EQ(one.link().node_budget(TierId::kHbm), 8_GiB);
  EXPECT_EQ(one.ask(TierId::kHbm, 6_GiB), 6_GiB);
  EXPECT_EQ(two.ask(TierId::kHbm, 6_GiB), 2_GiB);
  EXPECT_EQ(two.ask(TierId::kHbm, 1_GiB), 0_B);
  EXPECT_EQ(two.ask(TierId::kDdr, 5_GiB), 2_GiB);
  EXPECT_EQ(one.link().lease(TierId::kHbm), 6_GiB);
  one.link().release(TierId::kHbm, 4_GiB);
  EXPECT_EQ(one.link().lease(TierId::kHbm), 2_GiB);
  EXPECT_TRUE(eventually([&] { return server.leased(TierId::kHbm) == 4_GiB; }));
  EXPECT_EQ(two.ask(TierId::kHbm, 9_GiB), 4_GiB);
}

TEST_F(ServerTest, SeededClientsStayInsideTheBudget) {
  RunningServer server(socket_, {.hbm = 100_MiB, .ddr = 50_MiB});
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      TestClient client(socket_);
      for (int i = 0; i < 60; ++i) {
        const TierId tier = random() % 2 == 0 ? TierId::kHbm : TierId::kDdr;
        if (random() % 3 == 0) {
          client.link().release(tier, Bytes(random() % (20 << 20)));
        } else {
          (void)client.ask(tier, Bytes(random() % (40 << 20)));
        }
        const auto view = server->registry().view();
        EXPECT_LE(view.leased[0], 100_MiB);
        EXPECT_LE(view.leased[static_cast<std::size_t>(TierId::kDdr)], 50_MiB);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(eventually([&] { return server.clients() == 0 && server.leased(TierId::kHbm) == 0_B; }));
}

TEST_F(ServerTest, AClientThatHangsUpGivesEverythingBack) {
  RunningServer server(socket_, kLimits);
  {
    TestClient client(socket_);
    EXPECT_EQ(client.ask(TierId::kHbm, 3_GiB), 3_GiB);
  }
  EXPECT_TRUE(eventually([&] { return server.clients() == 0; }));
  EXPECT_EQ(server.leased(TierId::kHbm), 0_B);
}

TEST_F(ServerTest, CountersOfEndedClientsStayInTheirJob) {
  RunningServer server(socket_, kWithHttp);
  const auto steps = [&] {
    const auto answer = test::http_get(server->listen_address(), "/metrics");
    return test::sample(answer.body, "terrace_steps_total{job=\"a\"}").value_or(-1);
  };
  const auto live_bytes = [&] {
    const auto answer = test::http_get(server->listen_address(), "/metrics");
    return test::sample(answer.body, "terrace_tier_bytes{job=\"a\",tier=\"hbm\",pool=\"weights\"}")
        .value_or(-1);
  };
  {
    TestClient client(socket_, "a");
    client.page().add<Metric::kSteps>(5);
    client.page().set<Metric::kTierBytes>(TierId::kHbm, Pool::kWeights, 1_MiB);
    EXPECT_EQ(steps(), 5);
    EXPECT_EQ(live_bytes(), 1 << 20);
  }
  EXPECT_TRUE(eventually([&] { return server.clients() == 0; }));
  EXPECT_EQ(steps(), 5);
  EXPECT_EQ(live_bytes(), 0);
  TestClient next(socket_, "a");
  next.page().add<Metric::kSteps>(2);
  EXPECT_EQ(steps(), 7);
}

TEST_F(ServerTest, JobLabelsAreBounded) {
  RunningServer server(socket_, kLimits);
  for (std::size_t i = 0; i < kMaxJobs + 5; ++i) TestClient client(socket_, "job" + std::to_string(i));
  EXPECT_TRUE(eventually([&] { return server->registry().view().joined_total == kMaxJobs + 5; }));
  const auto jobs = server->registry().view().jobs;
  EXPECT_LE(jobs.size(), kMaxJobs + 1);
  EXPECT_TRUE(jobs.contains("other"));
}

TEST_F(ServerTest, ServesHealthAndMetrics) {
  RunningServer server(socket_, kWithHttp);
  TestClient client(socket_, "train");
  EXPECT_EQ(client.ask(TierId::kHbm, 1_GiB), 1_GiB);
  EXPECT_EQ(test::http_get(server->listen_address(), "/healthz").body, "ok\n");
  EXPECT_EQ(test::http_get(server->listen_address(), "/nothing").status, 404);
  const auto answer = test::http_get(server->listen_address(), "/metrics");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(test::sample(answer.body, "terrace_lease_bytes{job=\"train\",tier=\"hbm\"}"), 1073741824.0);
  EXPECT_EQ(test::sample(answer.body, "terrace_node_budget_bytes{tier=\"hbm\"}"), 8589934592.0);
  EXPECT_EQ(test::sample(answer.body, "terrace_clients"), 1.0);
  for (const MetricInfo& info : metric_table()) {
    EXPECT_NE(answer.body.find(std::string("# HELP ") + info.name + " "), std::string::npos) << info.name;
    EXPECT_NE(answer.body.find(std::string("\n") + info.name + "{"), std::string::npos) << info.name;
  }
  for (const NodeMetricInfo& info : node_metric_table()) {
    EXPECT_NE(answer.body.find(std::string("# HELP ") + info.name + " "), std::string::npos) << info.name;
  }
}

TEST_F(ServerTest, PrometheusOwnCheckerAcceptsTheMetrics) {
  if (std::system("command -v promtool > /dev/null 2>&1") != 0) GTEST_SKIP() << "promtool is not installed";
  RunningServer server(socket_, kWithHttp);
  TestClient client(socket_, "train");
  const std::string file =
      folder_.write("metrics", test::http_get(server->listen_address(), "/metrics").body);
  test::ChildProcess promtool({"sh", "-c", "promtool check metrics < " + file});
  EXPECT_EQ(promtool.wait(), 0) << promtool.err() << promtool.out();
}

TEST_F(ServerTest, StatusNamesClientsAndLeases) {
  RunningServer server(socket_, kWithHttp);
  TestClient client(socket_, "train");
  EXPECT_EQ(client.ask(TierId::kDdr, 1_GiB), 1_GiB);
  auto observer = Observer::connect(socket_);
  ASSERT_TRUE(observer.ok()) << observer.error().text;
  const auto text = observer->status(0);
  ASSERT_TRUE(text.ok());
  const auto json = nlohmann::json::parse(*text);
  EXPECT_EQ(json["listen"], server->listen_address());
  ASSERT_EQ(json["clients"].size(), 1U);
  EXPECT_EQ(json["clients"][0]["pid"], ::getpid());
  EXPECT_EQ(json["clients"][0]["leased"]["ddr"], 1U << 30);
  EXPECT_EQ(json["clients"][0]["job"], "train");
}

// --- Guests that misbehave ---

WireConnection connected_to(const std::string& socket) {
  auto connection = WireConnection::connect(socket);
  EXPECT_TRUE(connection.ok());
  return std::move(*connection);
}

// What a connection is told before it is closed; nothing where it is closed without a word.
std::string refusal_of(WireConnection& connection) {
  auto reply = connection.receive(std::chrono::seconds(30));
  if (!reply) return {};
  const auto* refusal = std::get_if<Refusal>(&reply->message);
  EXPECT_NE(refusal, nullptr);
  EXPECT_EQ(connection.receive(std::chrono::seconds(30)).error().code, Errc::kIo);
  return refusal == nullptr ? "" : refusal->text;
}

TEST_F(ServerTest, RefusesWhatIsOutOfOrder) {
  RunningServer server(socket_, kWithHttp);
  auto early = connected_to(socket_);
  ASSERT_TRUE(early.send(LeaseRequest{0, Unmet::kForget, 1}, 1).ok());
  EXPECT_EQ(refusal_of(early), "Hello comes first");
  auto pageless = connected_to(socket_);
  ASSERT_TRUE(pageless.send(Hello{}, 1).ok());
  EXPECT_EQ(refusal_of(pageless), "Hello without a page");
  auto wrong_page = connected_to(socket_);
  const OwnedFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(wrong_page.send(Hello{}, 1, null.get()).ok());
  EXPECT_NE(refusal_of(wrong_page).find("not a memfd"), std::string::npos);
  auto imposter = connected_to(socket_);
  ASSERT_TRUE(imposter.send(Welcome{}, 1).ok());
  EXPECT_NE(refusal_of(imposter), "");
  auto body = test::http_get(server->listen_address(), "/metrics").body;
  EXPECT_EQ(test::sample(body, "terrace_messages_refused_total"), 4.0);
}

TEST_F(ServerTest, RandomBytesEndTheirConnectionAlone) {
  RunningServer server(socket_, kLimits);
  TestClient client(socket_);
  std::mt19937 random(7);
  for (int i = 0; i < 200; ++i) {
    auto connection = connected_to(socket_);
    std::vector<unsigned char> bytes(1 + random() % 400);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    ASSERT_GT(::send(connection.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
    EXPECT_NE(refusal_of(connection), "");
  }
  EXPECT_EQ(client.ask(TierId::kHbm, 1_GiB), 1_GiB);
}

TEST_F(ServerTest, APageThatSaysItCountsBackwardsDoesNot) {
  RunningServer server(socket_, kLimits);
  TestClient client(socket_, "a");
  client.page().add<Metric::kSteps>(9);
  EXPECT_EQ(server->registry().view().jobs.at("a").values[first_slot(Metric::kSteps)], 9U);
  client.page().clear();
  EXPECT_EQ(server->registry().view().jobs.at("a").values[first_slot(Metric::kSteps)], 9U);
}

TEST_F(ServerTest, AnOldVersionIsToldSo) {
  RunningServer server(socket_, kLimits);
  auto connection = connected_to(socket_);
  auto packet = encode(StatusRequest{}, 1);
  packet[4] = std::byte{0};
  ASSERT_GT(::send(connection.fd(), packet.data(), packet.size(), MSG_NOSIGNAL), 0);
  EXPECT_NE(refusal_of(connection).find("version 0"), std::string::npos);
}

// Whichever call fails, client or server: the link recovers, and nothing is leased twice.
TEST_F(ServerTest, RecoversFromEveryFaultOnTheWire) {
  for (const FaultPoint point : {FaultPoint::kWireConnect, FaultPoint::kWireSend, FaultPoint::kWireReceive}) {
    for (std::uint64_t nth = 1;; ++nth) {
      const std::string socket = folder_.file(name_of(point) + std::to_string(nth));
      RunningServer server(socket, kLimits);
      bool fired = false;
      {
        const ScopedFaults faults(fail_call(point, nth));
        TestClient client(socket);
        (void)client.ask(TierId::kHbm, 1_GiB);
        client.link().release(TierId::kHbm, 512_MiB);
        EXPECT_TRUE(eventually([&] { return client.link().connected(); }));
        EXPECT_TRUE(eventually([&] {
          return server.leased(TierId::kHbm) == client.link().lease(TierId::kHbm);
        })) << name_of(point)
            << " " << nth;
        fired = faults.fired();
      }
      EXPECT_TRUE(eventually([&] { return server.leased(TierId::kHbm) == 0_B; }));
      if (!fired) break;
      ASSERT_LT(nth, 200U);
    }
  }
}

}  // namespace
}  // namespace terrace
