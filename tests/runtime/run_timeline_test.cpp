#include "runtime/timeline/run_timeline.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "runtime/profiler_ranges.hpp"
#include "runtime/timeline/device_clock.hpp"
#include "runtime/timeline/trace_event_file.hpp"

namespace terrace {
namespace {

using nlohmann::json;

std::string path_of_test() {
  return testing::TempDir() + "timeline-" + testing::UnitTest::GetInstance()->current_test_info()->name() +
         ".json";
}

json whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return json::parse(std::string(std::istreambuf_iterator<char>(file), {}));
}

TEST(TraceEventFile, IsWholeAfterEveryWrite) {
  const std::string path = path_of_test();
  const auto file = std::move(TraceEventFile::create(path)).value();
  EXPECT_EQ(whole(path)["traceEvents"].size(), 0U);
  std::size_t added = 0;
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 100 * (round % 3); ++i, ++added)
      file->add("{\"name\":" + json_quoted("event " + std::to_string(i) + std::string(100, '.')) + "}");
    const std::size_t written = whole(path)["traceEvents"].size();
    EXPECT_LE(written, added);
    EXPECT_LE((added - written) * 100, TraceEventFile::kBuffer + 200) << "the buffer is bounded";
    if (round % 4 != 0) continue;
    file->flush();
    EXPECT_EQ(whole(path)["traceEvents"].size(), added);
  }
  file->count_dropped();
  file->flush();
  EXPECT_EQ(whole(path)["otherData"]["dropped_events"], 1);
  EXPECT_TRUE(file->status().ok());
}

TEST(TraceEventFile, QuotesWhatJsonWouldNotTake) {
  const std::string path = path_of_test();
  const std::string name = "a \"b\" \\ c\n\t\x01";
  std::move(TraceEventFile::create(path)).value()->add("{\"name\":" + json_quoted(name) + "}");
  EXPECT_EQ(whole(path)["traceEvents"][0]["name"], name);
}

TEST(TraceEventFile, SaysWhereItCannotWrite) {
  const auto nowhere = TraceEventFile::create("/nonexistent/folder/t.json");
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, Errc::kIo);
  EXPECT_THAT(nowhere.error().text, testing::HasSubstr("/nonexistent/folder/t.json"));
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const auto full = TraceEventFile::create("/dev/full");
  ASSERT_FALSE(full);
  EXPECT_THAT(full.error().text, testing::HasSubstr("space on the disk"));
}

TEST(ProfilerRanges, NobodyListensWhereNoProfilerHasAttached) {
  EXPECT_EQ(profiler_listens(), std::getenv("NVTX_INJECTION64_PATH") != nullptr);
}

// The anchor moves along, and times stay on one scale.
TEST(DeviceClock, KeepsItsScaleWhileItsAnchorMoves) {
  const auto device = std::move(open_emulated_device({})).value();
  const Stream stream = *device->create_stream(StreamPriority::kNormal);
  {
    const auto clock = std::move(DeviceClock::create(*device, stream)).value();
    const Event first = *device->create_event(), second = *device->create_event();
    ASSERT_TRUE(device->record(stream, first));
    ASSERT_TRUE(device->synchronize(stream));
    const auto at_first = clock->at(first);
    ASSERT_TRUE(at_first);
    for (int i = 0; i < 5; ++i) {
      clock->move_anchor(stream);
      ASSERT_TRUE(
          device->launch_host(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }));
      ASSERT_TRUE(device->record(stream, second));
      ASSERT_TRUE(device->synchronize(stream));
      EXPECT_NEAR(*clock->at(first), *at_first, 1e-6);
      EXPECT_NEAR(*clock->at(second) - *at_first, *device->seconds_between(first, second), 1e-6);
    }
    device->destroy_event(first);
    device->destroy_event(second);
  }
  device->destroy_stream(stream);
}

TEST(DeviceClock, LeaksNothingWhicheverCallFails) {
  const auto device = std::move(EmulatedDevice::create({})).value();
  const Stream stream = *device->create_stream(StreamPriority::kNormal);
  bool fired = true;
  for (std::uint64_t nth = 1; fired; ++nth) {
    const ScopedFaults faults(fail_call(nth));
    const auto clock = DeviceClock::create(*device, stream);
    fired = faults.fired();
    EXPECT_NE(clock.ok(), fired);
    EXPECT_EQ(device->live_events(), fired ? 0 : 2);
  }
  device->destroy_stream(stream);
}

class RunTimelineTest : public testing::Test {
 protected:
  RunTimelineTest()
      : device_(std::move(open_emulated_device({})).value()),
        compute_(*device_->create_stream(StreamPriority::kNormal)),
        path_(path_of_test()) {}
  ~RunTimelineTest() override { device_->destroy_stream(compute_); }
  std::unique_ptr<RunTimeline> open() {
    auto timeline = RunTimeline::create(*device_, compute_, path_);
    EXPECT_TRUE(timeline);
    return std::move(timeline).value();
  }
  void work() {
    EXPECT_TRUE(
        device_->launch_host(compute_, [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }));
  }
  // Spans by name, with their begin and end in microseconds.
  struct Span {
    std::string name;
    double start, end;
  };
  [[nodiscard]] std::vector<Span> spans() const {
    std::vector<Span> all;
    for (const json trace = whole(path_); const json& event : trace["traceEvents"]) {
      if (event["ph"] != "X") continue;
      // In nanoseconds the file's numbers are whole.
      const double start = std::round(event["ts"].get<double>() * 1e3);
      all.push_back(
          {event["name"], start / 1e3, (start + std::round(event["dur"].get<double>() * 1e3)) / 1e3});
    }
    return all;
  }
  [[nodiscard]] Span span(const std::string& name) const {
    for (const Span& each : spans())
      if (each.name == name) return each;
    ADD_FAILURE() << "no span " << name;
    return {};
  }

