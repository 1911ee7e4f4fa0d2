// The allocator benchmark prints a row for every system in every case, and uses an allocator as it may be
// used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/paths.hpp"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

const std::vector<std::string> kCases = {"2KiB/1t",  "2KiB/2t",  "2KiB/4t",  "1MiB/1t",  "1MiB/2t", "1MiB/4t",
                                         "64MiB/1t", "64MiB/2t", "64MiB/4t", "mixed/1t", "mixed/4t"};
const std::vector<std::string> kSystems = {"terrace", "jemalloc", "mimalloc", "glibc", "emulated"};

class AllocatorBench : public ::testing::Test {
 protected:
  struct Answer {
    int code;
    std::string out;
    std::string err;
    [[nodiscard]] std::vector<Json> rows() const {
      std::vector<Json> rows;
      std::istringstream lines(out);
      for (std::string line; std::getline(lines, line);) rows.push_back(Json::parse(line));
      return rows;
    }
  };

  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "allocator_bench.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static std::string text_of(const std::filesystem::path& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }
  [[nodiscard]] std::filesystem::path report_file() const { return folder_ / "report.json"; }
  [[nodiscard]] Json report() const { return Json::parse(text_of(report_file())); }

  // `environment` as a shell writes it: "A=1 B=2".
  [[nodiscard]] Answer run(const std::string& options, const std::string& environment = "A=") const {
    const auto out = folder_ / "out", err = folder_ / "err";
    const std::string command =
        "env CHECKED_PEER_REPORT='" + report_file().string() + "' " + environment + " '" +
        test::program("bench_allocator").string() + "' --device emulated --rounds 1 --sample-ms 1 --build '" +
        test::build_dir().string() + "' " + options + " >'" + out.string() + "' 2>'" + err.string() + "'";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text_of(out), text_of(err)};
  }
  static std::string checked_peer() {
    return "--plugin '" + test::shared_library("checked_peer.so").string() + "'";
  }

  std::filesystem::path folder_;
};

TEST_F(AllocatorBench, HasARowForEverySystemInEveryCase) {
  const Answer answer = run("");
  ASSERT_EQ(answer.code, 0) << answer.err;
  std::set<std::pair<std::string, std::string>> seen;
  for (const Json& row : answer.rows()) {
    std::vector<std::string> fields;
    for (const auto& [field, value] : row.items()) fields.push_back(field);
    EXPECT_EQ(fields,
              (std::vector<std::string>{"bench", "case", "system", "metric", "value", "unit", "floor"}));
    EXPECT_EQ(row["bench"], "allocator");
    EXPECT_EQ(row["metric"], "pair_ns");
    EXPECT_EQ(row["unit"], "ns");
    EXPECT_GT(row["value"], 0) << row;
    EXPECT_TRUE(seen.emplace(row["case"], row["system"]).second) << "twice: " << row;
  }
  for (const std::string& name : kCases) {
    for (const std::string& system : kSystems)
      EXPECT_EQ(seen.count({name, system}), 1U) << name << " " << system;
  }
  EXPECT_EQ(seen.size(), kCases.size() * kSystems.size());
}

TEST_F(AllocatorBench, UsesAnAllocatorAsItMayBeUsed) {
  const Answer answer = run(checked_peer());
  ASSERT_EQ(answer.code, 0) << answer.err;
  EXPECT_EQ(answer.rows().size(), kCases.size() * (kSystems.size() + 1));
  const Json saw = report();
  EXPECT_EQ(saw["wrong"], 0)
      << "each block is released once, with its size, on its stream, by the thread of the stream";
  EXPECT_EQ(saw["live"], 0);
  EXPECT_EQ(saw["streams"], 4);
  EXPECT_EQ(saw["most_live"], 4 * 64) << "mixed/4t keeps 64 blocks a thread";
  EXPECT_EQ(saw["sizes"], 1 + 16) << "1 MiB, and the sixteen of mixed";
}

TEST_F(AllocatorBench, ARefusedBlockIsARowWithoutAValue) {
  const Answer answer = run(checked_peer(), "CHECKED_PEER_LARGEST=2000000");
  EXPECT_EQ(answer.code, 0) << answer.err;
  for (const Json& row : answer.rows()) {
    const std::string name = row["case"];
    const bool refused = row["system"] == "checked" && !name.starts_with("2KiB") && !name.starts_with("1MiB");
    EXPECT_EQ(row["value"].is_null(), refused) << row;
  }
  EXPECT_THAT(answer.err, HasSubstr("checked refused a block of 64MiB/1t"));
  EXPECT_EQ(report()["live"], 0);
}

TEST_F(AllocatorBench, APluginThatIsNoneIsNamed) {
  const std::vector<std::pair<Answer, std::string>> tries = {
      {run("--plugin /nowhere/peer.so"), "/nowhere/peer.so"},
      {run("--plugin '" + test::program("bench_allocator").string() + "'"), "bench_allocator"},
      {run("--plugin '" + test::shared_library("libterrace.so").string() + "'"),
       "exports no terrace_allocator_plugin"},
      {run(checked_peer(), "CHECKED_PEER_ABI=9"), "version 9 of the plugin interface"}};
  for (const auto& [answer, words] : tries) {
    EXPECT_EQ(answer.code, 2) << answer.err;
    EXPECT_EQ(answer.out, "");
    EXPECT_THAT(answer.err, HasSubstr(words));
  }
}

}  // namespace
}  // namespace terrace
