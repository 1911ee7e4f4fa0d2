// Random operations on the DDR pool against a simple model: blocks never overlap, keep their bytes, the
// budget holds, nothing leaks, whichever call fails and however many threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "allocator/ddr_pool.hpp"
#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr Bytes kBudget = 24_MiB;

// The live blocks by address, each with the byte that its ends and its middle hold.
class Model {
 public:
  void add(const Block& block, std::byte tag) {
    const auto next = live_.lower_bound(block.address);
    if (next != live_.end()) {
      EXPECT_LE(end_of(block), next->first);
    }
    if (next != live_.begin()) {
      EXPECT_LE(end_of(std::prev(next)->second.block), block.address);
    }
    mark(block, tag);
    live_.emplace(block.address, Entry{block, tag});
    bytes_ += block.size;
  }
  [[nodiscard]] Block take(std::size_t index) {
    const auto at = std::next(live_.begin(), static_cast<std::ptrdiff_t>(index % live_.size()));
    const Entry entry = at->second;
    live_.erase(at);
    bytes_ -= entry.block.size;
    if (const std::uint64_t size = entry.block.size.count(); size > 0) {
      for (const std::uint64_t offset : {std::uint64_t{0}, size / 2, size - 1})
        EXPECT_EQ(entry.block.address[offset], entry.tag);
    }
    return entry.block;
  }
  [[nodiscard]] std::size_t count() const { return live_.size(); }
  [[nodiscard]] Bytes bytes() const { return bytes_; }

 private:
  struct Entry {
    Block block;
    std::byte tag;
  };
  static Address end_of(const Block& block) { return block.address + block.size.count(); }
  static void mark(const Block& block, std::byte tag) {
    const std::uint64_t size = block.size.count();
    if (size == 0) return;
    for (const std::uint64_t offset : {std::uint64_t{0}, size / 2, size - 1}) block.address[offset] = tag;
  }
  std::map<Address, Entry> live_;
  Bytes bytes_;
};

Bytes random_size(std::mt19937& random) {
  switch (random() % 8) {
    case 0:
      return Bytes(random() % 3'000'000);
    case 1:
      return Bytes(1'000'000 + random() % 100'000);  // around the limit of small blocks
    default:
      return Bytes(random() % 40'000);
  }
}

// Every operation has its outcome checked against the model. Returns when all is freed and trimmed.
void churn(EmulatedDevice& device, std::mt19937& random, int operations) {
  const auto nothing = [](std::string_view) {};
  auto made = DdrPool::create(device, {.budget = kBudget, .slab = 512_KiB, .say = nothing});
  if (!made) return;
  DdrPool& pool = **made;
  Model model;
  Bytes budget = kBudget;
  for (int i = 0; i < operations; ++i) {
    const auto dice = random() % 100;
    if (dice < 55) {
      const Bytes size = random_size(random);
      const auto block = pool.allocate(size, static_cast<Pool>(random() % kPoolCount));
      if (!block) continue;
      EXPECT_EQ(block->size, size);
      model.add(*block, static_cast<std::byte>(random()));
    } else if (dice < 98 && model.count() > 0) {
      EXPECT_TRUE(pool.free(model.take(random())).ok());
    } else if (dice == 98) {
      budget = Bytes(kBudget.count() / (1 + random() % 3));
      const Bytes above = pool.set_budget(budget);
      EXPECT_EQ(above, saturating_sub(pool.usage().mapped, budget));
    } else {
      pool.trim();
    }
    const PoolUsage usage = pool.usage();
    EXPECT_LE(usage.mapped, kBudget);
    EXPECT_EQ(usage.mapped, device.pinned_bytes());
    EXPECT_GE(usage.live, model.bytes());
    EXPECT_LE(usage.live, usage.mapped);
  }
  while (model.count() > 0) EXPECT_TRUE(pool.free(model.take(0)).ok());
  EXPECT_EQ(pool.usage().live, 0_B);
  pool.trim();
  EXPECT_EQ(pool.usage().mapped, 0_B);
}

std::unique_ptr<EmulatedDevice> small_device() {
  return std::move(EmulatedDevice::create({.capacity = 1_MiB})).value();
}

TEST(DdrPoolModel, RandomUseAgreesWithTheModel) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    SCOPED_TRACE(seed);
    const auto device = small_device();
    std::mt19937 random(seed);
    churn(*device, random, 12'000);
    EXPECT_EQ(device->pinned_bytes(), 0_B);
  }
}

TEST(DdrPoolModel, WhicheverCallFailsNothingLeaks) {
  const auto device = small_device();
  for (std::uint64_t nth = 1;; ++nth) {
    SCOPED_TRACE(nth);
    std::mt19937 random(7);
    ScopedFaults faults(fail_call(nth));
    churn(*device, random, 120);
    EXPECT_EQ(device->pinned_bytes(), 0_B);
    if (!faults.fired()) break;
  }
}

TEST(DdrPoolModel, ThreadsShareOnePoolWhileItsBudgetChanges) {
  const auto device = small_device();
  {
    auto pool = std::move(DdrPool::create(*device, {.budget = kBudget, .slab = 1_MiB})).value();
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([&pool, t] {
        std::mt19937 random(t);
        Model model;
        for (int i = 0; i < 3'000; ++i) {
          if (random() % 2 == 0) {
            const auto block = pool->allocate(random_size(random), Pool::kActivation);
            if (block) model.add(*block, static_cast<std::byte>(random()));
          } else if (model.count() > 0) {
            EXPECT_TRUE(pool->free(model.take(random())).ok());
          }
        }
        while (model.count() > 0) EXPECT_TRUE(pool->free(model.take(0)).ok());
      });
    }
    for (int i = 0; i < 60; ++i) {
      pool->set_budget(i % 2 == 0 ? Bytes(kBudget.count() / 3) : kBudget);
      std::this_thread::yield();
    }
    threads.clear();
    pool->set_budget(0_B);
    EXPECT_EQ(pool->usage().mapped, 0_B);
  }
  EXPECT_EQ(device->pinned_bytes(), 0_B);
}

}  // namespace
}  // namespace terrace
