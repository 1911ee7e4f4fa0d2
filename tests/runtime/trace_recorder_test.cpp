// The recorder in processes of its own, as the environment starts it.
#include "runtime/trace/recorder.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include "runtime/fault.hpp"
#include "runtime/trace/live_ids.hpp"
#include "runtime/trace/recording_file.hpp"
#include "tests/paths.hpp"
#include "tests/runtime/memory_source.hpp"

namespace terrace::trace {
namespace {

namespace fs = std::filesystem;
using test::read_trace;
using test::ReadTrace;
using testing::HasSubstr;

std::string text_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

class TraceRecorder : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "terrace-record-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path file(const char* name = "t.trace") const { return folder_ / name; }

  // Runs the program with a scene; the program itself knows itself by its process id, as under `terrace run`.
  struct Ended {
    int status = -1;
    pid_t pid = 0;
    std::string err;
  };
  Ended run(const char* scene, const fs::path& record) const {
    const std::string program = test::program("terrace_test_recording").string();
    const std::string errors = file("stderr").string();
    Ended ended;
    ended.pid = ::fork();
    if (ended.pid == 0) {
      ::setenv("TERRACE_RECORD", record.c_str(), 1);
      ::setenv("TERRACE_RECORD_PID", std::to_string(::getpid()).c_str(), 1);
      if (::freopen(errors.c_str(), "w", stderr) == nullptr) ::_exit(98);
      ::execl(program.c_str(), program.c_str(), scene, nullptr);
      ::_exit(99);
    }
    (void)::waitpid(ended.pid, &ended.status, 0);
    ended.err = text_of(errors);
    return ended;
  }
  fs::path folder_;
};

std::map<std::uint64_t, Bytes> live_at_end(const ReadTrace& read) {
  std::map<std::uint64_t, Bytes> live;
  for (const Event& event : read.events) {
    if (event.kind == Event::Kind::kAllocate) {
      live[event.id] = event.size;
    } else {
      live.erase(event.id);
    }
  }
  return live;
}

TEST_F(TraceRecorder, RecordsWhatItIsTold) {
  const Ended ended = run("simple", file());
  EXPECT_EQ(ended.status, 0);
  EXPECT_EQ(ended.err, "");
  const ReadTrace read = read_trace(text_of(file()));
  ASSERT_EQ(read.error, "");
  EXPECT_EQ(read.header.layer, Layer::kPool);
  EXPECT_EQ(read.header.device_kind, "emulated");
  EXPECT_EQ(read.header.process, "terrace_test_recording");
  ASSERT_EQ(read.events.size(), 6u);
  EXPECT_EQ(read.events[0].size, 1_KiB);
  EXPECT_EQ(read.events[0].stream, 7u);
  EXPECT_EQ(read.events[0].pool, Pool::kWeights);
  EXPECT_EQ(read.events[1].size, 2_KiB);
  EXPECT_EQ(read.events[1].pool, kUnknown);
  EXPECT_EQ(read.events[2].kind, Event::Kind::kFree);
  EXPECT_EQ(read.events[2].id, 0u);
  EXPECT_EQ(read.events[2].stream, 8u);
  EXPECT_EQ(read.events[3].kind, Event::Kind::kFree) << "an address that comes again was freed unseen";
  EXPECT_EQ(read.events[3].id, 1u);
  EXPECT_EQ(read.events[4].size, 4_KiB);
  EXPECT_EQ(read.events[5].size, 8_KiB) << "after main, from a static destructor";
  EXPECT_EQ(live_at_end(read).size(), 2u);
}

TEST_F(TraceRecorder, NothingIsRecordedWhereNobodyAsks) {
  EXPECT_EQ(run("simple", "").status, 0);
  EXPECT_TRUE(fs::is_empty(folder_) || text_of(file("stderr")).empty());
  EXPECT_FALSE(fs::exists(file()));
}

TEST_F(TraceRecorder, ThreadsLoseNothing) {
  EXPECT_EQ(run("threads", file()).status, 0);
  const ReadTrace read = read_trace(text_of(file()));
  ASSERT_EQ(read.error, "");
  EXPECT_EQ(read.events.size(), 2u * 4 * 5000);
  std::set<std::uint32_t> threads;
  for (const Event& event : read.events) threads.insert(event.thread);
  EXPECT_EQ(threads, (std::set<std::uint32_t>{0, 1, 2, 3}));
  EXPECT_TRUE(live_at_end(read).empty());
}

TEST_F(TraceRecorder, AForkedChildHasAFileOfItsOwn) {
  EXPECT_EQ(run("fork", file()).status, 0);
  const ReadTrace parent = read_trace(text_of(file()));
  ASSERT_EQ(parent.error, "");
  ASSERT_EQ(parent.events.size(), 4u);
  EXPECT_EQ(parent.events[0].size, 1_KiB);
  EXPECT_EQ(parent.events[3].size, 2_KiB) << "after the fork, into the same file";
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    if (entry.path().filename().string().starts_with("t.trace.")) others.push_back(entry.path());
  }
  ASSERT_EQ(others.size(), 1u);
  const ReadTrace child = read_trace(text_of(others[0]));
  ASSERT_EQ(child.error, "");
  ASSERT_EQ(child.events.size(), 2u) << "the free of its parent's block is not its own";
  EXPECT_EQ(child.events[0].size, 16_KiB);
  EXPECT_EQ(child.events[0].id, 0u);
}

