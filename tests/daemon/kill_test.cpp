// Nobody dies with anybody: daemon and trainer are killed at random moments, by seed.
#include <gtest/gtest.h>

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

std::vector<std::string> run_options(const std::string& report, const char* steps) {
  return {"--recompute", "full", "--steps", steps, "--json", report};
}

class KillTest : public testing::Test {
 protected:
  TemporaryFolder folder_;
  TrainingNode node_{folder_};
};

TEST_F(KillTest, AKilledDaemonChangesNoLossAndASuccessorIsJoined) {
  constexpr const char* kSteps = "150";
  ChildProcess undisturbed(node_.train_command(run_options(folder_.file("undisturbed.json"), kSteps)),
                           {{"TERRACE_SOCKET", ""}});
  ASSERT_EQ(undisturbed.wait(), 0) << undisturbed.err();
  const auto expected = losses_of(folder_.file("undisturbed.json"));
  ASSERT_EQ(expected.size(), 150U);

  int joined = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    ASSERT_TRUE(node_.start_daemon()) << node_.daemon().err();
    const std::string report = folder_.file("run.json");
    ChildProcess trainer(node_.train_command(run_options(report, kSteps)), node_.environment("survivor"));
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
    ChildProcess trainer(node_.train_command(run_options(folder_.file("killed.json"), "100000")),
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
