// A policy read anew by a live daemon: whole, or not at all. And what the daemon tells a service manager.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "daemon/observer.hpp"
#include "runtime/shared_page.hpp"
#include "tests/daemon/process.hpp"
#include "tests/daemon/running_server.hpp"
#include "tests/paths.hpp"

namespace terrace {
namespace {

using test::ChildProcess;
using test::eventually;

class ReloadTest : public testing::Test {
 protected:
  void write(const std::string& text) { (void)folder_.write("p.toml", text); }
  std::vector<std::string> daemon() const {
    return {test::program("terraced"), "--socket", socket_, "--listen", "127.0.0.1:0", "--policy", policy_};
  }
  std::vector<std::string> terrace(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), test::program("terrace"));
    arguments.insert(arguments.end(), {"--socket", socket_});
    return arguments;
  }
  [[nodiscard]] nlohmann::json status() const {
    auto observer = Observer::connect(socket_);
    const auto text = observer ? observer->status(0) : Result<std::string>(observer.error());
    return nlohmann::json::parse(text ? *text : "{}");
  }
  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
  std::string policy_ = folder_.file("p.toml");
};

TEST_F(ReloadTest, BudgetsAndJobsChangeUnderLiveClients) {
  write("[hbm]\nbudget = \"8GiB\"\n[ddr]\nbudget = \"2GiB\"\n");
  ChildProcess terraced(daemon());
  ASSERT_TRUE(eventually([&] { return status().contains("pid"); })) << terraced.err();
  test::TestClient holder(socket_, "a", [](DaemonLink& link, const DaemonLink::Ask& ask) {
    link.answer(ask, saturating_sub(link.lease(ask.tier), ask.target));
  });
  EXPECT_EQ(holder.ask(TierId::kHbm, 8_GiB), 8_GiB);
  write(
      "[hbm]\nbudget = \"6GiB\"\n[ddr]\nbudget = \"3GiB\"\n"
      "[[daemon.job]]\nmatch = \"vip*\"\npriority = 2\nhbm_guarantee = \"50%\"\n");
  ChildProcess reload(terrace({"reload"}));
  EXPECT_EQ(reload.wait(), 0) << reload.err();
  EXPECT_EQ(reload.err() + reload.out(), "");
  EXPECT_EQ(status()["budget"]["hbm"], 6ULL << 30);
  EXPECT_EQ(status()["budget"]["ddr"], 3ULL << 30);
  EXPECT_TRUE(eventually([&] { return holder.link().lease(TierId::kHbm) == 6_GiB; }))
      << "it is asked to shrink";
  test::TestClient vip(socket_, "vip1");
  EXPECT_EQ(*vip.link().request_and_keep(TierId::kHbm, 6_GiB, std::chrono::seconds(60)), 4_GiB)
      << "two to one";
}

TEST_F(ReloadTest, APolicyWithAnErrorChangesNothing) {
  write("[ddr]\nbudget = \"2GiB\"\n");
  ChildProcess terraced(daemon());
  ASSERT_TRUE(eventually([&] { return status().contains("pid"); })) << terraced.err();
  write("[ddr]\nbudget = \"3GiB\"\n[hbm]\nbudget = \"140%\"\n");
  ChildProcess reload(terrace({"reload"}));
  EXPECT_EQ(reload.wait(), 2);
  EXPECT_NE(reload.err().find("p.toml:4:10: hbm.budget: "), std::string::npos) << reload.err();
  const std::string said = reload.err();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_EQ(status()["budget"]["ddr"], 2ULL << 30);
  terraced.kill(SIGHUP);
  EXPECT_TRUE(
      eventually([&] { return terraced.err().find("the policy stays as it was") != std::string::npos; }));
  EXPECT_EQ(status()["budget"]["ddr"], 2ULL << 30);
  write("[daemon]\ngroup = \"no-such-group-here\"\n");
  ChildProcess group(terrace({"reload"}));
  EXPECT_EQ(group.wait(), 2);
  EXPECT_NE(group.err().find("no-such-group-here"), std::string::npos) << group.err();
  write("[ddr]\nbudget = \"5GiB\"\n");
  terraced.kill(SIGHUP);
  EXPECT_TRUE(eventually([&] { return status()["budget"]["ddr"] == 5ULL << 30; }));
  EXPECT_TRUE(terraced.running());
}

