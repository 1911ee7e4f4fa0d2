// Who may do what, with processes that really belong to another user.
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <nlohmann/json.hpp>

#include "daemon/observer.hpp"
#include "tests/daemon/process.hpp"
#include "tests/daemon/running_server.hpp"

namespace terrace {
namespace {

using test::RunningServer;
using test::TestClient;

constexpr uid_t kStranger = 65534;  // nobody
constexpr gid_t kTheirGroup = 54321;

// A process of another user, made before this one has threads. It does one thing when told to, and says what
// came of it.
class Stranger {
 public:
  explicit Stranger(const std::function<std::string()>& act) {
    std::array<int, 2> start{}, told{};
    EXPECT_EQ(::pipe(start.data()), 0);
    EXPECT_EQ(::pipe(told.data()), 0);
    child_ = ::fork();
    if (child_ == 0) {
      char go = 0;
      const bool become =
          ::setgroups(0, nullptr) == 0 && ::setgid(kTheirGroup) == 0 && ::setuid(kStranger) == 0;
      const std::string said =
          !become || ::read(start[0], &go, 1) != 1 ? std::string("not another user") : act();
      [[maybe_unused]] const ssize_t written = ::write(told[1], said.data(), said.size());
      ::_exit(0);
    }
    ::close(start[0]);
    ::close(told[1]);
    start_ = OwnedFd(start[1]);
    told_ = OwnedFd(told[0]);
  }
  ~Stranger() {
    start_.reset();
    (void)::waitpid(child_, nullptr, 0);
  }
  std::string act() {
    EXPECT_EQ(::write(start_.get(), "g", 1), 1);
    std::string said;
    std::array<char, 4096> buffer;
    for (ssize_t got = 0; (got = ::read(told_.get(), buffer.data(), buffer.size())) > 0;)
      said.append(buffer.data(), static_cast<std::size_t>(got));
    return said;
  }

