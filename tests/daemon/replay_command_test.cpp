// `terrace run --record` and `terrace replay` as a user types them.
#include "daemon/replay_command.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <nlohmann/json.hpp>

#include "daemon/record_target.hpp"
#include "tests/daemon/process.hpp"
#include "tests/paths.hpp"
#include "tests/runtime/memory_source.hpp"

namespace terrace {
namespace {

using test::ChildProcess;
using testing::HasSubstr;

std::string program(const char* name) { return test::program(name).string(); }

class ReplayCommand : public testing::Test {
 protected:
  static ChildProcess::Environment plain() {
    return {{"TERRACE_SOCKET", ""}, {"TERRACE_JOB", ""},    {"TERRACE_RUN", ""},
            {"TERRACE_POLICY", ""}, {"TERRACE_RECORD", ""}, {"TERRACE_RECORD_PID", ""}};
  }
  static std::vector<std::string> replay(const std::string& file,
                                         const std::vector<std::string>& options = {}) {
    std::vector<std::string> all{program("terrace"), "replay", file, "--device", "emulated"};
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }
  // No daemon: its socket would lie in a file.
  std::vector<std::string> record(const std::string& file, std::vector<std::string> command) const {
    std::vector<std::string> all{program("terrace"), "run", "--socket", taken_ + "/s",
                                 "--record",         file,  "--"};
    all.insert(all.end(), command.begin(), command.end());
    return all;
  }
  static ChildProcess::Environment with_loopback() {
    ChildProcess::Environment environment = plain();
    environment.emplace_back("LD_LIBRARY_PATH", test::shared_library("loopback").string());
    return environment;
  }
  std::string trace() const {
    test::TraceBytes bytes;
    const auto first = bytes.allocate(10_MiB, 1, Pool::kWeights);
    const auto second = bytes.allocate(20_MiB, 2);
    bytes.free(first, 1);
    (void)bytes.allocate(100_B, 2);
    bytes.free(second, 2);
    return folder_.write("t.trace", bytes.text());
  }
  test::TemporaryFolder folder_;
  std::string taken_ = folder_.write("file", "");
};

TEST_F(ReplayCommand, AKnownTraceGivesAKnownReport) {
  ChildProcess command(replay(trace(), {"--allocator", "baseline", "--json"}), plain());
  ASSERT_EQ(command.wait(), 0) << command.err();
  const std::string out = command.out();
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 1);
  const auto json = nlohmann::json::parse(out);
  EXPECT_EQ(json["recorded"]["process"], "test");
  EXPECT_EQ(json["recorded"]["layer"], "pool");
  EXPECT_EQ(json["recorded"]["streams"], 2);
  EXPECT_EQ(json["recorded"]["peak_live_bytes"], 30 << 20);
  EXPECT_EQ(json["allocator"], "baseline");
  EXPECT_EQ(json["device"], "emulated");
  EXPECT_EQ(json["budget_bytes"], 256 << 20);
  EXPECT_EQ(json["allocations"], 3);
  EXPECT_EQ(json["frees"], 2);
  EXPECT_EQ(json["failures"], 0);
  EXPECT_EQ(json["peak_live_bytes"], 30 << 20);
  EXPECT_EQ(json["peak_reserved_bytes"], 30 << 20);
  EXPECT_EQ(json["reserved_ratio"], 1.0);
  EXPECT_EQ(json["fragmentation"], 0.0);
  EXPECT_EQ(json["allocate"]["count"], 3);
  for (const char* key : {"p50_ns", "p90_ns", "p99_ns", "max_ns"}) {
    EXPECT_GT(json["allocate"][key], 0) << key;
    EXPECT_GT(json["free"][key], 0) << key;
  }
  EXPECT_GT(json["seconds"], 0.0);
}

TEST_F(ReplayCommand, TheReportIsReadable) {
  ChildProcess command(replay(trace(), {"--budget", "24MiB"}), plain());
  ASSERT_EQ(command.wait(), 0) << command.err();
  EXPECT_THAT(command.out(),
              HasSubstr("pool of test on emulated; 3 allocations, 2 frees, 2 streams, 1 threads"));
  EXPECT_THAT(command.out(), HasSubstr("terrace on emulated, budget 24.0 MiB"));
  EXPECT_THAT(command.out(), HasSubstr("failures:   1 allocations refused, the largest 20.0 MiB"));
  EXPECT_THAT(command.out(), HasSubstr("live:       peak 10.0 MiB"));
  EXPECT_THAT(command.out(), HasSubstr("allocate:   p50 "));
  EXPECT_THAT(command.out(), HasSubstr("in 3 calls\n")) << "two allocations and the free of one of them";
}

TEST_F(ReplayCommand, ATraceLargerThanTheMachineIsReplayed) {
  test::TraceBytes bytes;
  for (int i = 0; i < 60; ++i) (void)bytes.allocate(1_GiB);
  ChildProcess command(replay(folder_.write("large", bytes.text()), {"--json"}), plain());
  ASSERT_EQ(command.wait(), 0) << command.err();
  const auto json = nlohmann::json::parse(command.out());
  EXPECT_EQ(json["failures"], 0);
  EXPECT_EQ(json["budget_bytes"], 120ULL << 30);
}

TEST_F(ReplayCommand, WhatIsRefusedIsOneLineAndTwo) {
  const std::string good = trace();
  const std::vector<std::pair<std::vector<std::string>, std::string>> refused = {
      {replay(folder_.file("missing")), "missing: No such file"},
      {replay(folder_.write("text", "not a trace at all")), "text: not a trace; use a file written by"},
      {replay(folder_.write("cut", test::text_of(good) + '\0')), "cut: event 5 at byte"},
      {replay(good, {"--budget", "140%"}), "--budget: \"140%\""},
      {replay(good, {"--budget", "0B"}), "--budget: 0 bytes"},
      {replay(good, {"--allocator", folder_.file("no.so")}), "no.so: no such file"},
      {{program("terrace"), "replay", good, "--device", "quantum"}, "device \"quantum\""},
  };
  for (const auto& [line, expected] : refused) {
    ChildProcess command(line, plain());
    EXPECT_EQ(command.wait(), 2) << expected;
    EXPECT_EQ(command.out(), "");
    const std::string said = command.err();
    EXPECT_THAT(said, HasSubstr(expected));
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  }
}

TEST_F(ReplayCommand, APluginThatCannotOpenFails) {
  const std::string plugin = test::shared_library("libtest_replay_plugin.so").string();
  ChildProcess command(replay(trace(), {"--allocator", plugin, "--json"}), plain());
  ASSERT_EQ(command.wait(), 0) << command.err();
  const auto json = nlohmann::json::parse(command.out());
  EXPECT_EQ(json["allocator"], "counting");
  EXPECT_EQ(json["device"], "host");
  EXPECT_EQ(json["peak_reserved_bytes"], 60 << 20);
}

TEST_F(ReplayCommand, RunRecordsAndReplayReads) {
  const std::string file = folder_.file("run.trace");
  ChildProcess run(record(file, {program("linked_guest"), "every-call"}), with_loopback());
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_THAT(run.out(), HasSubstr("cuMemFree_v2 0\n"));
  EXPECT_THAT(run.err(), testing::Not(HasSubstr("record")));
  ChildProcess command(replay(file, {"--json"}), plain());
  ASSERT_EQ(command.wait(), 0) << command.err();
  const auto json = nlohmann::json::parse(command.out());
  EXPECT_EQ(json["recorded"]["process"], "linked_guest");
  EXPECT_EQ(json["recorded"]["layer"], "driver calls");
  EXPECT_EQ(json["recorded"]["peak_live_bytes"], 1023 << 10);
  EXPECT_EQ(json["allocations"], 10);
  EXPECT_EQ(json["frees"], 7);
}

TEST_F(ReplayCommand, TracesForKeepingAreCompressedAndCutAtAnEvent) {
  const auto script = test::source_dir() / "bench" / "record_traces.py";
  if (!std::filesystem::exists(script)) GTEST_SKIP() << "no bench/ here";
  struct Kept {
    std::string name;
    std::string most_kib;
    bool whole;
  };
  ChildProcess::Environment environment = with_loopback();
  environment.emplace_back("TERRACE_SOCKET", taken_ + "/s");
  for (const Kept& kept : {Kept{"whole", "300", true}, Kept{"cut", "0.25", false}}) {
    ChildProcess recording(
        {"python3", script.string(), "--terrace", program("terrace"), "--out", folder_.path().string(),
         "--name", kept.name, "--most-kib", kept.most_kib, "--", program("linked_guest"), "threads"},
        environment);
    ASSERT_EQ(recording.wait(), 0) << recording.err();
    const std::string file = folder_.file(kept.name + ".trace.gz");
    EXPECT_LE(std::filesystem::file_size(file), 1024 * std::stod(kept.most_kib));
    ChildProcess command(replay(file, {"--json"}), plain());
    ASSERT_EQ(command.wait(), 0) << command.err();
    const auto json = nlohmann::json::parse(command.out());
    EXPECT_EQ(json["recorded"]["torn"], false);
    EXPECT_EQ(json["recorded"]["allocations"] == 16000, kept.whole);
    EXPECT_GT(json["recorded"]["allocations"], 10);
  }
}

TEST_F(ReplayCommand, RunSaysWhenNothingWasRecorded) {
  const std::string file = folder_.write("old.trace", "\x89TRACE\r\nof an earlier run");
  ChildProcess run(record(file, {"sh", "-c", "exit 5"}), plain());
  EXPECT_EQ(run.wait(), 5);
  EXPECT_THAT(run.err(), HasSubstr("nothing was recorded in " + file));
  EXPECT_EQ(test::text_of(file), "");
}

TEST_F(ReplayCommand, RunRefusesATargetBeforeAnythingStarts) {
  const std::string held = folder_.write("held", "");
  const OwnedFd holder(::open(held.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(holder.get(), LOCK_EX), 0);
  const std::vector<std::pair<std::string, std::string>> refused = {
      {folder_.file("no/such/folder/t"), "No such file or directory; name a file that you may write"},
      {folder_.path().string(), "no plain file"},
      {"/dev/null", "no plain file"},
      {held, "a running process is recording into it"},
      {folder_.write("train.py", "import torch"), "it is no trace, and would be overwritten"},
  };
  for (const auto& [file, expected] : refused) {
    ChildProcess run(record(file, {"echo", "started"}), plain());
    EXPECT_EQ(run.wait(), 2) << file;
    EXPECT_EQ(run.out(), "");
    EXPECT_THAT(run.err(), HasSubstr("--record " + file + ": " + expected));
  }
  EXPECT_EQ(test::text_of(folder_.file("train.py")), "import torch");
}

TEST_F(ReplayCommand, APoolsBlocksAreRecordedWithTheirPurpose) {
  const std::string file = folder_.file("pool.trace");
  ChildProcess run(record(file, {program("quickstart")}), plain());
  ASSERT_EQ(run.wait(), 0) << run.err();
  ChildProcess command(replay(file, {"--json"}), plain());
  ASSERT_EQ(command.wait(), 0) << command.err();
  const auto json = nlohmann::json::parse(command.out());
  EXPECT_EQ(json["recorded"]["layer"], "pool");
  EXPECT_GT(json["recorded"]["allocations"], 0);
  EXPECT_EQ(json["recorded"]["allocations"], json["recorded"]["frees"]);
}

}  // namespace
}  // namespace terrace
