// Traces replayed on the emulated device: known traces, known reports.
#include "allocator/replay/replay.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>

#include "allocator/replay/latency_histogram.hpp"
#include "allocator/replay/replayed_allocator.hpp"
#include "allocator/replay/trace_file.hpp"
#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "tests/paths.hpp"
#include "tests/runtime/memory_source.hpp"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using test::reader_of;
using test::TraceBytes;
using testing::HasSubstr;

std::unique_ptr<EmulatedDevice> device_of(Bytes capacity) {
  EmulatedOptions options;
  options.capacity = capacity;
  options.granularity = 2_MiB;
  return std::move(EmulatedDevice::create(options)).value();
}

ReplayReport report_of(const std::string& bytes, ReplayedAllocator& allocator) {
  auto reader = reader_of(bytes);
  EXPECT_TRUE(reader.ok());
  auto report = replay(*reader, allocator);
  EXPECT_TRUE(report.ok()) << (report ? "" : report.error().text);
  return report ? *report : ReplayReport{};
}

// Two of 3 MiB, one of them freed for one of 1000 bytes, on two streams.
std::string small_trace() {
  TraceBytes bytes;
  const auto first = bytes.allocate(3_MiB, 70, Pool::kWeights);
  const auto second = bytes.allocate(3_MiB, 80, Pool::kActivation);
  bytes.free(first, 70);
  (void)bytes.allocate(1000_B, 80);
  bytes.free(second, 80);
  return bytes.text();
}

TEST(Replay, ASummaryCountsWhatATraceAsksFor) {
  auto reader = reader_of(small_trace());
  const auto summary = summarize(*reader);
  ASSERT_TRUE(summary.ok());
  EXPECT_EQ(summary->allocations, 3u);
  EXPECT_EQ(summary->frees, 2u);
  EXPECT_EQ(summary->peak_live, 6_MiB);
  EXPECT_EQ(summary->peak_live_rounded, 6_MiB);
  EXPECT_EQ(summary->largest, 3_MiB);
  EXPECT_EQ(summary->streams, 2u);
  EXPECT_EQ(summary->threads, 1u);
  EXPECT_FALSE(summary->torn);
}

TEST(Replay, TheBaselineHoldsEachBlockRoundedUp) {
  const auto device = device_of(64_MiB);
  {
    auto allocator = replay_on_device(*device, 64_MiB);
    const ReplayReport report = report_of(small_trace(), **allocator);
    EXPECT_EQ(report.allocator, "baseline");
    EXPECT_EQ(report.allocations, 3u);
    EXPECT_EQ(report.frees, 2u);
    EXPECT_EQ(report.failures, 0u);
    EXPECT_EQ(report.peak_live, 6_MiB);
    EXPECT_EQ(report.peak_reserved, 8_MiB);
    EXPECT_EQ(report.reserved_at_peak, 8_MiB);
    EXPECT_DOUBLE_EQ(report.reserved_ratio(), 8.0 / 6);
    EXPECT_DOUBLE_EQ(report.fragmentation(), 0.25);
    EXPECT_EQ(report.allocate_time.count(), 3u);
    EXPECT_EQ(report.free_time.count(), 2u);
    EXPECT_GT(report.seconds, 0);
    EXPECT_EQ(device->live_physical(), 2_MiB) << "the block that the trace never frees";
  }
  EXPECT_EQ(device->live_physical(), 0_B);
  EXPECT_EQ(device->reserved_bytes(), 0_B);
  EXPECT_EQ(device->live_streams(), 0);
}

TEST(Replay, ThePoolReusesWhatIsFreed) {
  TraceBytes bytes;
  (void)bytes.allocate(8_MiB, 0, Pool::kWeights);
  for (int i = 0; i < 200; ++i) bytes.free(bytes.allocate(Bytes(4_MiB + Bytes(512U * (i % 7)))));
  const auto device = device_of(256_MiB);
  {
    auto allocator = replay_on_pool(*device, 256_MiB);
    ASSERT_TRUE(allocator.ok());
    const ReplayReport report = report_of(bytes.text(), **allocator);
    EXPECT_EQ(report.allocator, "terrace");
    EXPECT_EQ(report.allocations, 201u);
    EXPECT_EQ(report.failures, 0u);
    EXPECT_GE(report.peak_reserved, report.peak_live);
    EXPECT_LE(report.peak_reserved, 64_MiB);
    EXPECT_LT(report.reserved_ratio(), 4);
  }
  EXPECT_EQ(device->live_physical(), 0_B);
}

