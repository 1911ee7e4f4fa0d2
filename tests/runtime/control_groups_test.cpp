#include "runtime/control_groups.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace terrace {
namespace {

namespace fs = std::filesystem;

class ControlGroupsTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            (std::string("control_groups_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_ / "proc/self");
  }
  void TearDown() override { fs::remove_all(root_); }
  std::vector<std::string> folders(const std::string& lines, std::string_view controller) {
    std::ofstream(root_ / "proc/self/cgroup") << lines;
    std::vector<std::string> found;
    for (const ControlGroup& group : control_groups(root_, controller)) {
      const fs::path below = group.folder.lexically_relative(root_ / "sys/fs/cgroup");
      found.push_back(std::to_string(group.version) + " " + below.string());
    }
    return found;
  }
  fs::path root_;
};

TEST_F(ControlGroupsTest, TheGroupItselfComesFirstAndTheMountLast) {
  EXPECT_EQ(folders("0::/jobs/train\n", "memory"),
            (std::vector<std::string>{"2 jobs/train", "2 jobs", "2 ."}));
}

TEST_F(ControlGroupsTest, VersionOneIsAskedForItsController) {
  const std::string lines = "5:memory:/job\n4:cpu,cpuacct:/a\n";
  EXPECT_EQ(folders(lines, "memory"), (std::vector<std::string>{"1 memory/job", "1 memory"}));
  EXPECT_EQ(folders(lines, "cpu"), (std::vector<std::string>{"1 cpu/a", "1 cpu"}));
  EXPECT_TRUE(folders(lines, "pids").empty());
}

TEST_F(ControlGroupsTest, LinesThatAreNoneAndNoFileGiveNoGroups) {
  EXPECT_TRUE(folders("nonsense\n\n", "memory").empty());
  fs::remove(root_ / "proc/self/cgroup");
  EXPECT_TRUE(control_groups(root_, "memory").empty());
}

}  // namespace
}  // namespace terrace
