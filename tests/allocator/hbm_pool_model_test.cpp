// Random operations against a simple model: contents survive, blocks never overlap, the budget holds, nothing
// leaks, whichever call fails.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

#include "allocator/hbm_pool.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr Bytes kBudget = 4_MiB;

struct Tagged {
  Block block;
  std::uint8_t tag;
};

void expect_filled(const Tagged& held) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(held.block.address);
  const std::uint64_t size = held.block.size.count();
  EXPECT_EQ(bytes[0], held.tag);
  EXPECT_EQ(bytes[size - 1], held.tag);
  EXPECT_EQ(bytes[size / 2], held.tag);
}

// Allocates, fills, checks, frees. Returns the largest physical use seen.
void churn(Device& device, std::mt19937& random, int operations) {
  auto stream = device.create_stream(StreamPriority::kNormal);
  if (!stream) return;
  auto pool = HbmPool::create(device, {.budget = kBudget, .chunk = 256_KiB});
  if (pool) {
    std::vector<Tagged> live;
    for (int i = 0; i < operations; ++i) {
      if (live.empty() || random() % 5 < 3) {
        const Bytes size(1 + random() % (random() % 4 == 0 ? 900'000 : 40'000));
        const auto kind = static_cast<Pool>(random() % kPoolCount);
        auto block = (*pool)->allocate(*stream, size, kind);
        if (!block) continue;
        const auto tag = static_cast<std::uint8_t>(random());
        EXPECT_TRUE(device.synchronize(*stream));
        std::memset(block->address, tag, size.count());
        live.push_back({*block, tag});
      } else {
        const std::size_t at = random() % live.size();
        expect_filled(live[at]);
        (*pool)->free(*stream, live[at].block);
        live[at] = live.back();
        live.pop_back();
      }
      if (random() % 50 == 0) (*pool)->trim();
      EXPECT_LE((*pool)->usage().mapped, kBudget);
    }
    for (const Tagged& held : live) {
      expect_filled(held);
      (*pool)->free(*stream, held.block);
    }
    EXPECT_EQ((*pool)->usage().live, 0_B);
    (*pool).reset();  // before the stream it waits for
  }
  device.destroy_stream(*stream);
}

TEST(HbmPoolModel, KeepsEveryByteThroughRandomUse) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    auto device = std::move(open_emulated_device({.capacity = 16_MiB})).value();
    std::mt19937 random(seed);
    churn(*device, random, 1500);
    EXPECT_EQ(device->memory()->free, device->memory()->total) << "seed " << seed;
  }
}

TEST(HbmPoolModel, LeaksNothingWhicheverCallFails) {
  for (std::uint64_t nth = 1;; ++nth) {
    auto device = std::move(open_emulated_device({.capacity = 16_MiB})).value();
    std::mt19937 random(7);
    bool fired = false;
    {
      FaultPlan plan = fail_call(nth);
      ScopedFaults faults(plan);
      churn(*device, random, 60);
      fired = faults.fired();
    }
    EXPECT_EQ(device->memory()->free, device->memory()->total) << "after failing call " << nth;
    if (!fired) break;
    ASSERT_LT(nth, 5000U);
  }
}

}  // namespace
}  // namespace terrace
