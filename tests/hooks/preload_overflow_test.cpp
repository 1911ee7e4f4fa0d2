// What HBM has no room for, in a process with PyTorch: refused once, then served from DDR, with the right
// bytes whatever happens.
#include "tests/hooks/preloaded_guest.hpp"

namespace terrace {
namespace {

using test::Ended;
using test::PageCollector;
using test::preloaded_guest;
using test::run_guest;
using test::Settings;
using test::value_of;
using test::values_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr int kInvalidValue = 1, kOutOfMemory = 2;

// 32 MiB beside the context.
Settings with_torch(Settings more = {}) {
  more.emplace_back("TERRACE_HBM_BUDGET=96MiB");
  more.emplace_back("TERRACE_DDR_BUDGET=1GiB");
  return preloaded_guest(std::move(more));
}

TEST(PreloadOverflow, TheSecondRefusalIsServedFromDdr) {
  for (const char* guest : {"memory_guest13", "memory_guest_static"}) {
    const Ended ended = run_guest("overflow", with_torch(), guest);
    ASSERT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_EQ(value_of(ended, "torch"), 1);
    EXPECT_EQ(value_of(ended, "first"), kOutOfMemory);
    EXPECT_EQ(value_of(ended, "last error"), kOutOfMemory);
    EXPECT_EQ(value_of(ended, "second"), 0) << ended.err;
    EXPECT_EQ(value_of(ended, "no error"), 0);
    EXPECT_EQ(value_of(ended, "in hbm"), 0);
    EXPECT_EQ(value_of(ended, "access"), 1);
    EXPECT_EQ(value_of(ended, "attribute"), 0);
    EXPECT_EQ(value_of(ended, "type"), 2) << "device memory, as asked for";
    EXPECT_EQ(value_of(ended, "wrong"), 0);
    EXPECT_THAT(values_of(ended, "alive"), ElementsAre(20, 0));
    EXPECT_EQ(value_of(ended, "available MiB"), 4) << "of HBM, as before";
    EXPECT_EQ(value_of(ended, "total MiB"), 16384);
    EXPECT_EQ(value_of(ended, "inside"), kInvalidValue);
    EXPECT_EQ(value_of(ended, "free"), 0);
    EXPECT_EQ(value_of(ended, "waited"), 1) << "for the kernel that uses it";
    EXPECT_EQ(value_of(ended, "twice"), kInvalidValue);
    EXPECT_EQ(value_of(ended, "again"), 0);
    EXPECT_EQ(value_of(ended, "free again"), 0);
    EXPECT_EQ(value_of(ended, "range"), 0);
    EXPECT_EQ(value_of(ended, "of it"), 1);
    EXPECT_EQ(value_of(ended, "room"), 0) << "the wall has forgotten nothing";
    EXPECT_EQ(value_of(ended, "returned"), 1);
    EXPECT_THAT(values_of(ended, "host MiB"), ElementsAre(20, 0)) << "the same handles, then none";
    EXPECT_THAT(ended.err,
                HasSubstr("terrace: device 0: 70.0 MiB of what PyTorch asked for lay in DDR at most "
                          "(read over the link), in 3 allocations\n"));
  }
}

TEST(PreloadOverflow, OnlyTheSameAgainOnTheSameThreadIsASecondRefusal) {
  const Ended ended = run_guest("overflow-which", with_torch());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_THAT(values_of(ended, "ask"), ElementsAre(2, 2, 2, 0, 2, 0, 2, 0));
  EXPECT_EQ(value_of(ended, "thread"), kOutOfMemory);
  EXPECT_EQ(value_of(ended, "refusals"), 6) << "what was served is no refusal";
}

TEST(PreloadOverflow, HandlesOfTheHostStandForHandlesOfTheDevice) {
  const Ended ended = run_guest("overflow-physical", with_torch());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "first"), kOutOfMemory);
  EXPECT_EQ(value_of(ended, "fit"), 16);
  EXPECT_EQ(value_of(ended, "second"), 0);
  EXPECT_EQ(value_of(ended, "access"), 0);
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_EQ(value_of(ended, "describe"), 0);
  EXPECT_EQ(value_of(ended, "location"), 1) << "the device, as asked for";
  EXPECT_EQ(value_of(ended, "type"), 2);
  EXPECT_EQ(value_of(ended, "next"), kOutOfMemory) << "mapped: the next is a first refusal";
  EXPECT_THAT(values_of(ended, "alive"), ElementsAre(8, 8, 0, 0)) << "until handle and mapping are gone";
  EXPECT_EQ(value_of(ended, "again"), 0);
  EXPECT_EQ(value_of(ended, "export"), 0);
  EXPECT_THAT(values_of(ended, "host MiB"), ElementsAre(8, 8, 6, 0))
      << "kept for others, but for what another process may still hold";
  EXPECT_EQ(value_of(ended, "room"), 0);
}

