// The wall in front of real programs: what is charged, what is refused, and what comes back.
#include "tests/hooks/preloaded_guest.hpp"

namespace terrace {
namespace {

using test::bare_guest;
using test::Ended;
using test::PageCollector;
using test::preloaded_guest;
using test::run_guest;
using test::value_of;
using test::values_of;
using test::with_gibibyte;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kOutOfMemory = 2;

class EveryRuntime : public testing::TestWithParam<const char*> {};

// 1 GiB less the context's 64 MiB holds seven blocks of 128 MiB and one of 64.
TEST_P(EveryRuntime, MeetsTheWallAndItsOwnErrorCode) {
  const Ended ended = run_guest("wall", with_gibibyte(), GetParam());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "blocks"), 7);
  EXPECT_EQ(value_of(ended, "last error"), kOutOfMemory) << "the runtime's own, as without us";
  EXPECT_EQ(value_of(ended, "no error"), 0);
  EXPECT_EQ(value_of(ended, "small"), 0);
  EXPECT_EQ(value_of(ended, "too much"), kOutOfMemory);
  EXPECT_EQ(value_of(ended, "again"), 0) << "a free gives back";
  EXPECT_EQ(value_of(ended, "no more"), kOutOfMemory);
  EXPECT_THAT(ended.err, HasSubstr("terrace: 128.0 MiB of HBM refused: 896.0 MiB of 1.0 GiB are in use"));
  EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << "said once: " << ended.err;
}
INSTANTIATE_TEST_SUITE_P(PreloadWall, EveryRuntime,
                         testing::Values("memory_guest13", "memory_guest12", "memory_guest_static"));

TEST(PreloadWall, ADriverOfCuda12IsEnough) {
  const Ended ended = run_guest("wall", with_gibibyte({"LOOPBACK_DRIVER=12"}), "memory_guest12");
  EXPECT_EQ(value_of(ended, "blocks"), 7) << ended.err;
}

