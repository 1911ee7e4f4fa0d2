// A daemon and trainers as a user starts them, in a folder of their own.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/daemon/process.hpp"
#include "tests/paths.hpp"

namespace terrace::test {

class TrainingNode {
 public:
  explicit TrainingNode(const TemporaryFolder& folder)
      : socket_(folder.file("terraced.sock")), port_(free_port()), data_(folder.write("text.txt", prose())) {}

  // Starts a daemon, the first or a successor, and waits until it answers.
  bool start_daemon() {
    daemon_ = std::make_unique<ChildProcess>(
        std::vector<std::string>{program("terraced").string(), "--socket", socket_, "--listen",
                                 metrics_address(), "--hbm", "8GiB", "--ddr", "4GiB"});
    return eventually([&] {
             return http_get(metrics_address(), "/healthz").status == 200 || !daemon_->running();
           }) &&
           daemon_->running();
  }
  [[nodiscard]] ChildProcess& daemon() { return *daemon_; }
  [[nodiscard]] std::string metrics_address() const { return "127.0.0.1:" + std::to_string(port_); }
  [[nodiscard]] std::string metrics() const { return http_get(metrics_address(), "/metrics").body; }
  // A node metric or a sum that is absent counts as zero.
  [[nodiscard]] double value(const std::string& series) const {
    return sample(metrics(), series).value_or(0);
  }

  [[nodiscard]] std::vector<std::string> train_command(const std::vector<std::string>& options) const {
    std::vector<std::string> command = {program("moe_trainer").string(),
                                        "--config",
                                        (source_dir() / "examples/moe_trainer/configs/tiny.toml").string(),
                                        "--data",
                                        data_,
                                        "--device",
                                        "emulated",
                                        "--seed",
                                        "1",
                                        "--no-progress"};
    command.insert(command.end(), options.begin(), options.end());
    return command;
  }
  [[nodiscard]] ChildProcess::Environment environment(const std::string& job) const {
    return {{"TERRACE_SOCKET", socket_}, {"TERRACE_JOB", job}, {"TERRACE_POLICY", ""}};
  }

 private:
  static std::string prose() {
    std::string text;
    for (int i = 0; i < 400; ++i) {
      text += "Chapter " + std::to_string(i * 7919 % 1000) +
              ". The link is free only inside windows; what fits is moved, and the "
              "rest is computed again.\n";
    }
    return text;
  }

  std::string socket_;
  int port_;
  std::string data_;
  std::unique_ptr<ChildProcess> daemon_;
};

// The losses a run wrote with --json, as hexadecimal text: equal text is equal bits. Empty: no report.
inline std::vector<std::string> losses_of(const std::string& report) {
  const auto json = nlohmann::json::parse(text_of(report), nullptr, false);
  if (json.is_discarded() || !json.contains("losses_hex")) return {};
  return json["losses_hex"].get<std::vector<std::string>>();
}

}  // namespace terrace::test
