// terraced and terrace as a user starts them.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "daemon/observer.hpp"
#include "tests/daemon/process.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

using test::ChildProcess;
using test::eventually;

std::string program(const char* name) { return test::program(name).string(); }

class CommandTest : public testing::Test {
 protected:
  // Environment without anything that another daemon has left there.
  static ChildProcess::Environment plain() {
    return {{"TERRACE_SOCKET", ""}, {"TERRACE_JOB", ""}, {"TERRACE_RUN", ""}, {"TERRACE_POLICY", ""}};
  }
  std::vector<std::string> run(std::vector<std::string> command,
                               std::vector<std::string> options = {}) const {
    std::vector<std::string> all{program("terrace"), "run", "--socket", socket_, "--listen", "127.0.0.1:0"};
    all.insert(all.end(), options.begin(), options.end());
    all.push_back("--");
    all.insert(all.end(), command.begin(), command.end());
    return all;
  }
  std::vector<std::string> daemon(std::vector<std::string> options = {}) const {
    std::vector<std::string> all{program("terraced"), "--socket", socket_, "--listen", "127.0.0.1:0"};
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }
  nlohmann::json status() const {
    auto observer = Observer::connect(socket_);
    const auto text = observer ? observer->status(0) : Result<std::string>(observer.error());
    return nlohmann::json::parse(text ? *text : "{}");
  }
  bool answers() const { return Observer::connect(socket_).ok(); }
  void TearDown() override {  // a daemon that `terrace run` has started
    const auto json = status();
    if (json.contains("pid")) ::kill(json["pid"].get<pid_t>(), SIGTERM);
    EXPECT_TRUE(eventually([&] { return !answers(); }));
  }
  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
};

TEST_F(CommandTest, TheDaemonStopsCleanlyOnSignals) {
  for (const int signal : {SIGTERM, SIGINT}) {
    ChildProcess terraced(daemon());
    ASSERT_TRUE(eventually([&] { return answers(); })) << terraced.err();
    const std::string listen = status()["listen"];
    EXPECT_EQ(test::http_get(listen, "/healthz").status, 200);
    terraced.kill(signal);
    EXPECT_EQ(terraced.wait(), 0) << terraced.err();
    EXPECT_FALSE(std::filesystem::exists(socket_));
    EXPECT_EQ(test::http_get(listen, "/healthz").status, 0);
    EXPECT_EQ(terraced.out(), "");
  }
}

TEST_F(CommandTest, ATakenSocketOrPortIsOneLine) {
  ChildProcess first(daemon());
  ASSERT_TRUE(eventually([&] { return answers(); }));
  ChildProcess same_socket(daemon());
  EXPECT_EQ(same_socket.wait(), 1);
  EXPECT_NE(same_socket.err().find("taken by another daemon"), std::string::npos) << same_socket.err();
  ChildProcess same_port({program("terraced"), "--socket", folder_.file("other.sock"), "--listen",
                          status()["listen"].get<std::string>()});
  EXPECT_EQ(same_port.wait(), 1);
  EXPECT_NE(same_port.err().find("cannot listen on"), std::string::npos) << same_port.err();
  for (const std::string& text : {same_socket.err(), same_port.err()}) {
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  }
}

TEST_F(CommandTest, AKilledDaemonsSocketIsReplaced) {
  {
    ChildProcess first(daemon());
    ASSERT_TRUE(eventually([&] { return answers(); }));
    first.kill(SIGKILL);
    EXPECT_EQ(first.wait(), 128 + SIGKILL);
  }
  ASSERT_TRUE(std::filesystem::exists(socket_));
  ChildProcess second(daemon());
  EXPECT_TRUE(eventually([&] { return answers(); })) << second.err();
}

TEST_F(CommandTest, AnIdleDaemonEnds) {
  ChildProcess terraced(daemon({"--exit-when-idle", "0"}));
  EXPECT_EQ(terraced.wait(), 0) << terraced.err();
}

TEST_F(CommandTest, BudgetsComeFromOptionsAndPolicy) {
  const std::string policy = folder_.write("p.toml", "[ddr]\nbudget = \"3MiB\"\n[hbm]\nbudget = \"5MiB\"\n");
  {
    ChildProcess terraced(daemon({"--policy", policy}));
    ASSERT_TRUE(eventually([&] { return answers(); })) << terraced.err();
    EXPECT_EQ(status()["budget"]["ddr"], 3 << 20);
    EXPECT_EQ(status()["budget"]["hbm"], 5 << 20);
    terraced.kill(SIGTERM);
    EXPECT_EQ(terraced.wait(), 0);
  }
  ChildProcess terraced(daemon({"--policy", policy, "--ddr", "7MiB", "--hbm", "1024"}));
  ASSERT_TRUE(eventually([&] { return answers(); })) << terraced.err();
  EXPECT_EQ(status()["budget"]["ddr"], 7 << 20);
  EXPECT_EQ(status()["budget"]["hbm"], 1024);
}

