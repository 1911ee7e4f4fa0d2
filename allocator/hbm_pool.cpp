#include "allocator/hbm_pool.hpp"

#include <algorithm>
#include <bit>
#include <mutex>
#include <vector>

#include "allocator/chunk_range.hpp"
#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

constexpr Bytes kAlignment = 512_B;
constexpr Bytes kLargestChunk = 32_MiB;
constexpr std::uint64_t kChunksPerBudget = 128;  // a chunk is at most this part of the budget
constexpr std::uint64_t kAddressFactor = 4;      // addresses are free; room to grow past fragmented parts
constexpr std::size_t kMaxStreams = 64;

enum class Lifetime : std::uint8_t { kLong = 0, kShort = 1 };

Lifetime lifetime_of(Pool pool) {
  switch (pool) {
    case Pool::kWeights:
    case Pool::kOptimizer:
    case Pool::kGradient:
    case Pool::kComm:
      return Lifetime::kLong;
    case Pool::kActivation:
    case Pool::kExpert:
    case Pool::kScratch:
      return Lifetime::kShort;
  }
  return Lifetime::kShort;
}

Bytes chunk_for(Bytes budget, Bytes granularity) {
  return std::max(granularity, round_down(std::min(kLargestChunk, budget / kChunksPerBudget), granularity));
}

}  // namespace

struct HbmPool::Impl {
  Device& device;
  Bytes chunk;
  Event fence;  // recorded and waited for under the lock, never kept
  mutable std::mutex mutex;
  std::vector<ChunkRange> ranges;  // by Lifetime
  std::vector<Stream> streams;     // the meaning of the bits in Extent::pending
  BlockTable live;
  PoolUsage usage;

  Impl(Device& d, Bytes c) : device(d), chunk(c) {}

  std::uint64_t bit_of(Stream stream);
  ChunkRange& range_of(Pool pool) { return ranges[static_cast<std::size_t>(lifetime_of(pool))]; }
  Status order_behind(Stream stream, std::uint64_t pending);
  Status finish(std::uint64_t pending);
  Status grow(ChunkRange& range, Bytes size, Pool pool);
  Result<Physical> obtain_chunk(const ChunkRange& growing, const ChunkRange::Growth& growth, Bytes size,
                                Pool pool);
  Result<Physical> reclaim_chunk(const ChunkRange& growing, const ChunkRange::Growth* growth);
  Error refusal(Bytes size, Pool pool) const;
  void give_back(const Block& block, std::uint64_t pending);
};

std::uint64_t HbmPool::Impl::bit_of(Stream stream) {
  auto it = std::find(streams.begin(), streams.end(), stream);
  if (it == streams.end()) {
    TERRACE_CHECK(streams.size() < kMaxStreams, "a pool serves at most 64 streams");
    it = streams.insert(streams.end(), stream);
  }
  return 1ULL << (it - streams.begin());
}

// Makes later work on `stream` wait for what the other streams have been given so far.
Status HbmPool::Impl::order_behind(Stream stream, std::uint64_t pending) {
  pending &= ~bit_of(stream);
  for (; pending != 0; pending &= pending - 1) {
    const Stream other = streams[static_cast<std::size_t>(std::countr_zero(pending))];
    if (auto recorded = device.record(other, fence); !recorded) return recorded;
    if (auto waits = device.wait(stream, fence); !waits) return waits;
  }
  return {};
}

// Waits on the host: physical memory is about to move.
Status HbmPool::Impl::finish(std::uint64_t pending) {
  const Nanoseconds began = steady_clock().now();
  for (; pending != 0; pending &= pending - 1) {
    const Stream other = streams[static_cast<std::size_t>(std::countr_zero(pending))];
    if (auto recorded = device.record(other, fence); !recorded) return recorded;
    if (auto done = device.synchronize(fence); !done) return done;
  }
  metrics().add<Metric::kStallSeconds>(StallReason::kBudget, steady_clock().now() - began);
  return {};
}

Error HbmPool::Impl::refusal(Bytes size, Pool pool) const {
  return out_of_budget(size, pool,
                       format_bytes(size) + " of HBM for " + name_of(pool) +
                           " do not fit: " + format_bytes(usage.live) + " of the budget of " +
                           format_bytes(usage.budget) + " are in use");
}

Result<Physical> HbmPool::Impl::reclaim_chunk(const ChunkRange& growing, const ChunkRange::Growth* growth) {
  for (ChunkRange& range : ranges) {
    const auto index = range.free_chunk(&range == &growing ? growth : nullptr);
    if (!index) continue;
    if (auto done = finish(range.pending_in(*index)); !done) return done.error();
    return range.unmap_chunk(*index);
  }
  return Error{Errc::kNotFound, "no chunk is free", {}, {}};
}

Result<Physical> HbmPool::Impl::obtain_chunk(const ChunkRange& growing, const ChunkRange::Growth& growth,
                                             Bytes size, Pool pool) {
  if (usage.mapped + chunk <= usage.budget) {
    auto created = device.create_physical(chunk);
    if (created) usage.set_mapped(usage.mapped + chunk);
    return created;
  }
  // At the wall: free memory elsewhere in the pool moves under the range that needs it.
  auto moved = reclaim_chunk(growing, &growth);
  if (!moved && moved.error().code == Errc::kNotFound) return refusal(size, pool);
  return moved;
}

