// The operators' benchmark on the emulated device: every case of every family prints its rows.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/paths.hpp"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;

struct Answer {
  int code = -1;
  std::vector<Json> rows;
};
Answer run(const std::string& options) {
  const std::string command =
      "'" + test::program("bench_kernels").string() + "' --device emulated --samples 1 " + options;
  Answer answer;
  FILE* out = popen(command.c_str(), "r");
  if (out == nullptr) return answer;
  std::string line;
  for (int c = std::fgetc(out); c != EOF; c = std::fgetc(out)) {
    if (c != '\n') {
      line.push_back(static_cast<char>(c));
      continue;
    }
    answer.rows.push_back(Json::parse(line));
    line.clear();
  }
  const int status = pclose(out);
  answer.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return answer;
}

TEST(KernelsBench, EveryCasePrintsSecondsAndScratch) {
  const Answer answer = run("");
  EXPECT_EQ(answer.code, 0);
  ASSERT_FALSE(answer.rows.empty());
  std::map<std::string, std::set<std::string>> metrics;
  for (const Json& row : answer.rows) {
    EXPECT_EQ(row["bench"], "kernels");
    EXPECT_EQ(row["system"], "terrace");
    EXPECT_TRUE(row["floor"].is_null()) << row;
    EXPECT_TRUE(metrics[row["case"]].insert(row["metric"]).second) << row;
    if (row["metric"] == "seconds") {
      EXPECT_GT(row["value"].get<double>(), 0) << row;
    }
  }
  for (const auto& [name, of_case] : metrics) {
    EXPECT_EQ(of_case, (std::set<std::string>{"seconds", "scratch_bytes"})) << name;
  }
}

TEST(KernelsBench, FiltersByFamilyAndCase) {
  const Answer answer = run("--family routing --case permute/");
  EXPECT_EQ(answer.code, 0);
  ASSERT_EQ(answer.rows.size(), 2U);
  EXPECT_EQ(answer.rows[0]["case"].get<std::string>().rfind("routing/permute/", 0), 0U);
  EXPECT_EQ(run("--case no-such-case 2>/dev/null").code, 1);
  EXPECT_NE(run("--family no-such-family 2>/dev/null").code, 0);
}

}  // namespace
}  // namespace terrace
