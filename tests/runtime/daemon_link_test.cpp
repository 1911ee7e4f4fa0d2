// The link where there is no daemon; with one it is tested in tests/daemon/.
#include "runtime/daemon_link.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace terrace {
namespace {

class DaemonLinkTest : public testing::Test {
 protected:
  DaemonLink::Options options_for(const std::string& socket) {
    DaemonLink::Options options;
    options.socket = socket;
    options.device = "emulated:0";
    options.first_pause = std::chrono::milliseconds(1);
    options.longest_pause = std::chrono::milliseconds(2);
    options.say = [this](std::string_view line) {
      const std::lock_guard lock(mutex_);
      said_.emplace_back(line);
    };
    return options;
  }
  std::vector<std::string> said() {
    const std::lock_guard lock(mutex_);
    return said_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> said_;
};

TEST_F(DaemonLinkTest, WithoutASocketNothingIsAskedAndNothingIsSaid) {
  auto link = DaemonLink::start(options_for(""));
  ASSERT_TRUE(link.ok());
  EXPECT_FALSE((*link)->connected());
  EXPECT_EQ((*link)->request(TierId::kHbm, 1_GiB).error().code, Errc::kNotFound);
  EXPECT_EQ((*link)->lease(TierId::kHbm), 0_B);
  EXPECT_TRUE(said().empty());
}

TEST_F(DaemonLinkTest, AMissingDaemonIsSaidOnceHoweverOftenItIsTried) {
  const std::string socket = testing::TempDir() + "terrace-none-" + std::to_string(getpid()) + ".sock";
  auto link = DaemonLink::start(options_for(socket));
  ASSERT_TRUE(link.ok());
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ((*link)->request(TierId::kDdr, 1_MiB).error().code, Errc::kNotFound);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_FALSE((*link)->connected());
  EXPECT_EQ((*link)->joins(), 0U);
  ASSERT_EQ(said().size(), 1U);
  EXPECT_NE(said()[0].find(socket), std::string::npos) << said()[0];
}

}  // namespace
}  // namespace terrace