// Peak reserved to peak live bytes. Beside each trace what PyTorch's allocator takes on an H200
// (docs/benchmarks.md); the emulated device is as large, and has passed every point when it is asked.
TEST(Replay, NoRecordedProgramNeedsMoreThanAThirtiethAboveItsBytesOrThanOnPyTorch) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer leaves too few addresses for a device of 139 GiB";
#endif
  const std::vector<std::pair<const char*, double>> traces = {
      {"gpt-checkpoint", 1.208},      {"gpt-plain", 1.060},    {"gpt-save-on-cpu", 1.268},
      {"moe-checkpoint", 1.079},      {"moe-plain", 1.026},    {"moe-lora-plain", 1.057},
      {"moe-lora-checkpoint", 1.371}, {"trainer-nano", 1.046}, {"trainer-small", 1.0119}};
  const auto device = device_of(139_GiB);
  for (const auto& [name, pytorch] : traces) {
    auto reader =
        open_trace((test::source_dir() / "bench/traces" / (std::string(name) + ".trace.gz")).string());
    ASSERT_TRUE(reader) << reader.error().text;
    auto allocator = replay_on_pool(*device, 139_GiB);
    const auto report = replay(*reader, **allocator);
    ASSERT_TRUE(report) << report.error().text;
    EXPECT_EQ(report->failures, 0u) << name;
    EXPECT_LT(report->reserved_ratio(), 1.03) << name;
    EXPECT_LT(report->reserved_ratio(), pytorch) << name;
  }
}

TEST(Replay, WhatTheBudgetRefusesIsCountedAndItsFreeLeftOut) {
  TraceBytes bytes;
  const auto small = bytes.allocate(4_MiB);
  const auto large = bytes.allocate(200_MiB);
  const auto larger = bytes.allocate(300_MiB);
  for (const auto id : {large, larger, small}) bytes.free(id);
  const auto device = device_of(128_MiB);
  for (const auto make : {replay_on_pool, replay_on_device}) {
    auto allocator = make(*device, 64_MiB);
    ASSERT_TRUE(allocator.ok());
    const ReplayReport report = report_of(bytes.text(), **allocator);
    EXPECT_EQ(report.allocations, 1u);
    EXPECT_EQ(report.frees, 1u);
    EXPECT_EQ(report.failures, 2u);
    EXPECT_EQ(report.largest_failure, 300_MiB);
    EXPECT_EQ(report.peak_live, 4_MiB) << "of what was served";
  }
}

TEST(Replay, MoreStreamsThanADeviceHasShareThem) {
  TraceBytes bytes;
  std::vector<std::uint64_t> ids;
  for (std::uint64_t stream = 0; stream < 200; ++stream) ids.push_back(bytes.allocate(4_KiB, stream << 20));
  for (std::uint64_t stream = 0; stream < 200; ++stream) bytes.free(ids[stream], (199 - stream) << 20);
  const auto device = device_of(64_MiB);
  auto allocator = replay_on_pool(*device, 64_MiB);
  const ReplayReport report = report_of(bytes.text(), **allocator);
  EXPECT_EQ(report.frees, 200u);
  EXPECT_EQ(device->live_streams(), static_cast<int>(kMostReplayStreams));
}

// More than the machine has: it is mapped, and never touched.
TEST(Replay, SixtyGibibytesTouchNoMemory) {
  TraceBytes bytes;
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 60; ++i) ids.push_back(bytes.allocate(1_GiB));
  for (const auto id : ids) bytes.free(id);
  const auto device = device_of(120_GiB);
  for (const auto make : {replay_on_pool, replay_on_device}) {
    rusage before{}, after{};
    ASSERT_EQ(getrusage(RUSAGE_SELF, &before), 0);
    auto allocator = make(*device, 120_GiB);
    ASSERT_TRUE(allocator.ok());
    const ReplayReport report = report_of(bytes.text(), **allocator);
    EXPECT_EQ(report.failures, 0u);
    EXPECT_EQ(report.peak_live, 60_GiB);
    EXPECT_GE(report.peak_reserved, 60_GiB);
    ASSERT_EQ(getrusage(RUSAGE_SELF, &after), 0);
    EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 512 << 10) << "KiB";
  }
}

