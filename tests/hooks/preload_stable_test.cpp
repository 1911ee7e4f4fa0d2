// Programs that use more device memory than their budget, by pointers that never change: whatever happens,
// their bytes are right.
#include <atomic>
#include <thread>

#include "tests/hooks/preloaded_guest.hpp"

namespace terrace {
namespace {

using test::Ended;
using test::PageCollector;
using test::preloaded_guest;
using test::run_guest;
using test::Settings;
using test::value_in;
using test::value_of;
using test::values_of;
using testing::ContainsRegex;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500;

// 32 MiB beside the context: 16 blocks of the scenes.
Settings small(Settings more = {}) {
  more.emplace_back("TERRACE_HBM_BUDGET=96MiB");
  more.emplace_back("TERRACE_DDR_BUDGET=1GiB");
  return preloaded_guest(std::move(more));
}
// Moves take a while: who uses a block meanwhile loses what he writes, or faults.
Settings small_and_slow(Settings more = {}) {
  more.emplace_back("LOOPBACK_SLOW_MS=3");
  return small(std::move(more));
}

TEST(PreloadStable, TwiceTheBudgetIsRightToTheLastBit) {
  for (const char* guest : {"memory_guest13", "memory_guest12", "memory_guest_static"}) {
    PageCollector collector;
    const Ended ended = run_guest("twice", small({"TERRACE_SOCKET=" + collector.socket()}), guest);
    const auto pages = collector.collect();
    ASSERT_EQ(ended.exit_code, 0) << guest << ended.err;
    EXPECT_EQ(value_of(ended, "allocated"), 1) << guest << ended.err;
    EXPECT_EQ(value_of(ended, "failed"), 0);
    EXPECT_EQ(value_of(ended, "wrong"), 0) << guest;
    EXPECT_EQ(value_of(ended, "over the budget"), 0);
    EXPECT_EQ(value_of(ended, "in ddr"), 1) << "the budget binds";
    EXPECT_EQ(value_of(ended, "room again"), 0);
    ASSERT_EQ(pages.size(), 1u);
    EXPECT_GT(value_in<Metric::kTransferBytes>(*pages[0], Direction::kD2H, CopyReason::kSpill), 32u << 20);
    EXPECT_GT(value_in<Metric::kTransferBytes>(*pages[0], Direction::kH2D, CopyReason::kRestore), 32u << 20);
    EXPECT_EQ(value_in<Metric::kOpaqueLaunches>(*pages[0]), 0u);
    EXPECT_EQ(value_in<Metric::kRefusedAllocations>(*pages[0]), 0u);
  }
}

// A runtime that is linked in launches by handles of its library, which the calls about functions refuse.
TEST(PreloadStable, KernelsAreReadByWhicheverCallKnowsTheirHandles) {
  for (const char* served : {"info", "function"}) {
    const Ended ended =
        run_guest("twice", small({std::string("LOOPBACK_KERNEL_CALLS=") + served}), "memory_guest_static");
    EXPECT_EQ(value_of(ended, "wrong"), 0) << served << ended.err;
    EXPECT_THAT(ended.err, HasSubstr("186 launches read\n")) << served;
  }
}

TEST(PreloadStable, SaysWhyALaunchHoldsEverything) {
  const Ended ended = run_guest("twice", small({"LOOPBACK_KERNEL_CALLS=none"}), "memory_guest_static");
  EXPECT_EQ(value_of(ended, "wrong"), 0) << ended.err;
  const std::string why =
      "cuFuncGetParamInfo said 400, cuKernelGetParamInfo said 400, cuKernelGetFunction said 400";
  EXPECT_THAT(ended.err, HasSubstr("terrace: launches of a kernel hold everything: " + why + "\n"));
  EXPECT_THAT(ended.err,
              HasSubstr(" held everything, their pointers unknown (the first: a kernel, " + why + ")\n"));
  const Ended untold = run_guest("untold", small());
  EXPECT_THAT(untold.err,
              HasSubstr("terrace: launches of \"whatever\" hold everything: cuFuncGetParamInfo said 400, "));
  const Ended grouped = run_guest("grouped", small());
  EXPECT_THAT(grouped.err,
              HasSubstr("terrace: launches of \"gemm_grouped_kernel\" hold everything: by its name it takes "
                        "pointers from device memory\n"));
}

TEST(PreloadStable, WithoutDdrOrWhereItIsOffTheWallIsWhatItWas) {
  for (const char* off : {"TERRACE_DDR_BUDGET=0B", "TERRACE_HOOK_SPILL=off"}) {
    const Ended ended = run_guest("twice", small({off}));
    EXPECT_EQ(value_of(ended, "allocated"), 0) << off;
    EXPECT_EQ(value_of(ended, "wrong"), 0);
  }
}

TEST(PreloadStable, NothingMovesForARuntimeThatLaunchesUnseen) {
  const Ended ended = run_guest("twice", small_and_slow({"LOOPBACK_HIDDEN_LAUNCH=1"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "failed"), 0);
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_THAT(ended.err, HasSubstr("this runtime launches past the driver's functions"));
}

TEST(PreloadStable, BlocksTravelBesideKernelsThatRunAndThatRace) {
  const Ended ended = run_guest("under-kernels", small_and_slow());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "allocated"), 1);
  EXPECT_THAT(values_of(ended, "more"), Each(0));
  EXPECT_EQ(value_of(ended, "wrong"), 0);
}

TEST(PreloadStable, PointersThatLieInDeviceMemoryHoldEverything) {
  for (const char* scene : {"grouped", "untold", "tables-from-host", "tensor-maps"}) {
    const Ended ended = run_guest(scene, small_and_slow());
    ASSERT_EQ(ended.exit_code, 0) << scene << ended.err;
    EXPECT_EQ(value_of(ended, "allocated"), 1) << scene;
    EXPECT_THAT(values_of(ended, "more"), Each(0)) << scene;
    EXPECT_EQ(value_of(ended, "wrong"), 0) << scene;
  }
}

TEST(PreloadStable, WhatALibraryIsGivenIsUsedAndWhatItRegistersStays) {
  PageCollector collector;
  const Ended ended = run_guest("libraries", small_and_slow({"TERRACE_SOCKET=" + collector.socket()}));
  const auto pages = collector.collect();
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "register"), 0);
  EXPECT_THAT(values_of(ended, "multiply"), ElementsAre(0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  ASSERT_EQ(pages.size(), 1u);
  EXPECT_EQ(value_in<Metric::kFixedBytes>(*pages[0], FixedReason::kRegistered), 2u << 20);
  EXPECT_EQ(value_in<Metric::kPassthroughCalls>(*pages[0], CallGroup::kLaunch), 8u) << "each once";
}

TEST(PreloadStable, WhatAGraphHasSeenStaysWhereItIs) {
  PageCollector collector;
  const Ended ended = run_guest("captured", small({"TERRACE_SOCKET=" + collector.socket()}));
  const auto pages = collector.collect();
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "captured free"), 0);
  EXPECT_EQ(value_of(ended, "end"), 0);
  EXPECT_THAT(values_of(ended, "replay"), Each(0));
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  ASSERT_EQ(pages.size(), 1u);
  EXPECT_EQ(value_in<Metric::kFixedBytes>(*pages[0], FixedReason::kCaptured), 6u << 20) << "three blocks";
}

