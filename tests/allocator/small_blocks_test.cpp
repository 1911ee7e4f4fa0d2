#include "allocator/small_blocks.hpp"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "runtime/fault.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace terrace {
namespace {

// Mapped memory with a budget, which knows what is taken.
class Budgeted final : public SmallBlockSource {
 public:
  explicit Budgeted(Bytes budget) : budget_(budget) {}
  ~Budgeted() override { EXPECT_TRUE(taken_.empty()) << "an area was not given back"; }

  Result<Address> take(Bytes size) override {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(round_down(size, 4_KiB), size);
    ++takes_;
    if (total_ + size > budget_) return out_of_budget(size, Pool::kScratch, "the test's budget is out");
    void* memory = mmap(nullptr, size.count(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return Error{Errc::kOutOfMemory, "mmap", size, {}};
    std::memset(memory, 0xA5, size.count());
    taken_.emplace(static_cast<Address>(memory), size);
    total_ += size;
    return static_cast<Address>(memory);
  }
  void give(Address address, Bytes size) override {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(address);
    ASSERT_TRUE(found != taken_.end() && found->second == size) << "given in other pieces than taken";
    taken_.erase(found);
    total_ -= size;
    EXPECT_EQ(munmap(address, size.count()), 0);
  }

  void set_budget(Bytes budget) {
    const std::lock_guard lock(mutex_);
    budget_ = budget;
  }
  [[nodiscard]] Bytes total() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }
  [[nodiscard]] int takes() const {
    const std::lock_guard lock(mutex_);
    return takes_;
  }
  [[nodiscard]] bool holds(Address block, Bytes span) const {
    const std::lock_guard lock(mutex_);
    auto area = taken_.upper_bound(block);
    if (area == taken_.begin()) return false;
    --area;
    return block + span.count() <= area->first + area->second.count();
  }
  [[nodiscard]] std::map<Address, Bytes> taken() const {
    const std::lock_guard lock(mutex_);
    return taken_;
  }

 private:
  mutable std::mutex mutex_;
  Bytes budget_;
  Bytes total_;
  int takes_ = 0;
  std::map<Address, Bytes> taken_;
};

std::unique_ptr<SmallBlocks> make(SmallBlockSource& source, Bytes area = 2_MiB) {
  return std::move(SmallBlocks::create(source, {.area = area})).value();
}

// Runs `work` on a thread that ends before this returns.
void on_a_thread(const std::function<void()>& work) { std::thread(work).join(); }

TEST(SmallBlocks, BlocksLieInTheSourceApartFromEachOther) {
  Budgeted source(64_MiB);
  auto small = make(source);
  std::map<Address, Bytes> blocks;
  for (std::uint64_t size = 0; size < kSmallBlockLimit.count(); size = size * 5 / 4 + 1) {
    for (int i = 0; i < 3; ++i) {
      const Address block = *small->allocate(Bytes(size));
      const Bytes span = small->span_at(block);
      EXPECT_GE(span, Bytes(size));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 64, 0U);
      EXPECT_TRUE(source.holds(block, span));
      std::memset(block, 7, span.count());
      blocks.emplace(block, span);
    }
  }
  Address end = nullptr;
  for (const auto& [block, span] : blocks) {
    EXPECT_GE(block, end);
    end = block + span.count();
  }
  for (const auto& [block, span] : blocks) small->free(block);
}

TEST(SmallBlocks, TheSpanIsKnownBeforeAndWastesAQuarterAtMost) {
  Budgeted source(64_MiB);
  auto small = make(source);
  for (std::uint64_t size = 0; size < kSmallBlockLimit.count(); size += size < 20'000 ? 1 : 997) {
    const Bytes span = SmallBlocks::span_of(Bytes(size));
    ASSERT_LE(span.count(), std::max(size + size / 4, size + 64)) << size;
    const Address block = *small->allocate(Bytes(size));
    ASSERT_EQ(small->span_at(block), span) << size;
    ASSERT_EQ(small->usage().live, span);
    small->free(block);
  }
  EXPECT_EQ(SmallBlocks::span_of(kSmallBlockLimit - 1_B), kSmallBlockLimit);
}

TEST(SmallBlocks, RefusesWhatIsNotSmall) {
  Budgeted source(64_MiB);
  auto small = make(source);
  EXPECT_EQ(small->allocate(kSmallBlockLimit).error().code, Errc::kInvalidArgument);
  EXPECT_EQ(small->allocate(Bytes(~std::uint64_t{0})).error().code, Errc::kInvalidArgument);
  EXPECT_EQ(source.takes(), 0);
  for (const Bytes area : {0_B, 1_B, 4_KiB + 1_B}) {
    EXPECT_EQ(SmallBlocks::create(source, {.area = area}).error().code, Errc::kInvalidArgument);
  }
}

// jemalloc's own tables would take a part of the area.
TEST(SmallBlocks, TheSourceHoldsBlocksOnly) {
  Budgeted source(1_MiB);
  auto small = make(source, 1_MiB);
  std::vector<Address> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(*small->allocate(256_KiB));
  EXPECT_EQ(small->usage().live, 1_MiB);
  EXPECT_EQ(small->usage().held, 1_MiB);
  for (const Address block : blocks) small->free(block);
}

TEST(SmallBlocks, FreedMemoryServesAgainWithoutTheSource) {
  Budgeted source(64_MiB);
  auto small = make(source);
  for (const Bytes size : {100_B, 5_KiB, 40_KiB, 700_KiB}) {
    small->free(*small->allocate(size));
    const int takes = source.takes();
    for (int i = 0; i < 1000; ++i) small->free(*small->allocate(size));
    EXPECT_EQ(source.takes(), takes);
  }
}

TEST(SmallBlocks, PurgeGivesBackWhatIsFreeAndLeavesTheRest) {
  Budgeted source(64_MiB);
  auto small = make(source);
  std::vector<Address> blocks;
  for (int i = 0; i < 3000; ++i) blocks.push_back(*small->allocate(Bytes(1 + i % 9000)));
  const Address kept = blocks[blocks.size() / 2];
  const Bytes kept_size(1 + (blocks.size() / 2) % 9000);
  std::memset(kept, 42, kept_size.count());
  for (const Address block : blocks) {
    if (block != kept) small->free(block);
  }
  const Bytes held = small->usage().held;
  EXPECT_EQ(source.total(), held) << "nothing goes back unasked";
  const Bytes given = small->purge();
  EXPECT_EQ(source.total(), 2_MiB) << "one area is in use";
  EXPECT_EQ(given, held - 2_MiB);
  for (std::uint64_t i = 0; i < kept_size.count(); ++i) ASSERT_EQ(std::to_integer<int>(kept[i]), 42);
  small->free(kept);
  EXPECT_EQ(small->purge(), 2_MiB);
  EXPECT_EQ(small->usage().held, 0_B);
  EXPECT_EQ(small->usage().live, 0_B);
  small->free(*small->allocate(1_KiB));  // and takes anew
}

TEST(SmallBlocks, PagesStayInPlaceWhenTheirBlocksAreFreed) {
  Budgeted source(64_MiB);
  auto small = make(source);
  const Address kept = *small->allocate(64_B);
  std::vector<Address> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(*small->allocate(90_KiB));
  for (const Address block : blocks) small->free(block);
  small->purge();
  for (const auto& [area, size] : source.taken()) {
    std::vector<unsigned char> resident(size / 4_KiB);
    ASSERT_EQ(mincore(area, size.count(), resident.data()), 0);
    EXPECT_TRUE(
        std::all_of(resident.begin(), resident.end(), [](unsigned char page) { return (page & 1) != 0; }));
  }
  small->free(kept);
}

TEST(SmallBlocks, TheSourcesRefusalIsTheAnswer) {
  Budgeted source(4_MiB);
  auto small = make(source);
  std::vector<Address> blocks;
  std::optional<Error> refused;
  while (!refused) {
    auto block = small->allocate(30_KiB);
    if (block) {
      blocks.push_back(*block);
    } else {
      refused = block.error();
    }
  }
  EXPECT_EQ(refused->code, Errc::kOutOfBudget);
  EXPECT_EQ(refused->text, "the test's budget is out");
  EXPECT_GE(blocks.size(), 4_MiB / SmallBlocks::span_of(30_KiB) - 2);
  EXPECT_EQ(small->usage().live, SmallBlocks::span_of(30_KiB) * blocks.size());
  small->free(blocks.back());
  blocks.back() = *small->allocate(30_KiB);
  for (const Address block : blocks) small->free(block);
}

TEST(SmallBlocks, WhereNoAreaIsToBeHadAPieceIs) {
  Budgeted source(16_KiB);
  auto small = make(source);
  const Address block = *small->allocate(16_KiB);
  EXPECT_EQ(source.total(), 16_KiB);
  small->free(block);
}

#if defined(__SANITIZE_ADDRESS__)
TEST(SmallBlocks, AUseAfterFreeIsSeenByTheAddressSanitizer) {
  Budgeted source(64_MiB);
  auto small = make(source);
  const Address block = *small->allocate(100_B);
  EXPECT_EQ(__asan_region_is_poisoned(block, small->span_at(block).count()), nullptr);
  small->free(block);
  EXPECT_EQ(__asan_region_is_poisoned(block, 100), block);
}
#endif

// Freed in one size, the memory serves any other before the source is said to be out.
TEST(SmallBlocks, MemoryChangesItsSizeClassUnderPressure) {
  Budgeted source(2_MiB);
  auto small = make(source);
  for (const Bytes size : {64_B, 1_KiB, 14_KiB, 32_KiB, 500_KiB, 64_B}) {
    std::vector<Address> blocks;
    while (auto block = small->allocate(size)) blocks.push_back(*block);
    EXPECT_GE(size * blocks.size(), 2_MiB * 3 / 4) << format_bytes(size);
    for (const Address block : blocks) small->free(block);
  }
}

TEST(SmallBlocks, WhatAnotherThreadKeepsIsHadUnderPressure) {
  Budgeted source(1_MiB);
  auto small = make(source, 1_MiB);
  std::barrier step(2);
  std::thread keeper([&] {
    std::vector<Address> blocks;
    while (auto block = small->allocate(8_KiB)) blocks.push_back(*block);
    for (const Address block : blocks) small->free(block);
    step.arrive_and_wait();
    step.arrive_and_wait();  // alive, with its blocks for reuse, while the other asks
    small->free(*small->allocate(8_KiB));
  });
  step.arrive_and_wait();
  auto block = small->allocate(900_KiB);
  EXPECT_TRUE(block.ok());
  if (block) small->free(*block);
  step.arrive_and_wait();
  keeper.join();
  EXPECT_EQ(small->usage().live, 0_B);
}

TEST(SmallBlocks, AThreadThatEndsLeavesNothingBehind) {
  Budgeted source(64_MiB);
  auto small = make(source);
  for (int i = 0; i < 200; ++i) {
    on_a_thread([&] {
      std::array<Address, 50> blocks{};
      for (Address& block : blocks) block = *small->allocate(3_KiB);
      for (const Address block : blocks) small->free(block);
    });
  }
  EXPECT_EQ(source.total(), 2_MiB) << "each thread reuses what the one before it freed";
  small->purge();
  EXPECT_EQ(source.total(), 0_B);
}

TEST(SmallBlocks, WhatAnEndedThreadKeptServesTheOthers) {
  Budgeted source(64_MiB);
  auto small = make(source, 256_KiB);
  auto churn_once = [&] {
    std::array<Address, 16> blocks{};
    for (Address& block : blocks) block = *small->allocate(8_KiB);
    for (const Address block : blocks) small->free(block);
  };
  small->free(*small->allocate(64_B));  // this thread has a cache of its own
  on_a_thread(churn_once);
  churn_once();
  EXPECT_EQ(source.takes(), 1);
}

TEST(SmallBlocks, AThreadMayOutliveThem) {
  Budgeted source(64_MiB);
  auto first = make(source);
  auto second = make(source);
  std::barrier step(2);
  std::thread thread([&] {
    first->free(*first->allocate(100_B));
    second->free(*second->allocate(100_B));
    step.arrive_and_wait();
    step.arrive_and_wait();
    second->free(*second->allocate(100_B));
  });
  step.arrive_and_wait();
  first.reset();
  EXPECT_EQ(source.total(), 2_MiB);
  auto third = make(source);  // may get the arena and the caches of the first
  third->free(*third->allocate(100_B));
  step.arrive_and_wait();
  thread.join();
  second.reset();
  third.reset();
  EXPECT_EQ(source.total(), 0_B);
}

struct LastBreath {
  SmallBlocks* small;
  Address block;
};

// Destructors of thread-specific data run after those of thread_local objects, the caches' table among them.
TEST(SmallBlocks, ServesAThreadOnItsWayOut) {
  Budgeted source(64_MiB);
  auto small = make(source);
  pthread_key_t key{};
  ASSERT_EQ(pthread_key_create(&key,
                               [](void* argument) {
                                 auto* last = static_cast<LastBreath*>(argument);
                                 last->small->free(last->block);
                                 const Address block = *last->small->allocate(300_B);
                                 std::memset(block, 1, 300);
                                 last->small->free(block);
                               }),
            0);
  LastBreath last{small.get(), nullptr};
  on_a_thread([&] {
    last.block = *small->allocate(200_B);
    ASSERT_EQ(pthread_setspecific(key, &last), 0);
  });
  pthread_key_delete(key);
  EXPECT_EQ(small->usage().live, 0_B);
  small->purge();
  EXPECT_EQ(source.total(), 0_B);
}

// What a block's owner wrote in its first and last byte.
struct Tagged {
  Address block = nullptr;
  Bytes size;
  unsigned char tag = 0;

