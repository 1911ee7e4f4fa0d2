#include "allocator/usable_cpus.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace terrace {
namespace {

namespace fs = std::filesystem;

class UsableCpusTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            (std::string("usable_cpus_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    all_ = usable_cpus({}, root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }

  fs::path root_;
  UsableCpus all_;  // with no quota
};

TEST_F(UsableCpusTest, WithoutAQuotaEveryAllowedProcessorRunsAThread) {
  EXPECT_FALSE(all_.cpus.empty());
  EXPECT_EQ(all_.threads, static_cast<int>(all_.cpus.size()));
}

TEST_F(UsableCpusTest, AQuotaRoundsUpAndIsAtLeastOne) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(usable_cpus({}, root_).threads, all_.threads);
  write("sys/fs/cgroup/job/cpu.max", "10000 100000\n");
  EXPECT_EQ(usable_cpus({}, root_).threads, 1);
  write("sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  EXPECT_EQ(usable_cpus({}, root_).threads, std::min(2, all_.threads));
  EXPECT_EQ(usable_cpus({}, root_).cpus, all_.cpus) << "a quota says how many at once, not which";
}

TEST_F(UsableCpusTest, TheLeastQuotaAboveBindsInBothVersions) {
  write("proc/self/cgroup", "3:cpu,cpuacct:/a/b\n");
  write("sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(usable_cpus({}, root_).threads, all_.threads);
  write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "50000\n");
  write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(usable_cpus({}, root_).threads, 1);
}

TEST_F(UsableCpusTest, FollowsTheAffinityMask) {
  cpu_set_t before;
  CPU_ZERO(&before);
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(all_.cpus.back()), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(usable_cpus({}, root_).cpus, std::vector<int>{all_.cpus.back()});
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST_F(UsableCpusTest, ANodeThatIsNotThereNarrowsNothing) {
  EXPECT_EQ(usable_cpus(4000, root_).cpus, all_.cpus);
  EXPECT_EQ(usable_cpus(-1, root_).cpus, all_.cpus);
}

}  // namespace
}  // namespace terrace
