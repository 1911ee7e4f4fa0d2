#include "allocator/block_table.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "runtime/fault.hpp"

namespace terrace {
namespace {

// The table never touches the memory it speaks of: any range of addresses will do.
constexpr std::uintptr_t kBase = 1ULL << 40;
Address at_unit(std::uint64_t unit) { return reinterpret_cast<Address>(kBase + (unit << kUnitShift)); }

BlockTable make(Bytes size) {
  BlockTable table = std::move(BlockTable::create(at_unit(0), size)).value();
  EXPECT_TRUE(table.open(at_unit(0), size));
  return table;
}

BlockWord live(std::uint64_t units, std::uint64_t slack = 0) {
  return BlockWord::live(Bytes((units << kUnitShift) - slack), Pool::kExpert, TenantId{3});
}

TEST(BlockWord, KeepsEveryFieldApart) {
  const BlockWord word = BlockWord::live(BlockWord::kMostBytes, Pool::kScratch, TenantId{15});
  EXPECT_EQ(word.units(), BlockWord::kMostBytes / kUnit);
  EXPECT_EQ(word.size(), BlockWord::kMostBytes);
  EXPECT_EQ(word.pool(), Pool::kScratch);
  EXPECT_EQ(word.tenant().index, 15);
  EXPECT_EQ(word.state(), BlockWord::State::kLive);
  EXPECT_EQ(word.span(), BlockWord::kMostBytes);
  EXPECT_EQ(BlockWord().state(), BlockWord::State::kNone);
  EXPECT_EQ(BlockWord::cached(7).state(), BlockWord::State::kCached);
  EXPECT_EQ(BlockWord::cached(7).units(), 7U);
  EXPECT_EQ(BlockWord::live(513_B, Pool::kWeights, {}).span(), 1_KiB);
}

TEST(BlockTable, FindsABlockFromAnyAddressInside) {
  BlockTable table = make(1_MiB);
  table.place(at_unit(3), live(5, 100));
  EXPECT_FALSE(table.find(at_unit(3) - 1).has_value());
  EXPECT_EQ(table.find(at_unit(3))->address, at_unit(3));
  EXPECT_EQ(table.find(at_unit(8) - 1)->size, Bytes(5 * 512 - 100));
  EXPECT_EQ(table.find(at_unit(5) + 17)->pool, Pool::kExpert);
  EXPECT_FALSE(table.find(at_unit(8)).has_value());
  EXPECT_FALSE(table.find(at_unit(0) - 1).has_value());
  EXPECT_FALSE(table.find(at_unit(2048)).has_value());
  EXPECT_FALSE(table.find(nullptr).has_value());
  table.remove(at_unit(3));
  EXPECT_FALSE(table.find(at_unit(3)).has_value());
}

TEST(BlockTable, WhatWaitsInACacheIsNotFound) {
  BlockTable table = make(1_MiB);
  table.place(at_unit(0), live(4));
  table.place(at_unit(4), BlockWord::cached(4));
  EXPECT_FALSE(table.find(at_unit(5)).has_value());
  table.set_word(at_unit(4), live(4));
  EXPECT_EQ(table.find(at_unit(5))->address, at_unit(4));
}

TEST(BlockTable, AnswersOfMemoryThatWasNeverMapped) {
  BlockTable table = std::move(BlockTable::create(at_unit(0), 64_GiB)).value();
  ASSERT_TRUE(table.open(at_unit(0), 1_MiB));
  table.place(at_unit(7), live(1));
  EXPECT_FALSE(table.find(at_unit(100'000'000)).has_value());
  EXPECT_EQ(table.word_at(at_unit(100'000'000)).bits(), 0U);
}

// The start may lie any number of summary levels away.
TEST(BlockTable, FindsTheFarStartOfAHugeBlock) {
  constexpr std::uint64_t kUnits = 64ULL * 64 * 64 * 64;  // 8 GiB
  BlockTable table = make(Bytes(kUnits << kUnitShift));
  table.place(at_unit(1), live(kUnits - 1));
  for (const std::uint64_t unit : {std::uint64_t{1}, std::uint64_t{63}, std::uint64_t{64},
                                   std::uint64_t{4096}, std::uint64_t{262'144}, kUnits - 1}) {
    ASSERT_TRUE(table.find(at_unit(unit)).has_value()) << unit;
    EXPECT_EQ(table.find(at_unit(unit))->address, at_unit(1));
  }
  EXPECT_FALSE(table.find(at_unit(0)).has_value());
}

TEST(BlockTable, AgreesWithAMapOfBlocks) {
  constexpr std::uint64_t kUnits = 20'000;
  for (unsigned seed = 0; seed < 5; ++seed) {
    std::mt19937 random(seed);
    BlockTable table = make(Bytes(kUnits << kUnitShift));
    std::map<std::uint64_t, std::uint64_t> blocks;  // start to units
    for (int i = 0; i < 20'000; ++i) {
      const std::uint64_t unit = random() % kUnits;
      auto next = blocks.upper_bound(unit);
      const bool inside = next != blocks.begin() && unit < std::prev(next)->first + std::prev(next)->second;
      const auto found = table.find(at_unit(unit) + random() % 512);
      ASSERT_EQ(found.has_value(), inside) << "seed " << seed << " step " << i;
      if (inside) {
        ASSERT_EQ(found->address, at_unit(std::prev(next)->first));
        if (random() % 2 == 0) {
          table.remove(found->address);
          blocks.erase(std::prev(next));
        }
      } else {
        const std::uint64_t room = (next == blocks.end() ? kUnits : next->first) - unit;
        const std::uint64_t units =
            1 + random() % std::min<std::uint64_t>(room, random() % 8 == 0 ? 5000 : 30);
        table.place(at_unit(unit), live(units));
        blocks.emplace(unit, units);
      }
    }
  }
}

TEST(BlockTable, ReadersSeeWholeBlocksWhileOthersComeAndGo) {
  constexpr std::uint64_t kUnits = 64ULL * 64 * 4;
  BlockTable table = make(Bytes(kUnits << kUnitShift));
  // Every fourth unit belongs to blocks that stay: two units of each eight.
  for (std::uint64_t unit = 0; unit < kUnits; unit += 8) table.place(at_unit(unit), live(2));
  std::atomic<bool> stop{false};
  std::vector<std::jthread> readers;
  for (unsigned reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&, reader] {
      std::mt19937 random(reader);
      while (!stop.load()) {
        const std::uint64_t unit = random() % kUnits;
        const auto found = table.find(at_unit(unit));
        if (unit % 8 < 2) {
          ASSERT_TRUE(found.has_value()) << "a block that stays is always found";
          ASSERT_EQ(found->address, at_unit(unit / 8 * 8));
        } else if (found) {
          ASSERT_EQ(found->address, at_unit(unit / 8 * 8 + 2));
          ASSERT_GT(found->size, Bytes((unit % 8 - 2) << kUnitShift)) << "it holds the address";
        }
      }
    });
  }
  std::mt19937 random(99);
  std::vector<bool> there(kUnits / 8);
  for (int i = 0; i < 200'000; ++i) {
    const std::size_t at = random() % there.size();
    if (there[at]) {
      table.remove(at_unit(at * 8 + 2));
    } else {
      table.place(at_unit(at * 8 + 2), live(1 + random() % 6));
    }
    there[at] = !there[at];
  }
  stop = true;
}

TEST(BlockTable, RefusedAddressSpaceIsAnError) {
  for (std::uint64_t nth = 1;; ++nth) {
    ScopedFaults faults(fail_call(FaultPoint::kHostMap, nth));
    auto table = BlockTable::create(at_unit(0), 64_MiB);
    const bool opened = table.ok() && table->open(at_unit(0), 1_MiB).ok();
    EXPECT_EQ(opened, !faults.fired());
    if (!table) {
      EXPECT_EQ(table.error().code, Errc::kOutOfMemory);
    }
    if (!faults.fired()) break;
    ASSERT_LT(nth, 50U);
  }
}

}  // namespace
}  // namespace terrace