  void write() const {
    block[0] = std::byte{tag};
    block[size.count() - 1] = std::byte{tag};
  }
  [[nodiscard]] bool intact() const {
    return block[0] == std::byte{tag} && block[size.count() - 1] == std::byte{tag};
  }
};

Bytes random_size(std::mt19937& random) {
  const std::uint64_t most = std::uint64_t{64} << random() % 14;  // up to 512 KiB, small ones more often
  return Bytes(1 + random() % most);
}

// Blocks travel: what one thread allocates, another frees.
TEST(SmallBlocks, ManyThreadsShareThem) {
  Budgeted source(256_MiB);
  auto small = make(source);
  std::mutex mutex;
  std::vector<Tagged> shelf;
  std::atomic<int> broken{0};
  auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 8000; ++i) {
      Tagged mine{nullptr, random_size(random), static_cast<unsigned char>(random())};
      auto block = small->allocate(mine.size);
      if (!block) {
        ++broken;
        return;
      }
      mine.block = *block;
      mine.write();
      {
        const std::lock_guard lock(mutex);
        shelf.push_back(mine);
        if (shelf.size() < 64) continue;
        std::swap(shelf[random() % shelf.size()], shelf.back());
        mine = shelf.back();
        shelf.pop_back();
      }
      if (!mine.intact()) ++broken;
      small->free(mine.block);
      if (seed == 1 && i % 1000 == 0) small->purge();
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 6; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  for (const Tagged& left : shelf) {
    EXPECT_TRUE(left.intact());
    small->free(left.block);
  }
  EXPECT_EQ(broken, 0);
  EXPECT_EQ(small->usage().live, 0_B);
  small->purge();
  EXPECT_EQ(source.total(), 0_B);
}

void churn(SmallBlocks& small) {
  std::vector<Address> blocks;
  for (const Bytes size : {64_B, 3_KiB, 20_KiB, 200_KiB, 900_KiB, 900_KiB, 900_KiB, 10_B}) {
    if (auto block = small.allocate(size)) {
      std::memset(*block, 3, size.count());
      blocks.push_back(*block);
    }
  }
  on_a_thread([&] {
    if (auto block = small.allocate(1_KiB)) small.free(*block);
  });
  for (const Address block : blocks) small.free(block);
  small.purge();
}

TEST(SmallBlocks, EveryFaultIsAValueAndLeavesNothingBehind) {
  for (const std::uint64_t repeat : {1, 2, 5, 1000}) {
    bool fired = true;
    for (std::uint64_t nth = 1; fired; ++nth) {
      Budgeted source(64_MiB);
      ScopedFaults faults({.nth = nth, .only = {}, .repeat = repeat});
      auto small = SmallBlocks::create(source, {});
      if (small) {
        churn(**small);
        EXPECT_EQ((*small)->usage().live, 0_B);
        EXPECT_EQ((*small)->usage().held, 0_B);
        EXPECT_EQ(source.total(), 0_B);
      } else {
        EXPECT_EQ(small.error().code, Errc::kOutOfMemory);
      }
      fired = faults.fired();
    }
  }
}

TEST(SmallBlocks, EachFaultPointIsReached) {
  for (const FaultPoint point :
       {FaultPoint::kSmallBlocksArena, FaultPoint::kSmallBlocksCache, FaultPoint::kSmallBlocksTake}) {
    Budgeted source(64_MiB);
    ScopedFaults faults(fail_call(point, 1));
    auto small = SmallBlocks::create(source, {});
    if (small) churn(**small);
    EXPECT_TRUE(faults.fired()) << name_of(point);
  }
  Budgeted source(64_MiB);
  auto small = make(source);
  const ScopedFaults faults({.nth = 1, .only = FaultPoint::kSmallBlocksTake, .repeat = 2});
  const auto refused = small->allocate(100_B);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kOutOfMemory);
  EXPECT_EQ(refused.error().bytes, 4_KiB) << "the second request is for what is needed";
}

