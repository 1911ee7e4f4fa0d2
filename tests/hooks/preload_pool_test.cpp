// The pool behind stream-ordered allocations of real programs, and how processes with it end.
#include <csignal>

#include "tests/hooks/preloaded_guest.hpp"

namespace terrace {
namespace {

using test::bare_guest;
using test::Ended;
using test::PageCollector;
using test::preloaded_guest;
using test::run_guest;
using test::Settings;
using test::value_of;
using test::values_of;
using test::with_gibibyte;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kInvalidValue = 1, kOutOfMemory = 2;

Settings pooled(Settings more = {}) {
  more.emplace_back("TERRACE_ALLOCATOR=terrace");
  return with_gibibyte(std::move(more));
}

TEST(PreloadPool, StandsWhereTheDriversPoolWould) {
  for (const char* guest : {"memory_guest13", "memory_guest12", "memory_guest_static"}) {
    const Ended ended = run_guest("attributes", pooled(), guest);
    ASSERT_EQ(ended.exit_code, 0) << guest << ended.err;
    EXPECT_EQ(ended.err, "");
    EXPECT_THAT(values_of(ended, "malloc"), ElementsAre(0, 0));
    EXPECT_EQ(value_of(ended, "ours"), 1) << guest;
    EXPECT_EQ(value_of(ended, "range"), 0);
    EXPECT_EQ(value_of(ended, "of the allocation"), 1) << "and not of what is mapped around it";
    EXPECT_THAT(values_of(ended, "used MiB"), ElementsAre(40, 10));
    EXPECT_THAT(values_of(ended, "high MiB"), ElementsAre(40, 10)) << "the peak, and after its reset";
    EXPECT_EQ(value_of(ended, "reserved over used"), 1);
    EXPECT_EQ(value_of(ended, "device has it"), 1);
    EXPECT_EQ(value_of(ended, "threshold"), 77) << "the driver's own, which we do not touch";
    EXPECT_EQ(value_of(ended, "given back"), 1);
    EXPECT_EQ(value_of(ended, "twice"), kInvalidValue);
    EXPECT_EQ(value_of(ended, "inside"), kInvalidValue);
    EXPECT_EQ(value_of(ended, "reserved"), 0);
    EXPECT_EQ(value_of(ended, "used at the end MiB"), 64) << "the context";
  }
}

TEST(PreloadPool, NativeModeLeavesTheDriversPoolInPlace) {
  const Ended ended = run_guest("attributes", with_gibibyte());
  EXPECT_EQ(value_of(ended, "ours"), 0);
}

TEST(PreloadPool, ABlockGoesToAnotherStreamBehindTheFirst) {
  const Ended ended = run_guest("streams", pooled());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
  EXPECT_EQ(value_of(ended, "same"), 1);
  EXPECT_EQ(value_of(ended, "waits"), 1);
  EXPECT_EQ(value_of(ended, "same stream"), 0);
  EXPECT_THAT(values_of(ended, "malloc"), ElementsAre(0, 0, 0, 0)) << "a stream's end leaves the pool whole";
  EXPECT_EQ(value_of(ended, "not ours"), 0) << "a thread's own default stream is the driver's";
  EXPECT_THAT(values_of(ended, "free"), Each(0));
  EXPECT_EQ(value_of(ended, "freed by another kind"), 0);
  EXPECT_EQ(value_of(ended, "used"), 0);
}

TEST(PreloadPool, CapturesAreLeftAlone) {
  const Ended ended = run_guest("capture", pooled());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_THAT(values_of(ended, "ours"), ElementsAre(0, 0, 1))
      << "in the capture, beside it, after all of them";
  EXPECT_EQ(value_of(ended, "elsewhere"), 0);
  EXPECT_EQ(value_of(ended, "kept"), 8) << "a free waits for the end of the capture";
  EXPECT_EQ(value_of(ended, "freed after"), 1);
  EXPECT_EQ(value_of(ended, "captured free"), 0);
  EXPECT_EQ(value_of(ended, "whole"), 1) << "nothing of ours breaks it";
}

TEST(PreloadPool, SharingAndPoolsOfTheProgramsOwn) {
  const Ended ended = run_guest("sharing", pooled());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "export"), kInvalidValue) << "as of the driver's default pool";
  EXPECT_EQ(value_of(ended, "export plain"), 0);
  EXPECT_EQ(value_of(ended, "access before"), 1);
  EXPECT_EQ(value_of(ended, "access after"), 3) << "what is mapped";
  EXPECT_EQ(value_of(ended, "access of new"), 3) << "and what comes later";
  EXPECT_THAT(values_of(ended, "ours"), ElementsAre(0, 1, 0, 1));
}

