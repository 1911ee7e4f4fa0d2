// The eye of bench/daemon.py: it sees an excess where there is one, and none where there is none.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "runtime/metrics.hpp"
#include "runtime/shared_page.hpp"
#include "tests/daemon/process.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

// What it reports of this process as the only client of a device, after watching for a moment.
nlohmann::json watched(std::uint64_t budget) {
  const std::string command = "sleep 0.2 | " + test::program("daemon_load").string() + " watch " +
                              std::to_string(budget) + " " + std::to_string(::getpid()) + " 0";
  test::ChildProcess watch({"sh", "-c", command});
  EXPECT_EQ(watch.wait(), 0) << watch.err();
  return nlohmann::json::parse(watch.out(), nullptr, false);
}

TEST(DaemonBench, TheEyeSeesAnExcessAndNothingElse) {
  auto page = SharedPage::create("job");
  ASSERT_TRUE(page.ok());
  (*page)->metrics().set<Metric::kBudgetBytes>(TierId::kHbm, 100_B);
  const auto within = watched(100), beyond = watched(99);
  EXPECT_GT(within["looks"], 0);
  EXPECT_EQ(within["most"], 100);
  EXPECT_EQ(within["exceeded"], 0);
  EXPECT_EQ(beyond["exceeded"], beyond["looks"]);
}

}  // namespace
}  // namespace terrace
