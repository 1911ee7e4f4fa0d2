#include "runtime/metrics.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <set>
#include <thread>

#include "runtime/site_groups.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

TEST(Metrics, EveryCombinationOfLabelsHasASlotOfItsOwn) {
  std::set<std::string> seen;
  std::size_t next = 0;
  for (const MetricInfo& info : metric_table()) {
    EXPECT_EQ(info.first_slot, next);
    next += info.slots;
    for (std::size_t i = 0; i < info.slots; ++i) {
      std::string series = info.name;
      for (const auto& [name, value] : labels_of(info, i)) {
        EXPECT_NE(value, "?") << info.name;
        series += "," + name + "=" + value;
      }
      EXPECT_TRUE(seen.insert(series).second) << series;
    }
  }
  EXPECT_EQ(next, kMetricSlots);
}

TEST(Metrics, AddReachesTheSlotThatItsLabelsName) {
  auto page = std::make_unique<MetricsPage>();
  page->add<Metric::kTransferBytes>(Direction::kD2H, CopyReason::kRestore, 5_MiB);
  page->add<Metric::kTransferBytes>(Direction::kD2H, CopyReason::kRestore, 1_MiB);
  page->add<Metric::kCacheEvictions>(3);
  const MetricInfo& info = info_of(Metric::kTransferBytes);
  for (std::size_t i = 0; i < info.slots; ++i) {
    const auto labels = labels_of(info, i);
    const bool named = labels[0].second == "d2h" && labels[1].second == "restore";
    EXPECT_EQ(page->raw(info.first_slot + i), named ? (6_MiB).count() : 0) << i;
  }
  EXPECT_EQ(page->value<Metric::kCacheEvictions>(), 3U);
}

TEST(Metrics, TimeIsKeptInNanosecondsAndShownInSeconds) {
  auto page = std::make_unique<MetricsPage>();
  page->add<Metric::kStepSeconds>(std::chrono::milliseconds(1500));
  page->add<Metric::kStepSeconds>(0.25);
  page->add<Metric::kStepSeconds>(-1.0);  // a clock that went back counts nothing
  EXPECT_EQ(page->value<Metric::kStepSeconds>(), 1750000000U);
  EXPECT_DOUBLE_EQ(exposed_value(info_of(Metric::kStepSeconds), page->value<Metric::kStepSeconds>()), 1.75);
}

TEST(Metrics, PeaksKeepTheLargest) {
  auto page = std::make_unique<MetricsPage>();
  page->raise<Metric::kTierPeakBytes>(TierId::kHbm, 7_MiB);
  page->raise<Metric::kTierPeakBytes>(TierId::kHbm, 3_MiB);
  EXPECT_EQ(page->value<Metric::kTierPeakBytes>(TierId::kHbm), (7_MiB).count());
}

TEST(Metrics, ThreadsLoseNoCount) {
  auto page = std::make_unique<MetricsPage>();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) page->add<Metric::kSteps>(1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(page->value<Metric::kSteps>(), 40000U);
}

TEST(Metrics, AttachingMovesWhatWasCountedAndDetachingLeavesIt) {
  auto page = std::make_unique<MetricsPage>();
  const auto before = metrics().value<Metric::kSteps>();
  metrics().add<Metric::kSteps>(2);
  attach_metrics(*page);
  EXPECT_EQ(&metrics(), page.get());
  metrics().add<Metric::kSteps>(1);
  EXPECT_EQ(page->value<Metric::kSteps>(), before + 3);
  detach_metrics();
  EXPECT_NE(&metrics(), page.get());
  EXPECT_EQ(metrics().value<Metric::kSteps>(), 0U);
  EXPECT_EQ(page->value<Metric::kSteps>(), before + 3);
}

// Names are the process's: this one's rows stay named for the tests that follow, so each takes names of its
// own.
TEST(SiteGroupRows, OneNameIsOneRowWhicheverPageIsLive) {
  const std::size_t row = site_group_row("rows.a");
  metrics().site_groups().count(row, FetchOutcome::kLate);
  auto page = std::make_unique<MetricsPage>();
  attach_metrics(*page);
  EXPECT_EQ(page->site_groups().name(row), "rows.a");
  EXPECT_EQ(page->site_groups().counts(row), (SiteGroups::Counts{0, 0, 1})) << "what was counted has moved";
  const std::size_t later = site_group_row("rows.b");
  EXPECT_NE(later, row);
  EXPECT_EQ(site_group_row("rows.a"), row);
  auto next = std::make_unique<MetricsPage>();
  attach_metrics(*next);
  EXPECT_EQ(next->site_groups().name(later), "rows.b") << "named while another page was live";
  EXPECT_EQ(next->site_groups().counts(row), SiteGroups::Counts{});
  detach_metrics();
  EXPECT_EQ(site_group_row("rows.b"), later);
}

TEST(SiteGroupRows, LongNamesAreCutAndLateOnesShareARow) {
  const std::string longest(100, 'x');
  const std::size_t row = site_group_row(longest);
  EXPECT_EQ(site_group_row(longest + "y"), row);
  EXPECT_EQ(metrics().site_groups().name(row), longest.substr(0, SiteGroups::kNameSize - 1));
  EXPECT_EQ(site_group_row(""), SiteGroups::kOther);
  for (std::size_t i = 0; i < SiteGroups::kRows; ++i) (void)site_group_row("rows.many." + std::to_string(i));
  EXPECT_EQ(site_group_row("rows.one too many"), SiteGroups::kOther);
  EXPECT_EQ(metrics().site_groups().name(SiteGroups::kOther), SiteGroups::kOtherName);
  EXPECT_EQ(site_group_row(longest), row);
}

TEST(Metrics, AForkedChildCountsForItself) {
  auto page = std::make_unique<MetricsPage>();
  attach_metrics(*page);
  metrics().add<Metric::kSteps>(1);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(&metrics() != page.get() && metrics().value<Metric::kSteps>() == 0 ? 0 : 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(&metrics(), page.get());
  detach_metrics();
}

TEST(Metrics, NamesFollowTheConventions) {
  for (const MetricInfo& info : metric_table()) {
    const std::string name = info.name;
    EXPECT_EQ(name.rfind("terrace_", 0), 0U) << name;
    EXPECT_EQ(name.ends_with("_total"), info.type == MetricType::kCounter) << name;
    EXPECT_EQ(name.find("_bytes") != std::string::npos, info.unit == MetricUnit::kBytes) << name;
    EXPECT_EQ(name.find("_seconds") != std::string::npos, info.unit == MetricUnit::kSeconds) << name;
  }
}

TEST(Metrics, TheDocumentIsCurrent) {
  std::ifstream file(test::source_dir() / "docs" / "METRICS.md", std::ios::binary);
  const std::string written((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_EQ(written, metrics_document()) << "terrace metrics-doc > docs/METRICS.md";
}

}  // namespace
}  // namespace terrace