// Maps chunks until `size` bytes are free next to each other in `range`.
Status HbmPool::Impl::grow(ChunkRange& range, Bytes size, Pool pool) {
  if (usage.live + size > usage.budget) return refusal(size, pool);
  const auto growth = range.plan_growth(size);
  if (!growth) return refusal(size, pool);
  for (std::size_t i = 0; i < growth->chunks; ++i) {
    auto physical = obtain_chunk(range, *growth, size, pool);
    if (!physical) return physical.error();
    if (auto mapped = range.map_chunk(growth->first_chunk + i, *physical); !mapped) {
      device.destroy_physical(*physical);
      usage.set_mapped(usage.mapped - chunk);
      return mapped;
    }
  }
  return {};
}

void HbmPool::Impl::give_back(const Block& block, std::uint64_t pending) {
  const Bytes span = live.remove(block.address);
  ChunkRange& range = range_of(block.pool);
  range.free().insert({range.offset_of(block.address), span, pending});
  usage.remove(block.pool, span);
}

HbmPool::HbmPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<HbmPool>> HbmPool::create(Device& device, Options options) {
  const Bytes granularity = device.info().granularity;
  const Bytes chunk = options.chunk == 0_B ? chunk_for(options.budget, granularity) : options.chunk;
  if (chunk.count() % granularity.count() != 0) {
    return Error{Errc::kInvalidArgument,
                 "a chunk of " + format_bytes(chunk) + " is no multiple of the device's granularity, " +
                     format_bytes(granularity),
                 chunk,
                 {}};
  }
  auto fence = device.create_event();
  if (!fence) return std::move(fence).error();
  auto impl = std::make_unique<Impl>(device, chunk);
  impl->fence = *fence;
  impl->usage.budget = options.budget;
  std::unique_ptr<HbmPool> pool(new HbmPool(std::move(impl)));
  for (int lifetime = 0; lifetime < 2; ++lifetime) {
    auto range = ChunkRange::create(device, round_up(device.info().capacity * kAddressFactor, chunk), chunk);
    if (!range) return std::move(range).error();
    pool->impl_->ranges.push_back(std::move(range).value());
  }
  return pool;
}

HbmPool::~HbmPool() {
  TERRACE_CHECK(impl_->live.count() == 0, "every block is freed before its pool");
  for (Stream stream : impl_->streams) (void)impl_->finish(impl_->bit_of(stream));
  impl_->ranges.clear();
  impl_->device.destroy_event(impl_->fence);
}

Result<Block> HbmPool::allocate(Stream stream, Bytes size, Pool pool) {
  const Bytes span = round_up(std::max(size, 1_B), kAlignment);
  std::lock_guard lock(impl_->mutex);
  ChunkRange& range = impl_->range_of(pool);
  auto fit = range.free().best_fit(span);
  if (!fit) {
    if (auto grown = impl_->grow(range, span, pool); !grown) return grown.error();
    fit = range.free().best_fit(span);
    TERRACE_CHECK(fit.has_value(), "growth makes room");
  }
  if (auto ordered = impl_->order_behind(stream, fit->pending); !ordered) return ordered.error();
  range.free().take(fit->offset, span);
  const Block block{range.address_of(fit->offset), size, pool};
  impl_->live.insert(block, span);
  impl_->usage.add(pool, span);
  return block;
}

void HbmPool::free(Stream stream, const Block& block) {
  std::lock_guard lock(impl_->mutex);
  impl_->give_back(block, impl_->bit_of(stream));
}

void HbmPool::free_completed(const Block& block) {
  std::lock_guard lock(impl_->mutex);
  impl_->give_back(block, 0);
}

Bytes HbmPool::trim() {
  std::lock_guard lock(impl_->mutex);
  Bytes given;
  while (true) {
    auto physical = impl_->reclaim_chunk(impl_->ranges.front(), nullptr);
    if (!physical) break;
    impl_->device.destroy_physical(*physical);
    impl_->usage.set_mapped(impl_->usage.mapped - impl_->chunk);
    given += impl_->chunk;
  }
  return given;
}

Bytes HbmPool::set_budget(Bytes budget) {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->usage.budget = budget;
    if (impl_->usage.mapped <= budget) return 0_B;
  }
  trim();
  std::lock_guard lock(impl_->mutex);
  return saturating_sub(impl_->usage.mapped, budget);
}

std::optional<Block> HbmPool::find(const std::byte* address) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->live.find(address);
}

PoolUsage HbmPool::usage() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->usage;
}

void HbmPool::reset_peaks() {
  std::lock_guard lock(impl_->mutex);
  impl_->usage.reset_peaks();
}

Bytes HbmPool::take_watermark() {
  std::lock_guard lock(impl_->mutex);
  return impl_->usage.restart_watermark();
}

Bytes HbmPool::largest_available() const {
  std::lock_guard lock(impl_->mutex);
  const std::size_t mappable = saturating_sub(impl_->usage.budget, impl_->usage.mapped) / impl_->chunk;
  Bytes best;
  for (const ChunkRange& range : impl_->ranges) best = std::max(best, range.largest_with(mappable));
  return best;
}

}  // namespace terrace