TEST_F(CommandTest, RunPassesLsThroughUnchanged) {
  ChildProcess direct({"ls", "/"}, plain());
  ChildProcess through(run({"ls", "/"}), plain());
  EXPECT_EQ(through.wait(), direct.wait());
  EXPECT_EQ(through.out(), direct.out());
  EXPECT_EQ(through.err(), "");
}

TEST_F(CommandTest, RunGivesBackTheExitCode) {
  ChildProcess seven(run({"sh", "-c", "exit 7"}), plain());
  EXPECT_EQ(seven.wait(), 7);
  ChildProcess killed(run({"sh", "-c", "kill -9 $$"}), plain());
  EXPECT_EQ(killed.wait(), 128 + SIGKILL);
  ChildProcess missing(run({"no-such-command-here"}), plain());
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_NE(missing.err().find("no-such-command-here: command not found"), std::string::npos)
      << missing.err();
  ChildProcess not_executable(run({folder_.write("plain.txt", "x")}), plain());
  EXPECT_EQ(not_executable.wait(), 126);
}

TEST_F(CommandTest, RunReportsWhatARegisteredProcessUsed) {
  ChildProcess command(run({program("terrace_test_client"), "6"}, {"--job", "trial"}), plain());
  EXPECT_EQ(command.wait(), 6);
  EXPECT_EQ(command.out(), "");
  const std::string report = command.err();
  EXPECT_NE(report.find("HBM peak 3.0 MiB"), std::string::npos) << report;
  EXPECT_NE(report.find("moved 5.0 MiB"), std::string::npos) << report;
  EXPECT_NE(report.find("11 hits, 0 misses, 0 late"), std::string::npos) << report;
  const auto json = status();  // the daemon remembers, for a while
  ASSERT_EQ(json["ended"].size(), 1U);
  EXPECT_EQ(json["ended"][0]["job"], "trial");
  EXPECT_EQ(json["leased"]["ddr"], 0);
}

TEST_F(CommandTest, RunPassesSignalsOn) {
  ChildProcess command(run({program("terrace_test_client"), "hold"}), plain());
  ASSERT_TRUE(eventually([&] { return command.out() == "ready\n"; })) << command.err();
  EXPECT_EQ(status()["leased"]["ddr"], 1 << 20);
  command.kill(SIGTERM);
  EXPECT_EQ(command.wait(), 42);
  EXPECT_NE(command.err().find("HBM peak"), std::string::npos) << command.err();
}

TEST_F(CommandTest, RunJoinsADaemonThatIsThere) {
  ChildProcess terraced(daemon({"--ddr", "64MiB"}));
  ASSERT_TRUE(eventually([&] { return answers(); }));
  ChildProcess command(run({program("terrace_test_client")}), plain());
  EXPECT_EQ(command.wait(), 0) << command.err();
  EXPECT_TRUE(terraced.running());
  EXPECT_EQ(status()["pid"], terraced.pid());
  EXPECT_EQ(status()["ended"].size(), 1U);
}