TEST(PreloadOverflow, IsOffWhereNothingMayLeaveAndRefusedWhereDdrIsFull) {
  for (const char* off : {"TERRACE_DDR_BUDGET=0B", "TERRACE_HOOK_SPILL=off"}) {
    const Ended ended = run_guest("overflow-ddr-full", with_torch({off}));
    ASSERT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_EQ(value_of(ended, "fits"), kOutOfMemory) << off;
    EXPECT_THAT(ended.err, Not(HasSubstr("lay in DDR")));
  }
  const Ended ended = run_guest("overflow-ddr-full", with_torch({"TERRACE_DDR_BUDGET=16MiB"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "too large"), kOutOfMemory);
  EXPECT_EQ(value_of(ended, "fits"), 0);
  EXPECT_EQ(value_of(ended, "no more"), kOutOfMemory);
  EXPECT_EQ(value_of(ended, "fits again"), 0) << "what was kept of another size makes room";
  EXPECT_THAT(ended.err, HasSubstr("a larger ddr.budget makes room"));
}

TEST(PreloadOverflow, WhoAsksInOrderOfAStreamIsServedAtOnce) {
  const Ended ended = run_guest("overflow-in-order", with_torch());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "malloc"), 0);
  EXPECT_EQ(value_of(ended, "in hbm"), 0);
  EXPECT_EQ(value_of(ended, "free"), 0);
  EXPECT_EQ(value_of(ended, "waited"), 1);
  EXPECT_EQ(value_of(ended, "alive"), 0);
}

TEST(PreloadOverflow, ALibraryThatFailsForGoodIsServedAtOnce) {
  const Ended ended = run_guest("overflow-library", with_torch());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "workspace"), 0);
  EXPECT_EQ(value_of(ended, "in hbm"), 0);
  EXPECT_EQ(value_of(ended, "free"), 0);
}

TEST(PreloadOverflow, ACaptureGetsNoneAndFreesWaitForItsEnd) {
  const Ended ended = run_guest("overflow-captured", with_torch());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "malloc"), 0);
  EXPECT_THAT(values_of(ended, "more"), ElementsAre(kOutOfMemory, 0));
  EXPECT_EQ(value_of(ended, "free"), 0);
  EXPECT_EQ(value_of(ended, "end"), 0);
  EXPECT_THAT(values_of(ended, "alive"), ElementsAre(20, 0, 8));
}

TEST(PreloadOverflow, PeersReachItAChildHasNoneAndAResetEndsIt) {
  const Ended shared = run_guest("overflow-peers", with_torch());
  EXPECT_EQ(value_of(shared, "enable"), 0);
  EXPECT_THAT(values_of(shared, "access"), ElementsAre(3, 3)) << "what there was, and what comes";
  const Ended forked = run_guest("overflow-forked", with_torch({"TERRACE_DDR_BUDGET=32MiB"}));
  EXPECT_EQ(value_of(forked, "child"), 0);
  EXPECT_EQ(value_of(forked, "alive"), 20);
  EXPECT_EQ(value_of(forked, "free"), 0);
  const Ended reset = run_guest("overflow-reset", with_torch());
  EXPECT_EQ(reset.exit_code, 0);
  EXPECT_EQ(value_of(reset, "alive"), 0);
  EXPECT_EQ(value_of(reset, "room"), 0);
  EXPECT_EQ(value_of(reset, "full"), kOutOfMemory);
}