TEST(PreloadStable, FreesOfWhatIsInDdrOfStrangersAndTwice) {
  const Ended ended = run_guest("frees", small());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "in ddr"), 1);
  EXPECT_EQ(value_of(ended, "device memory"), 32) << "wherever it lies";
  EXPECT_EQ(value_of(ended, "failed"), 0);
  EXPECT_EQ(value_of(ended, "twice"), kInvalidValue);
  EXPECT_EQ(value_of(ended, "inside"), kInvalidValue);
  EXPECT_EQ(value_of(ended, "stranger"), kInvalidValue);
  EXPECT_EQ(value_of(ended, "nothing"), 0);
  EXPECT_EQ(value_of(ended, "again"), 1);
  EXPECT_EQ(value_of(ended, "wrong"), 0);
}

TEST(PreloadStable, QuestionsAreAnsweredWhereverABlockLies) {
  const Ended ended = run_guest("questions", small());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "allocated"), 1);
  EXPECT_EQ(value_of(ended, "in ddr"), 1);
  EXPECT_EQ(value_of(ended, "range"), 48) << "also of what cannot be reached just now";
  EXPECT_EQ(value_of(ended, "attributes"), 48) << "of the block, not of all addresses there are";
  EXPECT_EQ(value_of(ended, "access"), 48);
  EXPECT_EQ(value_of(ended, "stranger"), kNotFound);
  EXPECT_EQ(value_of(ended, "were in hbm"), 0);
  EXPECT_EQ(value_of(ended, "retain"), 0);
  EXPECT_EQ(value_of(ended, "bind"), 0);
  EXPECT_EQ(value_of(ended, "tokens"), 0);
  EXPECT_EQ(value_of(ended, "are in hbm"), 3) << "for good";
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_EQ(value_of(ended, "release"), 0);
}

