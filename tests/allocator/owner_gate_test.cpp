#include "allocator/owner_gate.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace terrace {
namespace {

TEST(OwnerGate, FlagsKeepTheOwnerOutAsFarAsTheySay) {
  OwnerGate gate;
  gate.lower(OwnerGate::kFence);  // where this system has no membarrier
  ASSERT_TRUE(gate.enter());
  gate.leave();
  gate.raise(OwnerGate::kAttention);
  EXPECT_FALSE(gate.enter());
  EXPECT_TRUE(gate.enter_anyway());
  gate.leave();
  gate.raise(OwnerGate::kStop);
  EXPECT_FALSE(gate.enter_anyway());
  gate.await_owner();
  gate.lower(OwnerGate::kStop | OwnerGate::kAttention);
  EXPECT_TRUE(gate.enter());
  gate.leave();
}

// Plain variables on both sides: a breach is a lost update, and a report by the thread sanitizer.
TEST(OwnerGate, OwnerAndStopperAreNeverInsideTogether) {
  OwnerGate gate;
  std::atomic<bool> stop{false};
  std::uint64_t shared = 0, by_owner = 0, by_stopper = 0, refused = 0;
  std::jthread owner([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      if (gate.enter() || gate.enter_anyway()) {
        shared = shared + 1;
        gate.leave();
        ++by_owner;
      } else {
        ++refused;
        std::this_thread::yield();
      }
    }
  });
  for (; by_stopper < 3000; ++by_stopper) {
    gate.raise(OwnerGate::kStop);
    OwnerGate::barrier();
    gate.await_owner();
    shared = shared + 1;
    gate.lower(OwnerGate::kStop);
    if (by_stopper % 64 == 0) std::this_thread::yield();
  }
  stop = true;
  owner.join();
  EXPECT_EQ(shared, by_owner + by_stopper);
}

}  // namespace
}  // namespace terrace
