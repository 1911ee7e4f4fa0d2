// Clients and daemon are killed at random, by seed, while eight clients run and share less than they want.
// Nothing is lost, nothing is counted twice, survivors compute what they would have computed.
//
// TERRACE_CHAOS_KILLS sets how many kills there are (200: half a minute), TERRACE_CHAOS_SEED which.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "daemon/observer.hpp"
#include "tests/daemon/process.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using test::ChildProcess;
using test::eventually;

constexpr std::size_t kClients = 8;
constexpr std::uint64_t kHbm = 64ULL << 20;
constexpr std::uint64_t kDdr = 64ULL << 20;

unsigned number_from(const char* name, unsigned otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : static_cast<unsigned>(std::strtoul(value, nullptr, 10));
}

class ChaosTest : public testing::Test {
 protected:
  void start_daemon() {
    daemon_ = std::make_unique<ChildProcess>(std::vector<std::string>{
        test::program("terraced"), "--socket", socket_, "--listen", "127.0.0.1:0", "--policy", policy_,
        "--hbm", std::to_string(kHbm), "--ddr", std::to_string(kDdr)});
    ASSERT_TRUE(eventually([&] { return !status().is_null(); })) << daemon_->err();
  }
  void start_client(std::size_t which) {
    clients_[which] = std::make_unique<ChildProcess>(
        std::vector<std::string>{test::program("terrace_training_client"), "1000000", "1024"},
        ChildProcess::Environment{{"TERRACE_SOCKET", socket_},
                                  {"TERRACE_JOB", "chaos" + std::to_string(which % 3)},
                                  {"TERRACE_POLICY", ""}});
  }
  [[nodiscard]] nlohmann::json status() const {
    auto observer = Observer::connect(socket_);
    const auto text = observer ? observer->status(0) : Result<std::string>(observer.error());
    return text ? nlohmann::json::parse(*text, nullptr, false) : nlohmann::json();
  }
  // Whether the daemon has a client of this process.
  [[nodiscard]] bool listed(pid_t pid) const {
    for (const auto& client : status().value("clients", nlohmann::json::array())) {
      if (client["pid"] == pid) return true;
    }
    return false;
  }
  // What the clients hold comes to what the daemon says, and is no more than there is. Who starts while no
  // daemon lives takes what its policy allows, and gives it back once it is asked.
  [[nodiscard]] bool sums_are_exact() const {
    const auto now = status();
    if (now.is_null()) return false;
    std::uint64_t hbm = 0, ddr = 0;
    for (const auto& client : now["clients"]) {
      hbm += client["leased"]["hbm"].get<std::uint64_t>();
      ddr += client["leased"]["ddr"].get<std::uint64_t>();
    }
    EXPECT_EQ(now["leased"]["hbm"].get<std::uint64_t>(), hbm);
    EXPECT_EQ(now["leased"]["ddr"].get<std::uint64_t>(), ddr);
    return hbm <= kHbm && ddr <= kDdr && hbm == held(TierId::kHbm) && ddr == held(TierId::kDdr);
  }
  // The sum of what the clients say themselves.
  [[nodiscard]] std::uint64_t held(TierId tier) const {
    const auto body = test::http_get(status().value("listen", ""), "/metrics").body;
    double sum = 0;
    for (const char* job : {"chaos0", "chaos1", "chaos2"}) {
      const std::string labels = std::string("{job=\"") + job + "\",tier=\"" + name_of(tier) + "\"}";
      sum += test::sample(body, "terrace_budget_bytes" + labels).value_or(0);
    }
    return static_cast<std::uint64_t>(sum);
  }
  [[nodiscard]] bool at_work(std::size_t which) const {
    const std::string out = clients_[which]->out();
    return std::count(out.begin(), out.end(), '\n') > 0;
  }
  [[nodiscard]] static std::size_t descriptors_of(pid_t pid) {
    std::error_code ignored;
    const auto folder = std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ignored);
    return static_cast<std::size_t>(std::distance(begin(folder), end(folder)));
  }
  void kill_client(std::size_t which) {
    const pid_t pid = clients_[which]->pid();
    clients_[which]->kill(SIGKILL);
    EXPECT_EQ(clients_[which]->wait(), 128 + SIGKILL) << clients_[which]->err();
    // The promise names the second.
    EXPECT_TRUE(eventually([&] { return !listed(pid); }, std::chrono::seconds(1)));
    start_client(which);
  }
  void kill_daemon() {
    daemon_->kill(SIGKILL);
    EXPECT_EQ(daemon_->wait(), 128 + SIGKILL) << daemon_->err();
    start_daemon();
  }

  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
  std::string policy_ = folder_.write(
      "p.toml", "[[daemon.job]]\nmatch = \"chaos0\"\npriority = 2\nhbm_guarantee = \"12MiB\"\n");
  std::unique_ptr<ChildProcess> daemon_;
  std::array<std::unique_ptr<ChildProcess>, kClients> clients_;
};

TEST_F(ChaosTest, NothingLeaksAndSumsAreExactWhoeverIsKilled) {
  const unsigned kills = number_from("TERRACE_CHAOS_KILLS", 30);
  std::mt19937 random(number_from("TERRACE_CHAOS_SEED", 1));
  start_daemon();
  const std::size_t idle_descriptors = descriptors_of(daemon_->pid());
  for (std::size_t i = 0; i < kClients; ++i) start_client(i);
  for (unsigned kill = 0; kill < kills && !HasFatalFailure(); ++kill) {
    std::this_thread::sleep_for(milliseconds(random() % 150));
    const unsigned victim = random() % (kClients + 2);
    SCOPED_TRACE("kill " + std::to_string(kill) + " of " + (victim < kClients ? "a client" : "the daemon"));
    victim < kClients ? kill_client(victim) : kill_daemon();
    for (auto& client : clients_) ASSERT_TRUE(client->running()) << client->err();
  }
  // Who is left has joined, works, and together they hold what the daemon says, no more than there is.
  for (std::size_t i = 0; i < kClients; ++i) {
    EXPECT_TRUE(eventually([&] { return at_work(i) && listed(clients_[i]->pid()); })) << clients_[i]->err();
  }
  EXPECT_EQ(status().value("clients_total", 0U), kClients);
  EXPECT_TRUE(eventually([&] { return sums_are_exact(); })) << status().dump();
  for (auto& client : clients_) client->kill(SIGTERM);
  for (auto& client : clients_) EXPECT_EQ(client->wait(), 0) << client->err();
  EXPECT_TRUE(eventually([&] { return status().value("clients_total", 99U) == 0; }));
  EXPECT_EQ(status()["leased"]["hbm"], 0);
  EXPECT_EQ(status()["leased"]["ddr"], 0);
  // One connection more or less: the status asked for just now may not be closed yet.
  EXPECT_TRUE(eventually([&] { return descriptors_of(daemon_->pid()) <= idle_descriptors; }));
  daemon_->kill(SIGTERM);
  EXPECT_EQ(daemon_->wait(), 0) << daemon_->err();
}

}  // namespace
}  // namespace terrace
