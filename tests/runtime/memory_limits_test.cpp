#include "runtime/memory_limits.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace terrace {
namespace {

namespace fs = std::filesystem;

// A root folder with the files of a machine.
class MemoryLimitsTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            (std::string("memory_limits_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1024 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }
  [[nodiscard]] Bytes usable() const {
    const auto limits = memory_limits(root_);
    EXPECT_TRUE(limits.ok());
    EXPECT_EQ(limits->machine, 16_GiB);
    return limits->usable;
  }

  fs::path root_;
};

TEST_F(MemoryLimitsTest, WithoutGroupsTheMachineIsTheLimit) { EXPECT_EQ(usable(), 16_GiB); }

TEST_F(MemoryLimitsTest, TheLeastGroupAboveBinds) {
  write("proc/self/cgroup", "0::/jobs/train/step\n");
  write("sys/fs/cgroup/jobs/train/step/memory.max", "max\n");
  EXPECT_EQ(usable(), 16_GiB);
  write("sys/fs/cgroup/jobs/train/step/memory.max", "8589934592\n");
  EXPECT_EQ(usable(), 8_GiB);
  write("sys/fs/cgroup/jobs/memory.max", "4294967296\n");
  EXPECT_EQ(usable(), 4_GiB);
}

TEST_F(MemoryLimitsTest, InAContainerTheMountIsTheGroup) {
  write("sys/fs/cgroup/memory.max", "2147483648\n");
  write("proc/self/cgroup", "0::/\n");
  EXPECT_EQ(usable(), 2_GiB);
  write("proc/self/cgroup", "0::/system.slice/a-path-of-the-host\n");
  EXPECT_EQ(usable(), 2_GiB);
}

TEST_F(MemoryLimitsTest, VersionOneIsReadToo) {
  write("proc/self/cgroup", "12:cpu,cpuacct:/job\n5:memory:/job\n0::/\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(usable(), 16_GiB) << "a limit beyond the machine is none";
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
  EXPECT_EQ(usable(), 1_GiB);
}

TEST_F(MemoryLimitsTest, WhatIsLeftCountsUseWithoutTheFileCache) {
  EXPECT_EQ(memory_limits(root_)->machine_left, 16_GiB) << "a system that does not say";
  write("proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    3145728 kB\n");
  write("proc/self/cgroup", "0::/jobs/train\n");
  write("sys/fs/cgroup/jobs/train/memory.max", "max\n");
  write("sys/fs/cgroup/jobs/train/memory.current", "5368709120\n");
  EXPECT_EQ(memory_limits(root_)->machine_left, 3_GiB);
  EXPECT_FALSE(memory_limits(root_)->group_left.has_value()) << "no group has a limit";
  write("sys/fs/cgroup/jobs/memory.max", "4294967296\n");
  write("sys/fs/cgroup/jobs/memory.current", "3221225472\n");
  EXPECT_EQ(memory_limits(root_)->group_left, 1_GiB);
  write("sys/fs/cgroup/jobs/memory.stat", "anon 7\ninactive_file 1073741824\nactive_file 5\n");
  EXPECT_EQ(memory_limits(root_)->group_left, 2_GiB);
  write("sys/fs/cgroup/jobs/memory.current", "9663676416\n");
  EXPECT_EQ(memory_limits(root_)->group_left, 0_B) << "more than allowed leaves nothing, not a huge number";
}

TEST_F(MemoryLimitsTest, AFolderThatIsNoMachineIsAnError) {
  const auto limits = memory_limits(root_ / "nowhere");
  ASSERT_FALSE(limits.ok());
  EXPECT_EQ(limits.error().code, Errc::kIo);
}

TEST_F(MemoryLimitsTest, LockedMemoryFollowsTheProcessLimit) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit low = before;
  low.rlim_cur = 65536;
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &low), 0);
  EXPECT_EQ(memory_limits(root_)->lockable, 64_KiB);
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
  EXPECT_EQ(memory_limits(root_)->lockable.has_value(), before.rlim_cur != RLIM_INFINITY);
}

TEST(MemoryLimits, ThisMachineHasSome) {
  const auto limits = memory_limits();
  ASSERT_TRUE(limits.ok()) << limits.error().text;
  EXPECT_GT(limits->usable, 0_B);
  EXPECT_LE(limits->usable, limits->machine);
}

}  // namespace
}  // namespace terrace
