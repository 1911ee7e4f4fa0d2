// One thread's freed blocks of one pool, ready for that thread to take again without a lock.
//
// A cache has lanes, one for each stream and lifetime that the thread frees on: what lies in a lane was freed
// on its stream, and is used again there with nothing to wait for. A lane has a stack of blocks for each size
// up to 32 KiB in steps of 512 bytes, and 64 small stacks for larger sizes, found by a hash of the exact
// size. Blocks in a cache are neither free nor live to the pool; before the pool maps memory or refuses it
// empties every cache, so that caches cost neither.
//
// take() and put() are called by the thread itself, inside the gate, or holding the pool's lock with the gate
// stopped or its own. Everything else is called under the pool's lock.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "allocator/block_table.hpp"
#include "allocator/live_counter.hpp"
#include "allocator/owner_gate.hpp"
#include "allocator/stream_order.hpp"

namespace terrace {

enum class Lifetime : std::uint8_t { kLong = 0, kShort = 1 };
inline constexpr std::size_t kLifetimeCount = 2;

// Weights, optimizer states, gradients and communication buffers stay for the run; the rest for part of a
// step.
[[nodiscard]] constexpr Lifetime lifetime_of(Pool pool) {
  constexpr unsigned kShortLived = 1U << static_cast<unsigned>(Pool::kActivation) |
                                   1U << static_cast<unsigned>(Pool::kExpert) |
                                   1U << static_cast<unsigned>(Pool::kScratch);
  return static_cast<Lifetime>(kShortLived >> static_cast<unsigned>(pool) & 1);
}

class alignas(64) ThreadCache {
 public:
  static constexpr std::size_t kLanes = 8;
  static constexpr std::uint64_t kSmallBytes = 32ULL << 10;
  static constexpr std::size_t kSmallBins = kSmallBytes >> kUnitShift;

  struct Limits {
    Bytes budget;  // of the pool: large blocks in the cache hold at most a sixteenth of it
  };
  struct SmallBin {
    static constexpr std::uint32_t kMost = 15;  // two cache lines in all
    std::uint32_t count = 0;
    std::uint32_t limit = 1;
    std::array<Address, kMost> blocks;
  };
  struct LargeBin {
    static constexpr std::uint32_t kMost = 4;
    std::uint64_t units = 0;
    std::uint32_t count = 0;
    std::array<Address, kMost> blocks;
  };
  struct Lane {
    std::uint64_t key = 0;  // the stream's id plus one
    Stream stream;
    Lifetime lifetime = Lifetime::kLong;
    StreamOrder::Index index = 0;
    std::array<SmallBin, kSmallBins> small;
    std::array<LargeBin, 64> large;
    SmallBin& small_bin(std::uint64_t units) { return small[units - 1]; }
    LargeBin& large_bin(std::uint64_t units) { return large[units * 0x9E3779B97F4A7C15ULL >> 58]; }
    // Its neighbour, tried next.
    LargeBin& other_bin(LargeBin& bin) { return large[static_cast<std::size_t>(&bin - large.data()) ^ 1]; }
  };

  ThreadCache(const Device& device, BlockTable& table, PublishedLive& published, Limits limits);
  ThreadCache(const ThreadCache&) = delete;
  ThreadCache& operator=(const ThreadCache&) = delete;

  [[nodiscard]] OwnerGate& gate() { return gate_; }
  [[nodiscard]] LiveCounter& counter() { return counter_; }

  // What a block taken or freed leaves to do.
  enum class Outcome : std::uint8_t {
    kDone,
    kCount,  // it is done, but for the counter: note(...) before the gate is left
    kMiss,   // nothing changed: there is no lane, no block, or no room
  };

  [[nodiscard]] static constexpr bool is_small(Bytes size) { return size.count() - 1 < kSmallBytes; }

