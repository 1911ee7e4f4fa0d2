// Nobody dies with anybody: daemon and trainer are killed at random moments, by seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/daemon/process.hpp"
#include "tests/daemon/training_run.hpp"

namespace terrace::test {
namespace {

constexpr int kSeeds = 20;
constexpr std::chrono::milliseconds kLongestDelay{400};
constexpr const char* kClients = "terrace_clients";
constexpr const char* kHbmLease = "terrace_lease_bytes{job=\"victim\",tier=\"hbm\"}";

void sleep_at_random(std::mt19937& random) {
  std::this_thread::sleep_for(std::chrono::milliseconds(random() % kLongestDelay.count()));
}

std::vector<std::string> run_options(const std::string& report, int steps) {
  return {"--recompute", "full", "--steps", std::to_string(steps), "--json", report};
}

constexpr int kEndless = 100000;

class KillTest : public testing::Test {
 protected:
  std::vector<std::string> undisturbed_losses(int steps) {
    const std::string report = folder_.file("undisturbed.json");
    ChildProcess trainer(node_.train_command(run_options(report, steps)), {{"TERRACE_SOCKET", ""}});
    EXPECT_EQ(trainer.wait(), 0) << trainer.err();
    return losses_of(report);
  }
  // A successor is started within two delays: fast machines need more steps to last so long than sanitizer
  // builds.
  int steps_that_outlast_the_delays() {
    (void)undisturbed_losses(10);
    const auto report = nlohmann::json::parse(text_of(folder_.file("undisturbed.json")), nullptr, false);
    const double ms = report.is_discarded() ? 10 : report.value("ms_per_step", 10.0);
    return std::clamp(static_cast<int>(4 * kLongestDelay.count() / ms), 20, 400);
  }

  TemporaryFolder folder_;
  TrainingNode node_{folder_};
};

TEST_F(KillTest, AKilledDaemonChangesNoLossAndASuccessorIsJoined) {
  const int steps = steps_that_outlast_the_delays();
  const auto expected = undisturbed_losses(steps);
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(steps));

  int joined = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    ASSERT_TRUE(node_.start_daemon()) << node_.daemon().err();
    const std::string report = folder_.file("run.json");
    ChildProcess trainer(node_.train_command(run_options(report, steps)), node_.environment("survivor"));
    sleep_at_random(random);
    node_.daemon().kill(SIGKILL);
    (void)node_.daemon().wait();
    sleep_at_random(random);
    ASSERT_TRUE(node_.start_daemon()) << "seed " << seed << ": " << node_.daemon().err();
    ASSERT_TRUE(eventually([&] { return node_.value(kClients) == 1 || !trainer.running(); }));
    if (trainer.running()) ++joined;
    EXPECT_EQ(trainer.wait(), 0) << "seed " << seed << ": " << trainer.err();
    EXPECT_EQ(losses_of(report), expected) << "seed " << seed;
    node_.daemon().kill(SIGTERM);
    EXPECT_EQ(node_.daemon().wait(), 0) << node_.daemon().err();
  }
  EXPECT_GT(joined, 0) << "no run lasted until a successor was there: the test shows nothing";
}

TEST_F(KillTest, AKilledTrainerGivesItsLeasesBack) {
  ASSERT_TRUE(node_.start_daemon()) << node_.daemon().err();
  for (int seed = 0; seed < kSeeds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed) + 100);
    ChildProcess trainer(node_.train_command(run_options(folder_.file("killed.json"), kEndless)),
                         node_.environment("victim"));
    ASSERT_TRUE(eventually([&] { return node_.value(kHbmLease) > 0 || !trainer.running(); }));
    ASSERT_TRUE(trainer.running()) << trainer.err();
    sleep_at_random(random);
    trainer.kill(SIGKILL);
    EXPECT_EQ(trainer.wait(), 128 + SIGKILL);
    // The promise names the second.
    EXPECT_TRUE(eventually([&] { return node_.value(kHbmLease) == 0 && node_.value(kClients) == 0; },
                           std::chrono::seconds(1)))
        << "seed " << seed;
  }
}

}  // namespace
}  // namespace terrace::test