TEST(PreloadOverflow, WhoLeasesForTheProcessLendsTheDdr) {
  const Ended ended = run_guest("overflow-lender", with_torch({"TERRACE_DDR_BUDGET=96MiB"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "before"), 0);
  EXPECT_EQ(value_of(ended, "beside it"), kOutOfMemory) << "he has lent for what there was";
  EXPECT_EQ(value_of(ended, "fits"), 0);
  EXPECT_EQ(value_of(ended, "too much"), kOutOfMemory);
  EXPECT_EQ(value_of(ended, "returned"), 24);
  EXPECT_THAT(values_of(ended, "lent"), ElementsAre(16, 0));
  EXPECT_EQ(value_of(ended, "of the policy"), 0);
  EXPECT_EQ(value_of(ended, "too much of it"), kOutOfMemory) << "with what he had lent";
}

TEST(PreloadOverflow, OthersWhoHoldTheDdrAreWaitedFor) {
  for (const Bytes given : {0_B, 512_MiB}) {
    PageCollector collector(PageCollector::kNever, {.others_give = given, .ddr = 4_MiB});
    const Ended ended = run_guest("overflow", with_torch({"TERRACE_SOCKET=" + collector.socket()}));
    EXPECT_EQ(value_of(ended, "second") == 0, given > 0_B) << ended.err;
  }
}

TEST(PreloadOverflow, TheDdrIsForAllDevicesTogether) {
  const Ended ended = run_guest("overflow-devices", with_torch({"TERRACE_DDR_BUDGET=32MiB"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "first"), 0);
  EXPECT_EQ(value_of(ended, "too much"), kOutOfMemory);
  EXPECT_EQ(value_of(ended, "what is left"), 0) << ended.err;
  EXPECT_EQ(value_of(ended, "what is unused there"), 0);
  EXPECT_EQ(value_of(ended, "host MiB"), 24);
}

TEST(PreloadOverflow, WhatIsGivenBackMeanwhileIsNobodysRefusal) {
  const Ended ended = run_guest("overflow-threads", with_torch());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "refused"), 0);
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_EQ(value_of(ended, "alive"), 0);
}

TEST(PreloadOverflow, ThreadsAtOnceFillAndEmptyIt) {
  const Ended ended = run_guest("overflow-threads", with_torch({"TERRACE_DDR_BUDGET=48MiB"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "odd"), 0);
  EXPECT_EQ(value_of(ended, "wrong"), 0);
  EXPECT_EQ(value_of(ended, "served"), 1) << ended.out;
  EXPECT_EQ(value_of(ended, "alive"), 0);
  EXPECT_EQ(value_of(ended, "host MiB"), 0);
}

// Whichever driver call fails, with whatever: no wrong byte, no error of ours, nothing kept for good.
TEST(PreloadOverflowFaults, EachDriverCallMayFail) {
  const auto run = [](long long nth, int code) {
    return run_guest("overflow-faults", with_torch({"LOOPBACK_FAIL_AT=" + std::to_string(nth),
                                                    "LOOPBACK_FAIL_WITH=" + std::to_string(code),
                                                    nth == 0 ? "LOOPBACK_FAILS=0" : "LOOPBACK_FAILS=1"}));
  };
  const Ended plain = run(0, 0);
  const long long calls = value_of(plain, "calls");
  ASSERT_GT(calls, 60) << plain.err;
  EXPECT_EQ(value_of(plain, "host MiB"), 0);
  EXPECT_EQ(value_of(plain, "used MiB"), 64) << "the context's";
  int kept = 0;
  for (long long nth = 1; nth <= calls; ++nth) {
    const int code = nth % 2 == 0 ? kOutOfMemory : 999;
    const Ended ended = run(nth, code);
    EXPECT_EQ(ended.exit_code, 0) << "call " << nth << " with " << code << ": " << ended.err;
    EXPECT_EQ(value_of(ended, "wrong"), 0) << "call " << nth << " with " << code;
    EXPECT_EQ(value_of(ended, "odd"), 0) << "call " << nth << " with " << code << ended.out;
    kept += value_of(ended, "host MiB") != 0 ? 1 : 0;
  }
  EXPECT_LE(kept, 5) << "where the driver does not take memory back";
}

}  // namespace
}  // namespace terrace