  // A cached block for `size` bytes, made live. A size of zero never has one. take_small() is for sizes that
  // are small, take_large() for the others: apart, so that neither needs many registers.
  [[nodiscard, gnu::always_inline]] Outcome take_small(Stream stream, Bytes size, Pool pool, TenantId tenant,
                                                       Address& block) {
    Lane* lane = lane_to_take(stream, pool);
    if (lane == nullptr) [[unlikely]]
      return Outcome::kMiss;
    const std::uint64_t units = ((size.count() - 1) >> kUnitShift) + 1;
    SmallBin& bin = lane->small_bin(units);
    if (bin.count == 0) [[unlikely]]
      return Outcome::kMiss;
    block = bin.blocks[--bin.count];
    return took(block, units, size, pool, tenant);
  }
  [[nodiscard, gnu::always_inline]] Outcome take_large(Stream stream, Bytes size, Pool pool, TenantId tenant,
                                                       Address& block) {
    Lane* lane = lane_to_take(stream, pool);
    if (lane == nullptr) [[unlikely]]
      return Outcome::kMiss;
    const std::uint64_t units = ((size.count() - 1) >> kUnitShift) + 1;
    LargeBin* bin = &lane->large_bin(units);
    if (bin->units != units || bin->count == 0) [[unlikely]] {
      bin = &lane->other_bin(*bin);
      if (bin->units != units || bin->count == 0) return Outcome::kMiss;
    }
    block = bin->blocks[--bin->count];
    large_bytes_ -= units << kUnitShift;
    return took(block, units, size, pool, tenant);
  }

  // A live block, as a free finds it.
  struct Found {
    Address block = nullptr;
    std::uint64_t index = 0;  // of its word
    std::uint64_t units = 0;
    Pool pool = Pool::kScratch;
  };
  // Whether the block is live as it says itself, and of no tenant: the one case that is served without asking
  // further. All else about it then follows from what the caller passed, so that nothing waits for its word.
  [[nodiscard, gnu::always_inline]] bool find_plain(const Block& block, Found& found) const {
    if (!words_.may_start_at(block.address)) [[unlikely]]
      return false;
    found = {block.address, words_.index_of(block.address), ((block.size.count() - 1) >> kUnitShift) + 1,
             block.pool};
    return words_.word(found.index) == BlockWord::live(block.size, block.pool, TenantId{});
  }

  // Takes in a live block that was freed on `stream`.
  [[nodiscard, gnu::always_inline]] Outcome put_small(Stream stream, const Found& found) {
    Lane* lane = lane_of(stream, found.pool);
    if (lane == nullptr) [[unlikely]]
      return Outcome::kMiss;
    SmallBin& bin = lane->small_bin(found.units);
    if (bin.count >= bin.limit) [[unlikely]]
      return Outcome::kMiss;
    bin.blocks[bin.count++] = found.block;
    return put_in(found);
  }
  [[nodiscard, gnu::always_inline]] Outcome put_large(Stream stream, const Found& found) {
    Lane* lane = lane_of(stream, found.pool);
    if (lane == nullptr) [[unlikely]]
      return Outcome::kMiss;
    const std::uint64_t held = large_bytes_ + (found.units << kUnitShift);
    LargeBin* bin = &lane->large_bin(found.units);
    if (bin->units != found.units) [[unlikely]]
      bin = &lane->other_bin(*bin);
    if (bin->units != found.units || bin->count == LargeBin::kMost || held > large_limit_) [[unlikely]] {
      return Outcome::kMiss;
    }
    bin->blocks[bin->count++] = found.block;
    large_bytes_ = held;
    return put_in(found);
  }
  // Gives a stack to a large size that has none, where one is empty.
  void claim_bin(Lane& lane, std::uint64_t units);