// The reference: a map of live blocks, each with its bytes.
class Model {
 public:
  explicit Model(unsigned seed)
      : random_(seed), source_(6_MiB), small_(make(source_, Bytes(4096 << seed % 10))) {}
  ~Model() {
    for (const auto& [block, tagged] : live_) small_->free(block);
    EXPECT_EQ(small_->usage().live, 0_B);
    small_->purge();
    EXPECT_EQ(source_.total(), 0_B);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  void step() {
    const auto kind = random_() % 1000;
    if (kind < 2) {
      source_.set_budget(Bytes((random_() % 8) << 20));
    } else if (kind < 4) {
      const Bytes before = source_.total();
      const Bytes given = small_->purge();
      EXPECT_EQ(given, before - source_.total());
    } else if (kind < 480 && !live_.empty()) {
      free_one();
    } else {
      allocate_one();
    }
    ASSERT_EQ(small_->usage().live, live_bytes_);
    ASSERT_EQ(small_->usage().held, source_.total());
    ASSERT_GE(small_->usage().held, live_bytes_);
  }

 private:
  void allocate_one() {
    Tagged tagged{nullptr, random_size(random_), static_cast<unsigned char>(random_())};
    auto block = small_->allocate(tagged.size);
    if (!block) {
      ASSERT_EQ(block.error().code, Errc::kOutOfBudget);
      return;
    }
    tagged.block = *block;
    const Bytes span = SmallBlocks::span_of(tagged.size);
    const auto next = live_.lower_bound(*block);
    ASSERT_TRUE(next == live_.end() || *block + span.count() <= next->first);
    if (next != live_.begin()) {
      const Tagged& before = std::prev(next)->second;
      ASSERT_LE(before.block + SmallBlocks::span_of(before.size).count(), *block);
    }
    ASSERT_TRUE(source_.holds(*block, span));
    tagged.write();
    live_.emplace(*block, tagged);
    live_bytes_ += span;
  }
  void free_one() {
    auto victim = live_.lower_bound(source_.taken().begin()->first + random_() % (8 << 20));
    if (victim == live_.end()) victim = live_.begin();
    ASSERT_TRUE(victim->second.intact());
    live_bytes_ -= SmallBlocks::span_of(victim->second.size);
    small_->free(victim->first);
    live_.erase(victim);
  }

  std::mt19937 random_;
  Budgeted source_;
  std::unique_ptr<SmallBlocks> small_;
  std::map<Address, Tagged> live_;
  Bytes live_bytes_;
};

TEST(SmallBlocksModel, AgreesWithASimpleReference) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Model model(seed);
    for (int i = 0; i < 20'000 && !testing::Test::HasFatalFailure(); ++i) model.step();
  }
}

}  // namespace
}  // namespace terrace