TEST(PreloadPool, WallAndPoolShareOneBudget) {
  const Ended ended = run_guest("pool-wall", pooled());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(value_of(ended, "blocks"), 9) << ended.err;
  EXPECT_EQ(value_of(ended, "last error"), kOutOfMemory);
  EXPECT_THAT(values_of(ended, "plain"), ElementsAre(kOutOfMemory, 0)) << "what the pool has free makes room";
  EXPECT_THAT(values_of(ended, "under the wall"), Each(1));
  EXPECT_EQ(value_of(ended, "room"), 1);
}

TEST(PreloadPool, ThreadsLoseNothing) {
  const Ended ended = run_guest("pool-threads", pooled());
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_THAT(ended.out, testing::Not(HasSubstr("refused")));
  EXPECT_EQ(value_of(ended, "used"), 0);
}

TEST(PreloadPool, ServesPyTorchsPluggableAllocatorInEveryMode) {
  for (const bool terrace : {false, true}) {
    const Ended ended = run_guest("torch", terrace ? pooled() : with_gibibyte());
    ASSERT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_THAT(values_of(ended, "ours"), ElementsAre(1, terrace ? 1 : 0));
    EXPECT_THAT(values_of(ended, "used MiB"), ElementsAre(20, 0));
    EXPECT_EQ(value_of(ended, "null"), 1);
  }
}

TEST(PreloadPool, LaunchesAreReadForBlocks) {
  PageCollector collector;
  const Ended ended = run_guest("launches", pooled({"TERRACE_SOCKET=" + collector.socket()}));
  const auto pages = collector.collect();
  EXPECT_EQ(ended.out, run_guest("launches", bare_guest()).out);
  ASSERT_EQ(pages.size(), 1u);
  EXPECT_EQ(test::value_in<Metric::kLaunches>(*pages[0]), 5u);
  EXPECT_EQ(test::value_in<Metric::kLaunchBlocks>(*pages[0]), 8u)
      << "an interior pointer, and one in a structure";
  EXPECT_EQ(test::value_in<Metric::kOpaqueLaunches>(*pages[0]), 1u);
  EXPECT_EQ(test::value_in<Metric::kPassthroughCalls>(*pages[0], CallGroup::kLaunch), 6u) << "each once";
}

TEST(PreloadPool, AForkedChildPassesEverythingThrough) {
  const Ended ended = run_guest("fork", pooled());
  EXPECT_EQ(value_of(ended, "child"), 0);
}

// With a budget that makes the pool move its chunks.
Ended run_with_fault(long long nth, int code, const char* how_many) {
  return run_guest("faults", preloaded_guest({"TERRACE_ALLOCATOR=terrace", "TERRACE_HBM_BUDGET=128MiB",
                                              "LOOPBACK_FAIL_AT=" + std::to_string(nth),
                                              "LOOPBACK_FAIL_WITH=" + std::to_string(code),
                                              std::string("LOOPBACK_FAILS=") + how_many}));
}

// Whichever driver call fails, with whatever, the program goes on and its memory comes back.
TEST(PreloadFaults, EachDriverCallMayFail) {
  long long calls = value_of(run_with_fault(0, 0, "0"), "calls");
  ASSERT_GT(calls, 50);
  for (const int code : {kOutOfMemory, 999}) {
    for (long long nth = 1; nth <= calls; ++nth) {
      const Ended ended = run_with_fault(nth, code, "1");
      ASSERT_EQ(ended.exit_code, 0) << "call " << nth << " with " << code << ": " << ended.err;
      ASSERT_LE(std::count(ended.err.begin(), ended.err.end(), '\n'), 2) << nth << ended.err;
      // The guest's own free, or the one call that gives a chunk back, may be the one that failed.
      ASSERT_LE(value_of(ended, "used MiB"), 64 + 44) << "call " << nth << " with " << code << ended.err;
    }
  }
}

TEST(PreloadFaults, ADriverThatFailsFromSomePointOnLeavesTheProgramAlive) {
  for (const int nth : {5, 12, 20, 30, 45, 60, 80, 100}) {
    const Ended ended = run_with_fault(nth, 999, "100000");
    EXPECT_EQ(ended.exit_code, 0) << nth << ended.err;
  }
}

// With memory of the pool still held, in every way a process ends, and with its destructors in either order.
TEST(PreloadEnds, AsTheProgramSays) {
  const struct {
    const char* scene;
    int code;
  } kEnds[] = {{"exit", 7},         {"_exit", 7},  {"term", -SIGTERM},
               {"abort", -SIGABRT}, {"thread", 7}, {"exec", 0}};
  for (const auto& [scene, code] : kEnds) {
    for (const Settings& settings : {bare_guest(), pooled(), with_gibibyte()}) {
      const Ended ended = run_guest(scene, settings);
      EXPECT_EQ(ended.exit_code, code) << scene << ended.err;
      EXPECT_EQ(value_of(ended, "begun"), 1);
      const bool destructors = code == 7 && std::string(scene) != "_exit";
      EXPECT_EQ(ended.err.find("late 0") != std::string::npos, destructors) << scene << ended.err;
    }
  }
}

}  // namespace
}  // namespace terrace
