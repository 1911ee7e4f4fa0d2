// A real Prometheus server scrapes a real daemon while a real trainer runs; what operators would ask is
// asked.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/daemon/process.hpp"
#include "tests/daemon/training_run.hpp"
#include "tests/paths.hpp"

namespace terrace::test {
namespace {

// The value of an instant query with one sample; nothing where it has none (yet).
std::optional<double> ask(const std::string& prometheus, const std::string& query) {
  std::string escaped;
  for (const char c : query) {
    char code[4];
    std::snprintf(code, sizeof code, "%%%02X", static_cast<unsigned char>(c));
    escaped += std::isalnum(static_cast<unsigned char>(c)) != 0 ? std::string(1, c) : code;
  }
  const HttpAnswer answer = http_get(prometheus, "/api/v1/query?query=" + escaped);
  const auto json = nlohmann::json::parse(answer.body, nullptr, false);
  if (json.is_discarded() || json.value("status", "") != "success") return std::nullopt;
  const auto& result = json["data"]["result"];
  if (result.size() != 1) return std::nullopt;
  return std::stod(result[0]["value"][1].get<std::string>());
}

TEST(Prometheus, ReadsBackWhatATrainingRunDid) {
  if (std::system("command -v prometheus >/dev/null") != 0)
    GTEST_SKIP() << "no prometheus server on this machine";
  TemporaryFolder folder;
  TrainingNode node(folder);
  ASSERT_TRUE(node.start_daemon());
  const std::string config = folder.write("prometheus.yml",
                                          "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
                                          "scrape_configs:\n"
                                          "  - job_name: terrace\n"
                                          "    honor_labels: true\n"
                                          "    static_configs: [{targets: ['" +
                                              node.metrics_address() + "']}]\n");
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  ChildProcess server({"prometheus", "--config.file=" + config, "--storage.tsdb.path=" + folder.file("tsdb"),
                       "--web.listen-address=" + address, "--log.level=warn"});
  ASSERT_TRUE(eventually([&] { return http_get(address, "/-/ready").status == 200; })) << server.err();

  const std::string policy = folder.write("policy.toml",
                                          "[swapcore]\nmode = \"auto\"\n"
                                          "[[swapcore.rule]]\nmatch = \"layer.*.kda.q\"\naction = \"ddr\"\n");
  ChildProcess trainer(node.train_command({"--recompute", "full", "--steps", "100000", "--policy", policy}),
                       node.environment("observed"));
  const std::vector<std::pair<std::string, double>> wanted = {
      {"sum(terrace_tier_bytes{job=\"observed\",tier=\"hbm\"})", 1e5},
      {"terrace_tier_peak_bytes{job=\"observed\",tier=\"ddr\"}", 1},
      {"terrace_budget_bytes{job=\"observed\",tier=\"hbm\"}", 1e6},
      {"terrace_lease_bytes{job=\"observed\",tier=\"hbm\"}", 1e6},
      {"sum(terrace_transfer_bytes_total{job=\"observed\",direction=\"d2h\",reason=\"spill\"})", 1},
      {"sum(terrace_transfer_bytes_total{job=\"observed\",direction=\"h2d\",reason=\"restore\"})", 1},
      {"sum(terrace_transfer_seconds_total{job=\"observed\"})", 1e-9},
      {"sum(terrace_cache_fetches_total{job=\"observed\",outcome=~\"hit|late\"})", 1},
      {"sum(terrace_cache_fetches_total{job=\"observed\",outcome=\"miss\"})", 1},
      {"sum(terrace_stall_seconds_total{job=\"observed\"})", 0},
      {"rate(terrace_steps_total{job=\"observed\"}[10s])", 1e-9},
      {"terrace_clients", 1},
  };
  for (const auto& [query, least] : wanted) {
    std::optional<double> value;
    EXPECT_TRUE(eventually([&] { return (value = ask(address, query)) && *value >= least; }))
        << query << " is " << (value ? std::to_string(*value) : "absent") << "; " << trainer.err();
  }
  EXPECT_TRUE(trainer.running()) << trainer.err();
}

}  // namespace
}  // namespace terrace::test
