// Traces of programs that know nothing of Terrace, through libterrace_preload.so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/hooks/guest_process.hpp"
#include "tests/paths.hpp"
#include "tests/runtime/memory_source.hpp"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using test::Ended;
using test::read_trace;
using test::ReadTrace;
using test::run_program;
using trace::Event;

class PreloadRecord : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "terrace-preload-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::vector<std::string> plain() {
    return {"LD_PRELOAD=", "TERRACE_SOCKET=", "TERRACE_RECORD=",
            "LD_LIBRARY_PATH=" + test::shared_library("loopback").string()};
  }
  // The guest knows itself by its process id, as under `terrace run --record`.
  Ended record(const std::string& guest, const std::string& scene) const {
    std::vector<std::string> environment = plain();
    environment[0] += test::shared_library("libterrace_preload.so").string();
    environment[2] += file().string();
    return run_program({"sh", "-c", "TERRACE_RECORD_PID=$$ exec " + command(guest, scene)}, environment);
  }
  static std::string command(const std::string& guest, const std::string& scene) {
    return "'" + test::program(guest.c_str()).string() + "' " + scene;
  }
  fs::path file() const { return folder_ / "t.trace"; }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder_)) found.push_back(entry.path());
    std::sort(found.begin(), found.end());
    return found;
  }
  static ReadTrace read(const fs::path& path) {
    std::ifstream stream(path, std::ios::binary);
    return read_trace({std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()});
  }
  fs::path folder_;
};

std::vector<std::uint64_t> kibibytes_of(const ReadTrace& trace, Event::Kind kind) {
  std::vector<std::uint64_t> sizes;
  for (const Event& event : trace.events) {
    if (event.kind == kind) sizes.push_back(event.size.count() >> 10);
  }
  return sizes;
}

TEST_F(PreloadRecord, EveryDeviceAllocationIsInTheTraceOnce) {
  const Ended ended = record("linked_guest", "every-call");
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.err, "");
  EXPECT_EQ(ended.out, run_program({"sh", "-c", command("linked_guest", "every-call")}, plain()).out);
  const ReadTrace trace = read(file());
  ASSERT_EQ(trace.error, "");
  EXPECT_EQ(trace.header.layer, trace::Layer::kDriverCalls);
  EXPECT_EQ(trace.header.device_kind, "cuda");
  EXPECT_EQ(trace.header.process, "linked_guest");
  EXPECT_THAT(kibibytes_of(trace, Event::Kind::kAllocate),
              testing::ElementsAre(1, 2, 4, 8, 16, 32, 64, 128, 256, 512));
  EXPECT_THAT(kibibytes_of(trace, Event::Kind::kFree), testing::ElementsAre(1, 2, 4, 8, 16, 32, 64));
  for (const Event& event : trace.events) EXPECT_EQ(event.pool, trace::kUnknown);
}

TEST_F(PreloadRecord, StreamsAreThoseThatTheCallsName) {
  EXPECT_EQ(record("linked_guest", "streams").exit_code, 0);
  const ReadTrace trace = read(file());
  ASSERT_EQ(trace.error, "");
  std::vector<std::uint64_t> streams;
  for (const Event& event : trace.events) streams.push_back(event.stream);
  EXPECT_THAT(streams, testing::ElementsAre(0x70, 0x80, 0x70, 0, 0x80, 0x80, 0));
  EXPECT_THAT(kibibytes_of(trace, Event::Kind::kFree), testing::ElementsAre(1, 3, 4));
}

TEST_F(PreloadRecord, RefusedCallsAndUnseenMemoryAreNotInIt) {
  EXPECT_EQ(record("linked_guest", "failures").exit_code, 0);
  const ReadTrace trace = read(file());
  ASSERT_EQ(trace.error, "");
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_EQ(trace.events[0].size, 1_KiB);
  EXPECT_EQ(record("linked_guest", "hidden").exit_code, 0);
  EXPECT_THAT(files(), testing::ElementsAre(file()));
}

TEST_F(PreloadRecord, ThreadsLoseNothing) {
  EXPECT_EQ(record("linked_guest", "threads").exit_code, 0);
  const ReadTrace trace = read(file());
  ASSERT_EQ(trace.error, "");
  EXPECT_EQ(trace.events.size(), 2u * 8 * 2000);
}

TEST_F(PreloadRecord, ADescendantHasAFileOfItsOwn) {
  EXPECT_EQ(record("linked_guest", "fork").exit_code, 0);
  ASSERT_EQ(files().size(), 2u);
  EXPECT_THAT(kibibytes_of(read(file()), Event::Kind::kAllocate), testing::ElementsAre(4));
  EXPECT_THAT(kibibytes_of(read(file()), Event::Kind::kFree), testing::ElementsAre(4));
  EXPECT_THAT(kibibytes_of(read(files()[1]), Event::Kind::kAllocate), testing::Contains(1));
}

TEST_F(PreloadRecord, AProgramWithoutCudaLeavesNoFile) {
  EXPECT_EQ(record("linked_guest", "idle").exit_code, 0);
  EXPECT_TRUE(files().empty());
}

TEST_F(PreloadRecord, WhoIsNearerToTheUserGetsTheFile) {
  for (const char* when : {"", "later"}) {
    const Ended ended = record("recording_guest", when);
    EXPECT_EQ(ended.exit_code, 0);
    EXPECT_EQ(ended.err, "");
    const ReadTrace trace = read(file());
    ASSERT_EQ(trace.error, "");
    EXPECT_EQ(trace.header.layer, trace::Layer::kPool) << when;
    ASSERT_EQ(trace.events.size(), 2u) << when;
    EXPECT_EQ(trace.events[0].size, 5_KiB);
    EXPECT_EQ(trace.events[0].pool, Pool::kGradient);
    EXPECT_THAT(files(), testing::ElementsAre(file())) << "nothing is left over";
  }
}

}  // namespace
}  // namespace terrace
