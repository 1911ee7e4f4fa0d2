// Random operations against a simple model: contents survive, blocks never overlap, the budget holds, nothing
// leaks, whichever call fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "allocator/hbm_pool.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr Bytes kBudget = 4_MiB;
// So fine that chunks of several sizes are mapped and moved.
constexpr Bytes kGranularity = 4_KiB;

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
        EXPECT_TRUE((*pool)->free(*stream, live[at].block));
        live[at] = live.back();
        live.pop_back();
      }
      if (random() % 50 == 0) (*pool)->trim();
      EXPECT_LE((*pool)->usage().mapped, kBudget);
    }
    for (const Tagged& held : live) {
      expect_filled(held);
      EXPECT_TRUE((*pool)->free(*stream, held.block));
    }
    EXPECT_EQ((*pool)->usage().live, 0_B);
    (*pool).reset();  // before the stream it waits for
  }
  device.destroy_stream(*stream);
}

TEST(HbmPoolModel, KeepsEveryByteThroughRandomUse) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    auto device = std::move(open_emulated_device({.capacity = 16_MiB, .granularity = kGranularity})).value();
    std::mt19937 random(seed);
    churn(*device, random, 1500);
    EXPECT_EQ(device->memory()->free, device->memory()->total) << "seed " << seed;
  }
}

// A million operations against the simplest allocator there is: a map of what is live.
class Reference {
 public:
  void add(const Block& block) {
    const Bytes span = round_up(std::max(block.size, 1_B), 512_B);
    const auto next = blocks_.lower_bound(block.address);
    ASSERT_TRUE(next == blocks_.end() || block.address + span.count() <= next->first) << "overlap";
    ASSERT_TRUE(next == blocks_.begin() || end_of(*std::prev(next)) <= block.address) << "overlap";
    blocks_.emplace_hint(next, block.address, Kept{block, span});
    live_ += span;
    by_pool_[static_cast<std::size_t>(block.pool)] += span;
    watermark_ = std::max(watermark_, live_);
  }
  void remove(Address address) {
    const auto it = blocks_.find(address);
    live_ -= it->second.span;
    by_pool_[static_cast<std::size_t>(it->second.block.pool)] -= it->second.span;
    blocks_.erase(it);
  }
  [[nodiscard]] const Block* find(Address address) const {
    const auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin() || end_of(*std::prev(next)) <= address) return nullptr;
    return &std::prev(next)->second.block;
  }
  void expect_same(const PoolUsage& usage) const {
    ASSERT_EQ(usage.live, live_);
    ASSERT_EQ(usage.live_by_pool, by_pool_);
    ASSERT_LE(usage.mapped, usage.budget);
  }
  Bytes take_watermark() { return std::exchange(watermark_, live_); }

 private:
  struct Kept {
    Block block;
    Bytes span;
  };
  static Address end_of(const std::pair<const Address, Kept>& kept) {
    return kept.first + kept.second.span.count();
  }
  std::map<Address, Kept> blocks_;
  Bytes live_, watermark_;
  std::array<Bytes, kPoolCount> by_pool_{};
};

class MillionOperations {
 public:
  explicit MillionOperations(std::uint64_t seed) : random_(seed) {
    for (Stream& stream : streams_) stream = *device_->create_stream(StreamPriority::kNormal);
    pool_ = std::move(HbmPool::create(*device_, {.budget = 64_MiB, .chunk = 256_KiB})).value();
  }
  ~MillionOperations() {
    while (!blocks_.empty()) free_one();
    EXPECT_EQ(pool_->usage().live, 0_B);
    pool_.reset();
    for (const Stream stream : streams_) device_->destroy_stream(stream);
    EXPECT_EQ(device_->memory()->free, device_->memory()->total);
  }

  void step(int i) {
    const std::uint64_t kind = random_() % 1000;
    // Fills and empties in waves, so that caches, growth, the wall and refusals all have their turn.
    const bool filling = i / 20'000 % 2 == 0;
    if (kind < (filling ? 520U : 430U)) {
      allocate_one();
    } else if (kind < 950) {
      if (!blocks_.empty()) free_one();
    } else if (kind < 980) {
      look_up();
    } else if (kind < 995) {
      free_badly();
    } else if (kind < 998) {
      ASSERT_EQ(pool_->take_watermark(), reference_.take_watermark());
    } else {
      reference_.expect_same(pool_->usage());
    }
    if (i % 50'000 == 0) check_whole();
  }

 private:
  Stream any_stream() { return streams_[random_() % streams_.size()]; }
  Bytes any_size() {
    switch (random_() % 8) {
      case 0:
        return Bytes(random_() % 700'000);
      case 1:
        return Bytes(random_() % 100'000);
      default:
        return Bytes(random_() % 9'000);
    }
  }
  void allocate_one() {
    const Bytes size = any_size();
    const auto kind = static_cast<Pool>(random_() % kPoolCount);
    const auto block = pool_->allocate(any_stream(), size, kind);
    if (!block) {
      ASSERT_EQ(block.error().code, Errc::kOutOfBudget);
      ASSERT_GT(pool_->usage().live + size, 32_MiB) << "half of the budget is never refused";
      for (int i = 0; i < 200 && !blocks_.empty(); ++i) free_one();
      return;
    }
    ASSERT_EQ(block->size, size);
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(block->address) % 512, 0U);
    reference_.add(*block);
    blocks_.push_back(*block);
  }
  void free_one() {
    std::swap(blocks_[random_() % blocks_.size()], blocks_.back());
    const Block block = blocks_.back();
    blocks_.pop_back();
    reference_.remove(block.address);
    ASSERT_TRUE(random_() % 16 == 0 ? pool_->free_completed(block) : pool_->free(any_stream(), block));
    last_freed_ = block;
  }
  void look_up() {
    const Address at = blocks_.empty() ? last_freed_.address
                                       : blocks_[random_() % blocks_.size()].address + random_() % 100'000;
    const Block* expected = reference_.find(at);
    const auto found = pool_->find(at);
    ASSERT_EQ(found.has_value(), expected != nullptr);
    if (expected == nullptr) return;
    ASSERT_EQ(found->address, expected->address);
    ASSERT_EQ(found->size, std::max(expected->size, 1_B));
    ASSERT_EQ(found->pool, expected->pool);
  }
  void free_badly() {
    if (reference_.find(last_freed_.address) == nullptr) {
      ASSERT_FALSE(pool_->free(any_stream(), last_freed_)) << "freed twice";
    }
    if (!blocks_.empty()) {
      Block inside = blocks_.back();
      inside.address += 1 + random_() % 511;
      ASSERT_FALSE(pool_->free(any_stream(), inside)) << "an interior pointer";
    }
  }
  void check_whole() {
    const auto walked = pool_->walk();
    ASSERT_TRUE(walked) << walked.error().text;
    ASSERT_EQ(walked->live_blocks, blocks_.size());
    if (random_() % 2 == 0) pool_->trim();
  }

  std::unique_ptr<Device> device_ =
      std::move(open_emulated_device({.capacity = 96_MiB, .granularity = kGranularity})).value();
  std::array<Stream, 3> streams_;
  std::unique_ptr<HbmPool> pool_;
  std::mt19937_64 random_;
  Reference reference_;
  std::vector<Block> blocks_;
  Block last_freed_;
};

TEST(HbmPoolModel, AgreesWithASimpleAllocatorOverAMillionOperations) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    MillionOperations model(seed);
    for (int i = 0; i < 250'000; ++i) {
      model.step(i);
      if (testing::Test::HasFatalFailure()) FAIL() << "operation " << i;
    }
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