TEST_F(CommandTest, RunGoesOnWhereNoDaemonCanBeStarted) {
  const std::string taken = folder_.write("file", "");
  ChildProcess command({program("terrace"), "run", "--socket", taken + "/x.sock", "--", "sh", "-c",
                        "echo \"[$TERRACE_SOCKET]\"; exit 3"},
                       plain());
  EXPECT_EQ(command.wait(), 3);
  EXPECT_EQ(command.out(), "[]\n");
  const std::string said = command.err();
  EXPECT_NE(said.find("running without"), std::string::npos) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

TEST_F(CommandTest, RunRefusesABadPolicyBeforeAnythingStarts) {
  const std::string policy = folder_.write("bad.toml", "[hbm]\nbudgte = \"1GiB\"\n");
  ChildProcess command(run({"echo", "started"}, {"--policy", policy}), plain());
  EXPECT_EQ(command.wait(), 2);
  EXPECT_EQ(command.out(), "");
  EXPECT_NE(command.err().find("bad.toml:2:"), std::string::npos) << command.err();
}

TEST_F(CommandTest, CheckGoesThroughEveryFile) {
  const std::string good = folder_.write("good.toml", "[hbm]\nbudget = \"80%\"\n");
  const std::string bad = folder_.write("bad.toml", "[hbm]\nbudget = \"140%\"\n");
  ChildProcess fine({program("terrace"), "check", good});
  EXPECT_EQ(fine.wait(), 0) << fine.err();
  EXPECT_NE(fine.out().find("good.toml: ok"), std::string::npos);
  EXPECT_NE(fine.out().find("80% of each device"), std::string::npos) << fine.out();
  ChildProcess mixed({program("terrace"), "check", bad, folder_.file("missing.toml"), good});
  EXPECT_EQ(mixed.wait(), 2);
  EXPECT_NE(mixed.err().find("bad.toml:2:"), std::string::npos) << mixed.err();
  EXPECT_NE(mixed.err().find("missing.toml"), std::string::npos) << mixed.err();
  EXPECT_NE(mixed.out().find("good.toml: ok"), std::string::npos);
}

TEST_F(CommandTest, CheckExplainsEverySiteOfAModel) {
  const std::string model = (test::source_dir() / "examples/moe_trainer/configs/nano.toml").string();
  const std::string policy =
      folder_.write("p.toml",
                    "[[swapcore.rule]]\nmatch = \"layer.0.*\"\naction = \"hbm\"\n"
                    "[[swapcore.rule]]\nmatch = \"layer.0.moe.fc1\"\naction = \"ddr\"\npriority = 1\n"
                    "phase = \"forward\"\nsteps = \"5..9\"\n"
                    "[[swapcore.rule]]\nmatch = \"layer.*.moe.fc7\"\naction = \"ddr\"\n");
  ChildProcess fine({program("terrace"), "check", "--explain", model, policy}, plain());
  EXPECT_EQ(fine.wait(), 0) << fine.err();
  EXPECT_NE(
      fine.err().find(policy + ":11:9: warning: swapcore.rule.match: \"layer.*.moe.fc7\" matches no site"),
      std::string::npos)
      << fine.err();
  EXPECT_NE(fine.err().find("; the nearest: layer.0.moe.fc1 (gmm)"), std::string::npos) << fine.err();
  const std::string out = "\n" + fine.out();
  for (const char* line : {"layer.0.moe.fc1 +gmm +hbm +at 2:9, layer.0.[*]: forward, steps 0 to 4",
                           "layer.0.moe.fc1 +gmm +ddr +at 5:9, layer.0.moe.fc1: forward, steps 5 to 9",
                           "layer.0.moe.fc1 +gmm +hbm +at 2:9, layer.0.[*]: recompute",
                           "layer.0.moe.fc2 +gmm +hbm +at 2:9, layer.0.[*]", "layer.1.moe.fc1 +gmm +auto"}) {
    EXPECT_TRUE(std::regex_search(out, std::regex("\n" + std::string(line) + "\n"))) << line << out;
  }
}

TEST_F(CommandTest, CheckExplainRefusesRulesThatMeetOnASite) {
  const std::string model = (test::source_dir() / "examples/moe_trainer/configs/nano.toml").string();
  const std::string policy = folder_.write("p.toml",
                                           "[[swapcore.rule]]\nmatch = \"layer.0.*\"\naction = \"hbm\"\n"
                                           "[[swapcore.rule]]\nmatch = \"*.moe.fc1\"\naction = \"ddr\"\n");
  ChildProcess without({program("terrace"), "check", policy}, plain());
  EXPECT_EQ(without.wait(), 0) << "only a model tells";
  ChildProcess refused({program("terrace"), "check", "--explain", model, policy}, plain());
  EXPECT_EQ(refused.wait(), 2);
  EXPECT_EQ(refused.out(), "");
  EXPECT_NE(refused.err().find(policy + ":5:9: "), std::string::npos) << refused.err();
  EXPECT_NE(refused.err().find(policy + ":2:9, "), std::string::npos) << refused.err();
  ChildProcess missing({program("terrace"), "check", "--explain", folder_.file("none.toml"), policy},
                       plain());
  EXPECT_EQ(missing.wait(), 2);
  EXPECT_NE(missing.err().find("none.toml"), std::string::npos) << missing.err();
  ChildProcess nothing({program("terrace"), "check"}, plain());
  EXPECT_EQ(nothing.wait(), 2);
}

TEST_F(CommandTest, StatusShowsTheDaemonOrSaysThereIsNone) {
  ChildProcess none({program("terrace"), "status", "--socket", socket_}, plain());
  EXPECT_EQ(none.wait(), 1);
  EXPECT_NE(none.err().find("no daemon at " + socket_), std::string::npos) << none.err();
  ChildProcess terraced(daemon({"--hbm", "1GiB"}));
  ASSERT_TRUE(eventually([&] { return answers(); }));
  ChildProcess text({program("terrace"), "status", "--socket", socket_}, plain());
  EXPECT_EQ(text.wait(), 0);
  EXPECT_NE(text.out().find("hbm: 0 B leased of 1.0 GiB"), std::string::npos) << text.out();
  ChildProcess json({program("terrace"), "status", "--json", "--socket", socket_}, plain());
  EXPECT_EQ(json.wait(), 0);
  EXPECT_EQ(nlohmann::json::parse(json.out())["pid"], terraced.pid());
}

TEST_F(CommandTest, TheMetricsDocumentIsPrinted) {
  ChildProcess document({program("terrace"), "metrics-doc"});
  EXPECT_EQ(document.wait(), 0);
  EXPECT_EQ(document.out(), test::text_of(test::source_dir() / "docs" / "METRICS.md"));
}

}  // namespace
}  // namespace terrace