 private:
  pid_t child_ = 0;
  OwnedFd start_, told_;
};

class AccessTest : public testing::Test {
 protected:
  void SetUp() override {
    if (::getuid() != 0) GTEST_SKIP() << "becoming another user takes root";
    ::chmod(folder_.path().c_str(), 0755);
  }
  [[nodiscard]] RunningServer::Limits limits(const AccessRules& access) const {
    return {.hbm = 8_GiB,
            .ddr = 2_GiB,
            .reread =
                [access] {
                  return Server::Live{{}, access};
                },
            .access = access};
  }
  test::TemporaryFolder folder_;
  std::string socket_ = folder_.file("terraced.sock");
};

// The child's side. Each says "ok" or the error.
std::string try_status(const std::string& socket) {
  auto observer = Observer::connect(socket);
  if (!observer) return observer.error().text;
  const auto text = observer->status(0);
  return text ? *text : text.error().text;
}
std::string try_reload(const std::string& socket) {
  auto observer = Observer::connect(socket);
  if (!observer) return observer.error().text;
  Status done = observer->reload();
  return done ? "ok" : done.error().text;
}
std::string try_steer(const std::string& socket, pid_t pid) {
  auto observer = Observer::connect(socket);
  if (!observer) return observer.error().text;
  Status done = observer->steer(pid, Course::kPassthrough);
  return done ? "ok" : done.error().text;
}
// Registers, and stays for as long as it takes to ask for a lease and the status.
std::string try_register(const std::string& socket, const std::string& job) {
  auto connection = WireConnection::connect(socket);
  if (!connection) return connection.error().text;
  auto page = SharedPage::create(job);
  if (!page) return page.error().text;
  Hello hello;
  hello.pid = ::getppid();  // a lie, and not believed
  hello.job = WireText<64>(job);
  hello.device = WireText<32>("emulated:0");
  hello.held[0] = UINT64_MAX;
  (void)connection->send(hello, 1, (*page)->fd());
  auto reply = connection->receive(std::chrono::seconds(30));
  if (!reply) return reply.error().text;
  if (const auto* refusal = std::get_if<Refusal>(&reply->message)) return refusal->text;
  return try_status(socket);
}

TEST_F(AccessTest, NobodyElseGetsInByDefault) {
  Stranger looks([&] { return try_status(socket_); }), registers([&] { return try_register(socket_, "a"); }),
      reloads([&] { return try_reload(socket_); });
  RunningServer server(socket_, limits({}));
  struct stat file {};
  ASSERT_EQ(::stat(socket_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600U);
  for (Stranger* stranger : {&looks, &registers, &reloads})
    EXPECT_NE(stranger->act().find("Permission denied"), std::string::npos);
  EXPECT_EQ(server.clients(), 0U);
}

// The kernel lets them in where somebody has widened the file's mode; the daemon does not.
TEST_F(AccessTest, TheFileModeIsNotTheOnlyWall) {
  Stranger looks([&] { return try_status(socket_); }), registers([&] { return try_register(socket_, "a"); });
  RunningServer server(socket_, limits({}));
  ASSERT_EQ(::chmod(socket_.c_str(), 0666), 0);
  EXPECT_NE(looks.act().find("may not use the daemon"), std::string::npos);
  EXPECT_NE(registers.act().find("may not use the daemon"), std::string::npos);
}

TEST_F(AccessTest, ReadersSeeTotalsAndNothingElse) {
  Stranger looks([&] { return try_status(socket_); }), registers([&] { return try_register(socket_, "a"); }),
      reloads([&] { return try_reload(socket_); }),
      steers([&, pid = ::getpid()] { return try_steer(socket_, pid); });
  RunningServer server(socket_, limits({.group = {}, .readers = {}, .everybody_reads = true}));
  TestClient client(socket_, "a");
  EXPECT_EQ(client.ask(TierId::kHbm, 3_GiB), 3_GiB);
  const auto status = nlohmann::json::parse(looks.act(), nullptr, false);
  ASSERT_FALSE(status.is_discarded());
  EXPECT_EQ(status["leased"]["hbm"], 3ULL << 30);
  EXPECT_EQ(status["clients_total"], 1);
  EXPECT_TRUE(status["clients"].empty());
  EXPECT_NE(registers.act().find("may not register"), std::string::npos);
  EXPECT_NE(reloads.act().find("only root and the daemon's own user"), std::string::npos);
  EXPECT_NE(steers.act().find("of yours is registered"), std::string::npos);
  EXPECT_FALSE(client.link().passthrough());
  EXPECT_EQ(server.leased(TierId::kHbm), 3_GiB);
}

TEST_F(AccessTest, MembersOfTheGroupRegisterAndSeeTheirOwn) {
  Stranger registers([&] { return try_register(socket_, "a"); }),
      reloads([&] { return try_reload(socket_); }),
      steers([&, pid = ::getpid()] { return try_steer(socket_, pid); });
  RunningServer server(socket_, limits({.group = kTheirGroup, .readers = {}}));
  struct stat file {};
  ASSERT_EQ(::stat(socket_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0660U);
  EXPECT_EQ(file.st_gid, kTheirGroup);
  TestClient client(socket_, "a");
  EXPECT_EQ(client.ask(TierId::kHbm, 3_GiB), 3_GiB);
  const auto status = nlohmann::json::parse(registers.act(), nullptr, false);
  ASSERT_FALSE(status.is_discarded());
  EXPECT_EQ(status["clients_total"], 2);
  ASSERT_EQ(status["clients"].size(), 1U) << "their own, not ours";
  EXPECT_EQ(status["clients"][0]["job"], "a:65534") << "the name is taken by another user";
  EXPECT_NE(status["clients"][0]["pid"], ::getpid());
  EXPECT_NE(reloads.act().find("only root and the daemon's own user"), std::string::npos);
  EXPECT_NE(steers.act().find("of yours is registered"), std::string::npos);
  EXPECT_EQ(client.link().lease(TierId::kHbm), 3_GiB);
  EXPECT_TRUE(test::eventually([&] { return server.clients() == 1; }));
}

TEST_F(AccessTest, AReloadChangesWhoMayComeIn) {
  Stranger before([&] { return try_status(socket_); }), after([&] { return try_status(socket_); });
  AccessRules wider;
  wider.everybody_reads = true;
  auto options = limits({});
  options.reread = [wider] { return Server::Live{{}, wider}; };
  RunningServer server(socket_, options);
  EXPECT_NE(before.act().find("Permission denied"), std::string::npos);
  EXPECT_EQ(try_reload(socket_), "ok");
  EXPECT_NE(after.act().find("clients_total"), std::string::npos);
}

}  // namespace
}  // namespace terrace