TEST(Replay, LeaksNothingWhicheverCallFails) {
  const std::string trace = small_trace();
  for (const auto make : {replay_on_pool, replay_on_device}) {
    for (std::uint64_t nth = 1;; ++nth) {
      const auto device = device_of(64_MiB);
      const ScopedFaults faults(fail_call(nth));
      if (auto allocator = make(*device, 64_MiB)) {
        auto reader = reader_of(trace);
        (void)replay(*reader, **allocator);
      }
      EXPECT_EQ(device->live_physical(), 0_B) << "after failing call " << nth;
      EXPECT_EQ(device->reserved_bytes(), 0_B) << "after failing call " << nth;
      EXPECT_EQ(device->live_streams(), 0) << "after failing call " << nth;
      if (!faults.fired()) break;
    }
  }
}

TEST(Replay, ADamagedTraceEndsItWithThePlace) {
  const auto device = device_of(64_MiB);
  auto allocator = replay_on_pool(*device, 64_MiB);
  auto reader = reader_of(small_trace() + std::string(1, '\0') + "x");
  const auto report = replay(*reader, **allocator);
  ASSERT_FALSE(report.ok());
  EXPECT_THAT(report.error().text, HasSubstr("event 5 at byte"));
}

TEST(Replay, LiveBytesThatOverflowAreRefused) {
  TraceBytes bytes;
  for (int i = 0; i < 5000; ++i) (void)bytes.allocate(trace::kLargestBlock);
  auto reader = reader_of(bytes.text());
  const auto summary = summarize(*reader);
  ASSERT_FALSE(summary.ok());
  EXPECT_THAT(summary.error().text, HasSubstr("live at once"));
}

std::string plugin(const char* name) { return test::shared_library(name).string(); }

TEST(ReplayPlugin, AnotherSystemIsReplayedThroughItsTable) {
  TraceBytes bytes;
  const auto first = bytes.allocate(3_MiB, 5);
  (void)bytes.allocate(2_MiB, 6);
  (void)bytes.allocate(4_MiB, 6);  // more than the budget has left
  bytes.free(first, 5);
  auto allocator = replay_on_plugin(plugin("libtest_replay_plugin.so"), -1, 8_MiB);
  ASSERT_TRUE(allocator.ok()) << allocator.error().text;
  testing::internal::CaptureStderr();
  const ReplayReport report = report_of(bytes.text(), **allocator);
  allocator->reset();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "every block went back, on streams of its own";
  EXPECT_EQ(report.allocator, "counting");
  EXPECT_EQ(report.allocations, 2u);
  EXPECT_EQ(report.frees, 1u);
  EXPECT_EQ(report.failures, 1u);
  EXPECT_EQ(report.peak_live, 5_MiB);
  EXPECT_EQ(report.peak_reserved, 10_MiB);
}

TEST(ReplayPlugin, WhatIsNoPluginIsRefusedWithAReason) {
  const auto error_of = [](const std::string& file, int device) {
    const auto allocator = replay_on_plugin(file, device, 8_MiB);
    return allocator ? std::string() : allocator.error().text;
  };
  EXPECT_THAT(error_of("/nonexistent/p.so", -1), HasSubstr("no such file"));
  EXPECT_THAT(error_of((test::source_dir() / "LICENSE").string(), -1), HasSubstr("cannot be loaded"));
  EXPECT_THAT(error_of(plugin("libterrace.so"), -1), HasSubstr("no terrace_allocator_plugin() in it"));
  EXPECT_THAT(error_of(plugin("libtest_replay_plugin_of_tomorrow.so"), -1),
              HasSubstr("of ABI 99; this program takes 1"));
  EXPECT_THAT(error_of(plugin("libtest_replay_plugin.so"), 3), HasSubstr("there is no device 3 here"));
}