TEST_F(ReloadTest, OffReachesTheProcessItNames) {
  write("");
  ChildProcess terraced(daemon());
  ASSERT_TRUE(eventually([&] { return status().contains("pid"); })) << terraced.err();
  test::TestClient client(socket_, "a");
  ChildProcess nobody(terrace({"off", "1"}));
  EXPECT_EQ(nobody.wait(), 1);
  EXPECT_NE(nobody.err().find("no process 1 of yours"), std::string::npos) << nobody.err();
  ChildProcess off(terrace({"off", std::to_string(::getpid())}));
  EXPECT_EQ(off.wait(), 0) << off.err();
  EXPECT_TRUE(eventually([&] { return client.link().passthrough(); }));
  ChildProcess on(terrace({"off", std::to_string(::getpid()), "--undo"}));
  EXPECT_EQ(on.wait(), 0) << on.err();
  EXPECT_TRUE(eventually([&] { return !client.link().passthrough(); }));
}

TEST_F(ReloadTest, TellsTheServiceManagerWhatItDoes) {
  write("");
  const std::string path = folder_.file("notify");
  const OwnedFd manager(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(manager.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  timeval patience{60, 0};
  ::setsockopt(manager.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const auto next = [&] {
    std::array<char, 256> text{};
    const ssize_t got = ::recv(manager.get(), text.data(), text.size(), 0);
    return std::string(text.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  };
  ChildProcess terraced(daemon(), {{"NOTIFY_SOCKET", path}, {"WATCHDOG_USEC", "200000"}});
  EXPECT_EQ(next(), "READY=1");
  EXPECT_TRUE(status().contains("pid")) << "ready is when it answers";
  for (int i = 0; i < 3; ++i) EXPECT_EQ(next(), "WATCHDOG=1");
  terraced.kill(SIGTERM);
  std::string last = next();
  while (last == "WATCHDOG=1") last = next();
  EXPECT_EQ(last, "STOPPING=1");
  EXPECT_EQ(terraced.wait(), 0) << terraced.err();
}

TEST_F(ReloadTest, CheckSaysWhatJobsAreGranted) {
  write(
      "[daemon]\ngroup = \"trainers\"\n[[daemon.job]]\nmatch = \"vip*\"\nuser = \"ada\"\npriority = 2\n"
      "hbm_guarantee = \"50%\"\n");
  ChildProcess check({test::program("terrace"), "check", policy_});
  EXPECT_EQ(check.wait(), 0) << check.err();
  EXPECT_NE(check.out().find("for its own user, root and group trainers"), std::string::npos) << check.out();
  EXPECT_NE(
      check.out().find("vip* of user ada: priority 2, guaranteed HBM of each device: 50% of what may be "
                       "leased\n"),
      std::string::npos)
      << check.out();
}

// As it would be installed, but for the folder of the programs and the page of a manual that is not
// installed.
TEST_F(ReloadTest, SystemdAcceptsTheUnit) {
  if (std::system("command -v systemd-analyze > /dev/null 2>&1") != 0)
    GTEST_SKIP() << "systemd is not installed";
  const std::filesystem::path file = test::build_dir() / "generated/daemon/terraced.service";
  if (!std::filesystem::exists(file)) GTEST_SKIP() << "the build's files are not here";
  const std::string bin = (test::build_dir() / "bin").string();
  std::istringstream installed(test::text_of(file));
  std::string unit;
  for (std::string line; std::getline(installed, line);) {
    const std::size_t program = line.find('=') + 1;
    const std::size_t name = line.rfind('/', line.find(' '));
    if (line.rfind("Exec", 0) == 0) line.replace(program, name - program, bin);
    if (line.rfind("Documentation=", 0) != 0) unit += line + "\n";
  }
  EXPECT_NE(unit.find("ExecReload=" + bin + "/terrace reload"), std::string::npos) << unit;
  ChildProcess verify({"systemd-analyze", "verify", folder_.write("terraced.service", unit)});
  EXPECT_EQ(verify.wait(), 0) << verify.err();
}

}  // namespace
}  // namespace terrace
