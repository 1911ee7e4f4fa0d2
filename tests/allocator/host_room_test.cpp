#include "allocator/host_room.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

MemoryLimits limits_of(Bytes machine_left, std::optional<Bytes> group_left, std::optional<Bytes> lockable) {
  return {.machine = 64_GiB,
          .usable = 64_GiB,
          .lockable = lockable,
          .machine_left = machine_left,
          .group_left = group_left};
}

TEST(HostRoom, TheLimitThatLeavesLeastIsNamed) {
  EXPECT_THAT(least_room(limits_of(3_GiB, 12_MiB, {}), LockLimit::kCounts),
              StartsWith("the control group leaves least: 12.0 MiB"));
  EXPECT_THAT(least_room(limits_of(3_GiB, {}, {}), LockLimit::kCounts),
              StartsWith("the machine leaves least: 3.0 GiB"));
  const MemoryLimits locked = limits_of(3_GiB, 1_GiB, 8_MiB);
  EXPECT_THAT(least_room(locked, LockLimit::kCounts), StartsWith("RLIMIT_MEMLOCK leaves least: 8.0 MiB"));
  EXPECT_THAT(least_room(locked, LockLimit::kIgnored), StartsWith("the control group leaves least: 1.0 GiB"));
}

TEST(HostRoom, MoreThanIsLeftIsRefusedBeforeItIsTouched) {
  EXPECT_TRUE(room_for(3_GiB, limits_of(3_GiB, {}, 8_MiB)).ok());
  const Status machine = room_for(3_GiB + 1_B, limits_of(3_GiB, {}, {}));
  ASSERT_FALSE(machine.ok());
  EXPECT_EQ(machine.error().code, Errc::kOutOfMemory);
  EXPECT_EQ(machine.error().bytes, 3_GiB + 1_B);
  const Status group = room_for(1_GiB, limits_of(3_GiB, 512_MiB, {}));
  ASSERT_FALSE(group.ok());
  EXPECT_THAT(group.error().text, HasSubstr("the control group leaves least: 512.0 MiB"));
}

}  // namespace
}  // namespace terrace