TEST(LatencyHistogram, PercentilesAreWithinASixtyFourth) {
  LatencyHistogram histogram;
  EXPECT_EQ(histogram.percentile(0.5), Nanoseconds(0));
  for (int i = 1; i <= 1000; ++i) histogram.add(Nanoseconds(i * 1000));
  EXPECT_EQ(histogram.count(), 1000u);
  EXPECT_EQ(histogram.max(), Nanoseconds(1000000));
  for (const double share : {0.01, 0.5, 0.9, 0.99}) {
    const auto got = static_cast<double>(histogram.percentile(share).count());
    EXPECT_GE(got, share * 1e6);
    EXPECT_LE(got, share * 1e6 * (1 + 1.0 / 64));
  }
  EXPECT_EQ(histogram.percentile(1), histogram.max());
  LatencyHistogram small;
  for (const int value : {-5, 0, 63, 64, 127, 128}) small.add(Nanoseconds(value));
  EXPECT_EQ(small.percentile(0), Nanoseconds(0));
  EXPECT_EQ(small.percentile(0.5), Nanoseconds(63));
  EXPECT_EQ(small.percentile(4.0 / 6), Nanoseconds(64));
  EXPECT_EQ(small.percentile(5.0 / 6), Nanoseconds(127));
  LatencyHistogram endless;
  endless.add(Nanoseconds::max());
  EXPECT_EQ(endless.percentile(0.5), Nanoseconds::max());
}

class TraceFile : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "terrace-trace-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string write(const char* name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return (folder_ / name).string();
  }
  std::string compress(const char* name, const std::string& bytes) const {
    const std::string path = (folder_ / name).string();
    const gzFile file = gzopen(path.c_str(), "wb9");
    EXPECT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
              static_cast<int>(bytes.size()));
    gzclose(file);
    return path;
  }
  static std::string text_of(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  }
  struct Read {
    std::uint64_t events = 0;
    std::string error;
    bool torn = false;
  };
  static Read read(const std::string& path) {
    auto reader = open_trace(path);
    if (!reader) return {0, reader.error().text, false};
    const auto summary = summarize(*reader);
    if (!summary) return {0, summary.error().text, false};
    return {summary->allocations + summary->frees, "", summary->torn};
  }
  fs::path folder_;
};

TEST_F(TraceFile, RawAndCompressedReadTheSame) {
  TraceBytes bytes;
  for (int i = 0; i < 50000; ++i) bytes.free(bytes.allocate(Bytes(static_cast<std::uint64_t>(i) * 512)));
  const Read raw = read(write("raw", bytes.text())), compressed = read(compress("t.gz", bytes.text()));
  EXPECT_EQ(raw.error, "");
  EXPECT_EQ(compressed.error, "");
  EXPECT_EQ(raw.events, 100000u);
  EXPECT_EQ(compressed.events, 100000u);
}

TEST_F(TraceFile, DamagedFilesAreNamed) {
  TraceBytes bytes;
  for (int i = 0; i < 20000; ++i)
    bytes.free(bytes.allocate(Bytes(static_cast<std::uint64_t>(i * i) % 9973 * 512)));
  EXPECT_THAT(read((folder_ / "missing").string()).error, HasSubstr("missing: No such file or directory"));
  EXPECT_THAT(read(folder_.string()).error, HasSubstr("a folder"));
  EXPECT_THAT(read(write("empty", "")).error, HasSubstr("empty: no allocation was recorded"));
  EXPECT_THAT(read(write("other", "MZ and so on, long enough to be one")).error, HasSubstr("not a trace"));
  const std::string packed = text_of(compress("t.gz", bytes.text()));
  const Read torn = read(write("torn.gz", packed.substr(0, packed.size() / 2)));
  EXPECT_EQ(torn.error, "");
  EXPECT_GT(torn.events, 0u);
  EXPECT_LT(torn.events, 40000u);
  std::string damaged = packed;
  for (std::size_t at = packed.size() / 2; at < packed.size() / 2 + 200; ++at) damaged[at] = '\x55';
  EXPECT_NE(read(write("damaged.gz", damaged)).error, "");
}

}  // namespace
}  // namespace terrace