  std::unique_ptr<Device> device_;
  Stream compute_;
  std::string path_;
};

TEST_F(RunTimelineTest, SpansOfTheStreamNestAndTakeTheTimeOfTheirWork) {
  auto timeline = open();
  for (int step = 0; step < 3; ++step) {
    timeline->clock().move_anchor(compute_);
    timeline->begin("step " + std::to_string(step), "", RunTimeline::Levels{3_MiB, 4_MiB});
    timeline->begin("layer " + std::to_string(step), "computed", {});
    work();
    timeline->end();
    work();
    timeline->end();
    ASSERT_TRUE(device_->synchronize(compute_));
    timeline->write_passed();
  }
  timeline.reset();
  double last = 0;
  for (const std::string n : {"0", "1", "2"}) {
    const Span step = span("step " + n), layer = span("layer " + n);
    EXPECT_GE(step.start, last);
    EXPECT_GE(layer.start, step.start);
    EXPECT_GE(layer.end, layer.start + 1000);
    EXPECT_GE(step.end, layer.end + 1000);
    last = step.end;
  }
  int levels = 0;
  for (const json trace = whole(path_); const json& event : trace["traceEvents"]) {
    if (event["ph"] == "C")
      levels += event["args"]["bytes"] == (event["name"] == "HBM" ? 3 << 20 : 4 << 20) ? 1 : 100;
    if (event["name"] == "layer 0") {
      EXPECT_EQ(event["args"]["how"], "computed");
    }
  }
  EXPECT_EQ(levels, 6);
}

TEST_F(RunTimelineTest, TheHostsClockIsThatOfTheDevice) {
  auto timeline = open();
  const double before = timeline->clock().now();
  timeline->begin("work", "", {});
  work();
  timeline->end();
  ASSERT_TRUE(device_->synchronize(compute_));
  const double after = timeline->clock().now();
  timeline.reset();
  constexpr double kAccuracy = 50e3;  // microseconds, on a machine that does other things
  EXPECT_GE(span("work").start, before * 1e6 - kAccuracy);
  EXPECT_LE(span("work").end, after * 1e6 + kAccuracy);
}

TEST_F(RunTimelineTest, WhatIsOpenEndsWithTheRun) {
  auto timeline = open();
  timeline->begin("step", "", {});
  timeline->begin("layer", "", {});
  work();
  timeline->end();
  timeline->end();
  timeline->end();  // one too many
  timeline->begin("cut", "", {});
  work();
  timeline.reset();
  EXPECT_GE(span("cut").start, span("step").end);
  EXPECT_EQ(spans().size(), 3U);
}

TEST_F(RunTimelineTest, AnEventThatFailsCostsNoSpan) {
  auto timeline = open();
  {
    const ScopedFaults faults({.nth = 1, .only = FaultPoint::kDeviceRecord, .repeat = 3});
    timeline->begin("step", "", {});
    timeline->begin("layer", "", {});
    work();
    timeline->end();
  }
  timeline->end();
  timeline.reset();
  EXPECT_EQ(spans().size(), 2U);
  EXPECT_LE(span("step").start, span("layer").start);
  EXPECT_GE(span("step").end, span("layer").end);
}

// A host that runs far ahead of a stream that hangs: what would need more memory is left out whole.
TEST_F(RunTimelineTest, MarksAreBoundedAndStayInPairs) {
  auto timeline = open();
  constexpr int kSpans = 80'000;
  timeline->begin("outer", "", {});
  for (int i = 0; i < kSpans; ++i) {
    timeline->begin("inner", "", {});
    timeline->end();
  }
  timeline->begin("inner", "", {});
  timeline->begin("inner", "", {});
  timeline->end();
  timeline->end();
  timeline->end();
  timeline.reset();
  const auto all = spans();
  const std::size_t left_out = whole(path_)["otherData"]["dropped_events"];
  EXPECT_GT(left_out, 0U);
  EXPECT_EQ(all.size() + left_out, static_cast<std::size_t>(kSpans + 3));
  EXPECT_EQ(all.back().name, "outer");
}

TEST_F(RunTimelineTest, CopiesStallsAndNotesHaveRowsOfTheirOwn) {
  auto timeline = open();
  timeline->moved({Direction::kD2H, CopyReason::kSpill, 5_MiB, 0.5, 0.75}, "layer.1.fc");
  timeline->stalled("restore_late", 1.0, 0.125, "layer.2.fc");
  timeline->note("plan", "all of it");
  timeline.reset();
  EXPECT_NEAR(span("spill").start, 500'000, 1e-3);
  EXPECT_NEAR(span("spill").end, 750'000, 1e-3);
  EXPECT_NEAR(span("restore_late").end - span("restore_late").start, 125'000, 1e-3);
  for (const json trace = whole(path_); const json& event : trace["traceEvents"]) {
    if (event["name"] == "spill") {
      EXPECT_EQ(event["args"], json({{"bytes", 5 << 20}, {"what", "layer.1.fc"}}));
    }
    if (event["name"] == "plan" && event["ph"] == "i") {
      EXPECT_EQ(event["args"]["text"], "all of it");
    }
  }
}

}  // namespace
}  // namespace terrace