TEST_F(TraceRecorder, AKilledProcessLeavesAReadableFile) {
  const Ended ended = run("killed", file());
  EXPECT_TRUE(WIFSIGNALED(ended.status));
  const ReadTrace read = read_trace(text_of(file()));
  EXPECT_EQ(read.error, "");
  EXPECT_GT(read.events.size(), 10000u) << "full buffers were written";
}

TEST_F(TraceRecorder, TheNearerLayerGetsTheFile) {
  for (const char* scene : {"driver-then-pool", "pool-then-driver"}) {
    EXPECT_EQ(run(scene, file()).status, 0) << scene;
    const ReadTrace read = read_trace(text_of(file()));
    ASSERT_EQ(read.error, "") << scene;
    EXPECT_EQ(read.header.layer, Layer::kPool) << scene;
    EXPECT_EQ(read.events.size(), 1u) << scene;
  }
}

TEST_F(TraceRecorder, WhatCannotBeWrittenIsOneLineAndNoHarm) {
  const Ended ended = run("simple", "/nonexistent/t.trace");
  EXPECT_EQ(ended.status, 0);
  EXPECT_EQ(ended.err, "terrace: recording into /nonexistent/t.trace ended: No such file or directory\n");
  const Ended closed = run("closed", file());
  EXPECT_EQ(closed.status, 0) << "a file that took the closed descriptor's number is left alone";
  EXPECT_THAT(closed.err, HasSubstr("ended: Bad file descriptor\n"));
}

TEST_F(TraceRecorder, EveryFailingWriteEndsTheRecordingOnly) {
  const Ended ended = run("faults", file());
  EXPECT_EQ(ended.status, 0);
  EXPECT_THAT(ended.err, HasSubstr("ended: Input/output error\n"));
}

TEST_F(TraceRecorder, AFileKnowsItsHolders) {
  const std::string path = file().string();
  RecordingFile driver, second, pool;
  ASSERT_EQ(driver.open(path.c_str(), Layer::kDriverCalls), RecordingFile::Outcome::kDone);
  EXPECT_EQ(second.open(path.c_str(), Layer::kDriverCalls), RecordingFile::Outcome::kTaken);
  std::array<std::byte, kMostHeaderBytes> header;
  const auto write_header = [&](RecordingFile& to, Layer layer) {
    return to.write(std::span<const std::byte>(header).first(encode_header(header, layer, "cuda", "p")));
  };
  ASSERT_EQ(write_header(driver, Layer::kDriverCalls), RecordingFile::Outcome::kDone);
  {
    const ScopedFaults faults(fail_call(FaultPoint::kFileRename, 1));
    EXPECT_EQ(pool.open(path.c_str(), Layer::kPool), RecordingFile::Outcome::kFailed);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1)
        << "nothing is left over";
  }
  EXPECT_EQ(pool.open(path.c_str(), Layer::kPool), RecordingFile::Outcome::kDone);
  EXPECT_EQ(write_header(pool, Layer::kPool), RecordingFile::Outcome::kDone);
  EXPECT_EQ(write_header(driver, Layer::kDriverCalls), RecordingFile::Outcome::kTaken)
      << "its file was replaced";
  EXPECT_EQ(second.open(path.c_str(), Layer::kPool), RecordingFile::Outcome::kTaken)
      << "the first of two pools";
  EXPECT_EQ(read_trace(text_of(path)).header.layer, Layer::kPool);
  pool.close();
  EXPECT_EQ(second.open(path.c_str(), Layer::kDriverCalls), RecordingFile::Outcome::kDone)
      << "nobody holds it";
  EXPECT_EQ(text_of(path), "") << "and what was in it is gone";
  second.close();
}

// Against a map, with addresses so few that probe chains form, break and close.
TEST(TraceLiveIds, BehavesAsAMap) {
  LiveIds ids;
  std::map<std::uint64_t, std::uint64_t> model;
  std::mt19937_64 random(5);
  for (std::uint64_t step = 0; step < 200000; ++step) {
    const std::uint64_t address = (1 + random() % 3000) * (random() % 2 == 0 ? 512 : 2 << 20);
    const auto known = model.find(address);
    const auto taken = ids.take(address);
    ASSERT_EQ(taken.has_value(), known != model.end());
    if (taken) {
      ASSERT_EQ(*taken, known->second);
      model.erase(known);
    } else {
      ASSERT_TRUE(ids.put(address, step));
      model[address] = step;
    }
    ASSERT_EQ(ids.size(), model.size());
  }
  ids.clear();
  for (const auto& [address, id] : model) ASSERT_FALSE(ids.take(address).has_value());
}

TEST(TraceLiveIds, IsBoundedAndSaysWhenThereIsNoMemory) {
  LiveIds ids;
  {
    const ScopedFaults faults(fail_call(FaultPoint::kHostMap, 1));
    EXPECT_FALSE(ids.put(512, 0));
    EXPECT_FALSE(ids.take(512).has_value());
  }
  for (std::size_t i = 0; i < kMostLiveBlocks; ++i) ASSERT_TRUE(ids.put((i + 1) << 9, i));
  EXPECT_FALSE(ids.put(kMostLiveBlocks << 20, 0));
  EXPECT_EQ(ids.take(512), 0u);
  EXPECT_TRUE(ids.put(kMostLiveBlocks << 20, 1));
}

}  // namespace
}  // namespace terrace::trace