TEST(PreloadStable, AnotherDevicesUsesFixWhatTheyReach) {
  const Ended ended = run_guest("peers", small());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "enabled"), 0);
  EXPECT_EQ(value_of(ended, "open"), 32) << "also what has been remapped";
  EXPECT_EQ(value_of(ended, "wrong"), 0);
}

TEST(PreloadStable, WhatAnotherProcessSeesStaysWhereItIs) {
  PageCollector collector;
  const Ended ended = run_guest("exports", small({"TERRACE_SOCKET=" + collector.socket()}));
  const auto pages = collector.collect();
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "export"), 0);
  EXPECT_EQ(value_of(ended, "in hbm"), 1);
  EXPECT_EQ(value_of(ended, "open"), 0);
  EXPECT_EQ(value_of(ended, "seen"), 1) << "the same memory";
  EXPECT_EQ(value_of(ended, "close"), 0);
  EXPECT_EQ(value_of(ended, "again"), 0) << "the driver's answer";
  EXPECT_EQ(value_of(ended, "wrong"), 0) << "written by the other";
  EXPECT_EQ(value_of(ended, "free"), 0);
  const Ended stale =
      run_guest("imports", small({"GUEST_HANDLE=54455252414345313930" + std::string(108, '0')}));
  EXPECT_EQ(value_of(stale, "open"), kInvalidValue) << "a handle of a process that is gone";
}

TEST(PreloadStable, AThreadsOwnDefaultStreamIsWaitedFor) {
  const Ended ended = run_guest("threads-own", small_and_slow());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "wrong"), 0);
}

TEST(PreloadStable, OrderedAllocationsThatDoNotFitAreBlocks) {
  const Ended ended = run_guest("ordered", small({"TERRACE_HBM_BUDGET=128MiB"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_THAT(values_of(ended, "malloc"), ElementsAre(0, 0));
  EXPECT_EQ(value_of(ended, "small"), 0);
  EXPECT_EQ(value_of(ended, "bytes"), 79);
  EXPECT_THAT(values_of(ended, "free"), Each(0));
  EXPECT_EQ(value_of(ended, "free twice"), kInvalidValue);
}

TEST(PreloadStable, ForksAndEndsInAnyOrder) {
  const Ended ended = run_guest("ends", small());
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "child"), 0);
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_THAT(ended.err, HasSubstr("late 0"));
}

TEST(PreloadStable, HbmAndDdrFullIsOutOfMemoryAndALineThatHelps) {
  const Ended ended = run_guest("twice", small({"TERRACE_DDR_BUDGET=16MiB"}));
  EXPECT_EQ(value_of(ended, "allocated"), 0);
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_THAT(ended.err, HasSubstr("a larger ddr.budget makes room"));
}

TEST(PreloadStable, GivesTheDaemonBackWhatItAsksFor) {
  PageCollector collector(96_MiB, {.leased = 90_MiB, .target = 80_MiB});
  const Ended ended = run_guest("shrinks", small({"TERRACE_SOCKET=" + collector.socket()}));
  collector.collect();
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "allocated"), 1);
  EXPECT_EQ(value_of(ended, "came down"), 1);
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_GE(collector.answered(), 10_MiB) << ended.err;
}