TEST(PreloadWall, ARuntimeWithItsOwnWayIntoTheDriverIsHeldToo) {
  const Ended ended = run_guest("wall", with_gibibyte({"LOOPBACK_HIDDEN=1"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "blocks"), 6) << "the last one shows in the driver's figure before it is charged";
  EXPECT_EQ(value_of(ended, "again"), 0) << "a free gives back";
  EXPECT_EQ(value_of(ended, "no more"), kOutOfMemory);
}

TEST(PreloadWall, EveryKindOfDeviceMemoryIsCharged) {
  const Ended ended = run_guest("every-way", with_gibibyte());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  for (const char* refused : {"cuMemAlloc", "managed", "pitch", "async", "from pool", "create", "array"})
    EXPECT_EQ(value_of(ended, refused), kOutOfMemory) << refused;
  for (const char* passed :
       {"base", "host", "export", "import", "close", "import handle", "release", "small array", "destroy"})
    EXPECT_EQ(value_of(ended, passed), 0) << passed;
  EXPECT_EQ(value_of(ended, "more than there is"), kOutOfMemory) << "the driver's own answer";
  const Ended plain = run_guest("every-way", bare_guest());
  EXPECT_EQ(value_of(plain, "create"), 0) << "without the wall there is room";
}

TEST(PreloadWall, PhysicalMemoryIsChargedUntilHandleAndMappingsAreGone) {
  const Ended ended = run_guest("physical", with_gibibyte());
  EXPECT_EQ(value_of(ended, "still held"), kOutOfMemory) << "mapped, though its handle is released";
  EXPECT_EQ(value_of(ended, "held again"), kOutOfMemory) << "unmapped, but a handle was taken again";
  EXPECT_EQ(value_of(ended, "free now"), 0);
  EXPECT_THAT(values_of(ended, "release"), ElementsAre(0, 0, 0));
}

TEST(PreloadWall, DevicesHaveAccountsOfTheirOwn) {
  PageCollector collector;
  const Ended ended = run_guest("two-devices", with_gibibyte({"TERRACE_SOCKET=" + collector.socket()}));
  const auto pages = collector.collect();
  EXPECT_EQ(value_of(ended, "first"), 0);
  EXPECT_EQ(value_of(ended, "second"), 0);
  EXPECT_EQ(value_of(ended, "second full"), kOutOfMemory);
  EXPECT_EQ(value_of(ended, "thread full"), kOutOfMemory) << "its first device is full";
  EXPECT_EQ(value_of(ended, "thread"), 0);
  EXPECT_EQ(value_of(ended, "after"), 0) << "a reset frees all of a device";
  EXPECT_THAT(collector.devices(), ElementsAre("0000:1b:00.0", "0000:1b:01.0"));
  ASSERT_EQ(pages.size(), 2u);
  EXPECT_EQ(test::value_in<Metric::kRefusedAllocations>(*pages[0]), 2u) << "all counts are in the first page";
}

TEST(PreloadWall, TheLeaseGrowsWithNeedAndComesBack) {
  PageCollector collector;
  const Ended ended = run_guest("wall", with_gibibyte({"TERRACE_SOCKET=" + collector.socket()}));
  EXPECT_EQ(value_of(ended, "blocks"), 7) << ended.err;
  (void)collector.collect();
  EXPECT_LE(collector.leased_peak(), 1_GiB);
  EXPECT_GE(collector.leased_peak(), 896_MiB);
}

TEST(PreloadWall, TheDaemonsWordIsTheLimit) {
  PageCollector collector(500_MiB);
  const Ended ended = run_guest("wall", with_gibibyte({"TERRACE_SOCKET=" + collector.socket()}));
  const auto pages = collector.collect();
  EXPECT_EQ(value_of(ended, "blocks"), 3) << "and 64 MiB of the context";
  EXPECT_THAT(ended.err, HasSubstr("the daemon has no more to lease"));
  EXPECT_LE(collector.leased_peak(), 500_MiB);
  ASSERT_EQ(pages.size(), 1u);
  EXPECT_GE(test::value_in<Metric::kRefusedAllocations>(*pages[0]), 2u);
  EXPECT_GE(test::value_in<Metric::kRefusedBytes>(*pages[0]), (256_MiB).count());
  EXPECT_EQ(test::value_in<Metric::kBudgetBytes>(*pages[0], TierId::kHbm), (1_GiB).count());
}

TEST(PreloadWall, OthersAreWaitedForBeforeAProcessIsRefusedWhatItsBudgetLeaves) {
  PageCollector collector(500_MiB, {.others_give = 256_MiB});
  const Ended ended = run_guest("wall", with_gibibyte({"TERRACE_SOCKET=" + collector.socket()}));
  (void)collector.collect();
  EXPECT_EQ(value_of(ended, "blocks"), 5) << "three of what was free, and two of what came: " << ended.err;
  EXPECT_EQ(value_of(ended, "no more"), kOutOfMemory);
}

TEST(PreloadWall, ThreadsDoNotGetOverIt) {
  const Ended ended = run_guest("threads-at-the-wall", with_gibibyte());
  EXPECT_THAT(ended.out, testing::Not(HasSubstr("over the wall")));
  EXPECT_EQ(value_of(ended, "left"), 64) << "the context";
}

TEST(PreloadWall, WhoAccountsForHimselfIsNotHeld) {
  const Ended ended = run_guest("aside", with_gibibyte());
  EXPECT_EQ(value_of(ended, "found"), 1);
  EXPECT_THAT(values_of(ended, "malloc"), ElementsAre(0, 0));
  EXPECT_EQ(ended.err, "");
}

TEST(PreloadWall, StandsWhereTheOneWhoLeasesSays) {
  const Ended ended = run_guest("led", with_gibibyte());
  EXPECT_EQ(value_of(ended, "found"), 1);
  EXPECT_THAT(values_of(ended, "malloc"), ElementsAre(0, 0, kOutOfMemory, kOutOfMemory, 0)) << ended.err;
  EXPECT_THAT(values_of(ended, "used"), ElementsAre(364, 514)) << "with the context";
}

TEST(PreloadWall, SharesLeaveTheReserveAlone) {
  const auto blocks = [](const char* budget, const char* reserve) {
    return value_of(run_guest("wall", preloaded_guest({budget, reserve})), "blocks");
  };
  EXPECT_EQ(blocks("TERRACE_HBM_BUDGET=50%", "TERRACE_HBM_RESERVE=0"), 63) << "8 GiB less the context";
  EXPECT_EQ(blocks("TERRACE_HBM_BUDGET=50%", "TERRACE_HBM_RESERVE=12GiB"), 31);
  EXPECT_EQ(blocks("TERRACE_HBM_BUDGET=90%", "TERRACE_HBM_RESERVE=2GiB"), 111) << "the defaults";
}

TEST(PreloadWall, SettingsThatAreNotUnderstoodAreSaidAndLeftAtTheirDefault) {
  const Ended ended = run_guest("too-much-at-once", preloaded_guest({"TERRACE_HBM_BUDGET=lots"}));
  EXPECT_THAT(values_of(ended, "refused"), ElementsAre(0, 0));
  EXPECT_THAT(ended.err, HasSubstr("TERRACE_HBM_BUDGET: \"lots\" is not a size"));
}

TEST(PreloadWall, OtherProcessesOnTheDeviceTakeNoMoreThanAContextsRoom) {
  const Ended ended = run_guest("wall", with_gibibyte({"LOOPBACK_OTHERS_MIB=200"}));
  EXPECT_EQ(value_of(ended, "blocks"), 5) << "the driver does not tell 200 MiB from a context's";
}

TEST(PreloadWall, TheDevicesBooksTellAContextFromOtherProcesses) {
  const auto blocks = [](const char* books) {
    const Ended ended =
        run_guest("wall", preloaded_guest({"TERRACE_HBM_BUDGET=2GiB", "LOOPBACK_OTHERS_MIB=2000",
                                           std::string("LOOPBACK_BOOKS=") + books}));
    return value_of(ended, "blocks");
  };
  EXPECT_EQ(blocks("own"), 15) << "and 64 MiB of the context";
  EXPECT_EQ(blocks("moving"), 15) << "what was freed while they were read is no context";
  EXPECT_EQ(blocks("none"), 8) << "the most that a context takes";
  EXPECT_EQ(blocks("strangers"), 8);
  EXPECT_EQ(blocks("untold"), 8);
  EXPECT_EQ(blocks("namesake"), 8) << "another process's number, elsewhere";
}

TEST(PreloadReport, FreeMemoryIsWhatTheBudgetLeaves) {
  const Ended plain = run_guest("memory-info", bare_guest());
  EXPECT_EQ(value_of(plain, "available MiB"), 16384 - 64 - 256);
  const Ended physical = run_guest("memory-info", with_gibibyte());
  EXPECT_EQ(value_of(physical, "available MiB"), 1024 - 64 - 256);
  EXPECT_EQ(value_of(physical, "total MiB"), 16384);
  const Ended extended =
      run_guest("memory-info", with_gibibyte({"TERRACE_HOOK_REPORT=extended", "TERRACE_DDR_BUDGET=10GiB"}));
  EXPECT_EQ(value_of(extended, "available MiB"), 1024 - 64 - 256 + 10240);
  EXPECT_EQ(value_of(extended, "total MiB"), 16384 + 10240);
}

TEST(PreloadFork, AChildHasAnAccountOfItsOwn) {
  const Ended ended = run_guest("fork", with_gibibyte());
  EXPECT_EQ(value_of(ended, "child"), 0);
  EXPECT_EQ(value_of(ended, "parent full"), kOutOfMemory);
}

}  // namespace
}  // namespace terrace