  // Adds a lane, in place of `victim`, which is empty; the caller holds its index in the order.
  void set_lane(std::size_t victim, Stream stream, Lifetime lifetime, StreamOrder::Index index);
  void drop_lane(std::size_t lane);
  // The lane, where it is the one in its place; use_lane() puts it there.
  [[nodiscard, gnu::always_inline]] Lane* lane_of(Stream stream, Pool pool) {
    Lane* lane = current_[place_of(stream, pool)];
    return lane->key == std::uint64_t{stream.id} + 1 ? lane : nullptr;
  }
  // Finds the lane among all; null where there is none.
  Lane* use_lane(Stream stream, Pool pool);
  [[nodiscard]] std::array<std::unique_ptr<Lane>, kLanes>& lanes() { return lanes_; }
  [[nodiscard]] std::size_t next_victim() { return victim_++ % kLanes; }

  void set_limits(Limits limits);
  [[nodiscard]] std::uint64_t streams_ended() const { return streams_ended_; }
  void saw_streams_ended(std::uint64_t count) { streams_ended_ = count; }
  // Puts a cached block, which is not live, in; the caller saw that its bin has room.
  void stock(SmallBin& bin, Address block) { bin.blocks[bin.count++] = block; }
  // Takes every block of a lane out: give_back(block).
  template <typename GiveBack>
  void empty(Lane& lane, const GiveBack& give_back);
  template <typename Visit>
  void each_block(const Visit& visit) const;  // visit(block, units)

 private:
  [[nodiscard, gnu::always_inline]] Lane* lane_to_take(Stream stream, Pool pool) {
    // Nothing is taken on a stream that has ended: where any has, the slow way looks which.
    if (streams_ended_ != device_->streams_ended()) [[unlikely]]
      return nullptr;
    return lane_of(stream, pool);
  }
  [[nodiscard, gnu::always_inline]] Outcome took(Address block, std::uint64_t units, Bytes size, Pool pool,
                                                 TenantId tenant) {
    words_.set_word(block, BlockWord::live(size, pool, tenant));
    return counter_.add(pool, units << kUnitShift) ? Outcome::kDone : Outcome::kCount;
  }
  [[nodiscard, gnu::always_inline]] Outcome put_in(const Found& found) {
    words_.set_word(found.index, BlockWord::cached(found.units));
    return counter_.remove(found.pool, found.units << kUnitShift) ? Outcome::kDone : Outcome::kCount;
  }
  // By pool rather than lifetime, which would have to be looked up. Streams with neighbouring ids keep out of
  // each other's way.
  static constexpr std::size_t kPlaces = 64;
  [[nodiscard]] static std::size_t place_of(Stream stream, Pool pool) {
    return (stream.id * std::size_t{8} + static_cast<std::size_t>(pool)) % kPlaces;
  }

  OwnerGate gate_;
  std::array<Lane*, kPlaces> current_;
  const Device* device_;
  std::uint64_t streams_ended_;
  BlockTable::Words words_;
  std::uint64_t large_bytes_ = 0;
  std::uint64_t large_limit_ = 0;
  LiveCounter counter_;
  std::uint64_t small_bin_bytes_ = 0;
  std::size_t victim_ = 0;
  std::array<std::unique_ptr<Lane>, kLanes> lanes_;
};

template <typename GiveBack>
void ThreadCache::empty(Lane& lane, const GiveBack& give_back) {
  for (SmallBin& bin : lane.small) {
    while (bin.count != 0) give_back(bin.blocks[--bin.count]);
  }
  for (LargeBin& bin : lane.large) {
    large_bytes_ -= (bin.units << kUnitShift) * bin.count;
    while (bin.count != 0) give_back(bin.blocks[--bin.count]);
  }
}

template <typename Visit>
void ThreadCache::each_block(const Visit& visit) const {
  for (const auto& lane : lanes_) {
    if (lane == nullptr) continue;
    for (std::size_t i = 0; i < kSmallBins; ++i) {
      for (std::uint32_t b = 0; b < lane->small[i].count; ++b) visit(lane->small[i].blocks[b], i + 1);
    }
    for (const LargeBin& bin : lane->large) {
      for (std::uint32_t b = 0; b < bin.count; ++b) visit(bin.blocks[b], bin.units);
    }
  }
}

}  // namespace terrace