// Blocks leave for memory that gets their room, and for no other; what it leaves is theirs again.
TEST(PreloadStable, NativeMemoryTakesTheRoomOfBlocksOnlyWhileItHasIt) {
  const Ended ended = run_guest("native-memory", small());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "allocated"), 1);
  EXPECT_THAT(values_of(ended, "too large"), ElementsAre(kOutOfMemory, kOutOfMemory, kOutOfMemory));
  EXPECT_EQ(value_of(ended, "refused"), kOutOfMemory);
  EXPECT_THAT(values_of(ended, "create"), ElementsAre(0, 0));
  EXPECT_EQ(value_of(ended, "gave way"), 1);
  EXPECT_THAT(values_of(ended, "release"), ElementsAre(0, 0));
  EXPECT_THAT(values_of(ended, "in hbm"), ElementsAre(14, 14, 14, 14, 14))
      << "after a request that cannot fit, a step, a refusal of the driver's, and two that came and went";
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_THAT(ended.err, HasSubstr("; 0 uses over the link\n"));
}

TEST(PreloadStable, SaysAtTheEndWhatTravelledAndWhatALargerBudgetWouldDo) {
  const Ended ended = run_guest("twice", small());
  EXPECT_THAT(ended.err, HasSubstr("device 0: HBM peak 96.0 MiB of 96.0 MiB, DDR peak "));
  EXPECT_THAT(ended.err, HasSubstr("a step of 32 uses was learned; 186 launches read"));
  EXPECT_THAT(ended.err, HasSubstr("with hbm.budget = \"128MiB\" nothing would have left"));
  EXPECT_THAT(ended.err, ContainsRegex("; spilled [0-9.]+ MiB at [0-9.]+ GB/s, restored "));
  EXPECT_THAT(ended.err, HasSubstr("device 0: blocks were on their way for "));
  EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 5) << ended.err;
  const Ended fits = run_guest("under-kernels", small({"TERRACE_HBM_BUDGET=1GiB"}));
  EXPECT_EQ(fits.err, "") << "where nothing has left there is nothing to say";
  EXPECT_EQ(value_of(fits, "wrong"), 0);
}

// Whichever driver call fails, with whatever: no wrong byte.
TEST(PreloadStableFaults, EachDriverCallMayFail) {
  const auto run = [](long long nth, int code, const char* how_many) {
    return run_guest(
        "stable-faults",
        small({"TERRACE_HBM_BUDGET=72MiB", "LOOPBACK_FAIL_AT=" + std::to_string(nth),
               "LOOPBACK_FAIL_WITH=" + std::to_string(code), std::string("LOOPBACK_FAILS=") + how_many}));
  };
  const long long calls = value_of(run(0, 0, "0"), "calls");
  ASSERT_GT(calls, 200);
  std::atomic<long long> next{1};
  std::atomic<int> over{0};
  const auto try_each = [&] {
    // Calls of several threads: which is the nth changes from run to run anyway.
    for (long long nth = next.fetch_add(3); nth <= calls; nth = next.fetch_add(3)) {
      const int code = nth / 3 % 2 == 0 ? kOutOfMemory : 999;
      const Ended ended = run(nth, code, "1");
      EXPECT_EQ(ended.exit_code, 0) << "call " << nth << " with " << code << ": " << ended.err;
      EXPECT_EQ(value_of(ended, "wrong"), 0) << "call " << nth << " with " << code << ": " << ended.err;
      over += value_of(ended, "over the budget") != 0 ? 1 : 0;
      EXPECT_LE(std::count(ended.err.begin(), ended.err.end(), '\n'), 9) << nth << ended.err;
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(try_each);
  threads.clear();
  EXPECT_LE(over, 4) << "where the driver does not say how large the device is, or what others hold";
}

// A kernel has faulted: from some call on the driver answers everything with that, what is asked of a copy
// under way included. The guest gets its error, and waits for nothing that cannot come.
TEST(PreloadStableFaults, ALostDeviceHoldsNobodyUp) {
  const auto run = [](long long nth) {
    return run_guest("stable-faults",
                     small_and_slow({"TERRACE_HBM_BUDGET=72MiB", "LOOPBACK_LOST_AT=" + std::to_string(nth)}));
  };
  const long long calls = value_of(run(0), "calls");
  ASSERT_GT(calls, 200);
  std::atomic<long long> next{1};
  const auto try_each = [&] {
    for (long long nth = next.fetch_add(1); nth <= calls; nth = next.fetch_add(1)) {
      const Ended ended = run(nth);
      EXPECT_EQ(ended.exit_code, 0) << "lost at call " << nth << ": " << ended.err;
      EXPECT_NE(value_of(ended, "after all"), 0) << nth;
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(try_each);
}

}  // namespace
}  // namespace terrace
