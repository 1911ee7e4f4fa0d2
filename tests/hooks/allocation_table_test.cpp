#include "hooks/intercept/allocation_table.hpp"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace terrace::hooks {
namespace {

TEST(AllocationTable, GivesBackWhatWasPut) {
  const auto table = std::make_unique<AllocationTable>();
  EXPECT_FALSE(table->take(key_of_address(0x1000)).has_value());
  EXPECT_TRUE(table->put(key_of_address(0x1000), {TierId::kHbm, 5_KiB}).kept);
  EXPECT_TRUE(table->put(key_of_handle(0x1000), {TierId::kDdr, 7_KiB}).kept);
  const auto address = table->take(key_of_address(0x1000));
  ASSERT_TRUE(address.has_value());
  EXPECT_EQ(address->size, 5_KiB);
  EXPECT_EQ(address->tier, TierId::kHbm);
  EXPECT_FALSE(table->take(key_of_address(0x1000)).has_value());
  EXPECT_EQ(table->take(key_of_handle(0x1000))->tier, TierId::kDdr);
}

TEST(AllocationTable, TheNullAddressIsNeverKept) {
  const auto table = std::make_unique<AllocationTable>();
  EXPECT_FALSE(table->put(AllocationKey{}, {TierId::kHbm, 1_KiB}).kept);
  EXPECT_FALSE(table->take(AllocationKey{}).has_value());
}

TEST(AllocationTable, AKeyPutAgainReplacesItsOldValue) {
  const auto table = std::make_unique<AllocationTable>();
  (void)table->put(key_of_address(64), {TierId::kHbm, 1_KiB});
  const auto put = table->put(key_of_address(64), {TierId::kDdr, 2_KiB});
  EXPECT_TRUE(put.kept);
  ASSERT_TRUE(put.replaced.has_value());
  EXPECT_EQ(put.replaced->size, 1_KiB);
  EXPECT_EQ(table->take(key_of_address(64))->size, 2_KiB);
  EXPECT_FALSE(table->take(key_of_address(64)).has_value());
}

TEST(AllocationTable, WhenFullItRefusesAndKeepsTheRest) {
  const auto table = std::make_unique<AllocationTable>();
  const std::size_t asked = 2 * AllocationTable::kShards * AllocationTable::kSlotsPerShard;
  std::vector<bool> kept(asked);
  std::size_t count = 0;
  for (std::size_t i = 0; i < asked; ++i) {
    kept[i] = table->put(key_of_address((i + 1) << 9), {TierId::kHbm, Bytes(i)}).kept;
    count += kept[i] ? 1 : 0;
  }
  EXPECT_LT(count, AllocationTable::kShards * AllocationTable::kSlotsPerShard);
  EXPECT_GT(count, asked / 4);
  for (std::size_t i = 0; i < asked; ++i) {
    const auto taken = table->take(key_of_address((i + 1) << 9));
    ASSERT_EQ(taken.has_value(), kept[i]) << i;
    if (taken) {
      ASSERT_EQ(taken->size, Bytes(i));
    }
  }
}

// Against a map, with keys so few that probe chains form, break and close.
TEST(AllocationTable, BehavesAsAMap) {
  for (unsigned seed = 1; seed <= 4; ++seed) {
    std::mt19937_64 random(seed);
    const auto table = std::make_unique<AllocationTable>();
    std::map<std::uint64_t, std::uint64_t> model;
    for (int step = 0; step < 100000; ++step) {
      const std::uint64_t key = (random() % 90000 + 1) * 512;
      if (random() % 5 < 3) {
        const std::uint64_t size = random() % 1000;
        const auto put = table->put(key_of_address(key), {TierId::kHbm, Bytes(size)});
        ASSERT_TRUE(put.kept);
        ASSERT_EQ(put.replaced.has_value(), model.count(key) == 1);
        model[key] = size;
      } else {
        const auto taken = table->take(key_of_address(key));
        const auto known = model.find(key);
        ASSERT_EQ(taken.has_value(), known != model.end());
        if (taken) {
          ASSERT_EQ(taken->size, Bytes(known->second));
          model.erase(known);
        }
      }
    }
    table->clear_in_child();
    for (const auto& [key, size] : model) ASSERT_FALSE(table->take(key_of_address(key)).has_value());
  }
}

TEST(AllocationTable, ThreadsShareIt) {
  const auto table = std::make_unique<AllocationTable>();
  std::vector<std::thread> threads;
  std::vector<int> lost(4);
  for (std::size_t t = 0; t < lost.size(); ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 5000; ++i) {
        const AllocationKey key = key_of_address(((i % 50) * 4 + t + 1) << 8);
        (void)table->put(key, {TierId::kHbm, Bytes(i)});
        const auto taken = table->take(key);
        lost[t] += !taken || taken->size != Bytes(i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lost, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace terrace::hooks
