#include "swapcore/stable/use_gate.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace terrace {
namespace {

TEST(UseGate, UsersEnterTogetherAndNobodyWhileItIsShut) {
  UseGate gate;
  ASSERT_TRUE(gate.try_enter());
  ASSERT_TRUE(gate.try_enter());
  gate.shut();
  EXPECT_FALSE(gate.try_enter());
  gate.leave();
  gate.leave();
  gate.await_empty();
  EXPECT_FALSE(gate.try_enter());
  gate.open();
  gate.await_open();
  EXPECT_TRUE(gate.try_enter());
  gate.leave();
}

// What the mover writes alone is seen whole by every user.
TEST(UseGate, TheMoverIsAlone) {
  UseGate gate;
  std::uint64_t one = 0, two = 0;  // equal whenever somebody is inside
  std::atomic<bool> done{false};
  std::atomic<std::uint64_t> seen{0};
  std::vector<std::jthread> users;
  for (int i = 0; i < 3; ++i) {
    users.emplace_back([&] {
      while (!done) {
        if (!gate.try_enter()) {
          gate.await_open();
          continue;
        }
        if (one != two) ADD_FAILURE() << "inside together with the mover";
        ++seen;
        gate.leave();
      }
    });
  }
  for (int i = 0; i < 2000; ++i) {
    gate.shut();
    gate.await_empty();
    ++one;
    std::this_thread::yield();
    ++two;
    gate.open();
  }
  while (seen == 0) std::this_thread::yield();
  done = true;
}

}  // namespace
}  // namespace terrace
