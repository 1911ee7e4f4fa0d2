#include "allocator/hbm_pool.hpp"

#include <algorithm>
#include <bit>
#include <mutex>

#include "allocator/hbm_pool_impl.hpp"
#include "runtime/assert.hpp"
#include "runtime/trace/recorder.hpp"

namespace terrace {
namespace {

constexpr Bytes kLargestChunk = 16_MiB;
constexpr std::uint64_t kChunksPerBudget = 512;  // a chunk is at most this part of the budget

Bytes chunk_for(Bytes budget, Bytes granularity) {
  return std::max(granularity, round_down(std::min(kLargestChunk, budget / kChunksPerBudget), granularity));
}

}  // namespace

HbmPool::HbmPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  CacheRegistry::add(*impl_);
  key_ = impl_->key();
}

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
  auto centre = HbmCentre::create(device, {.budget = options.budget, .chunk = chunk});
  if (!centre) return std::move(centre).error();
  return std::unique_ptr<HbmPool>(new HbmPool(std::make_unique<Impl>(device, std::move(centre).value())));
}

HbmPool::~HbmPool() {
  CacheRegistry::remove(*impl_);
  if (impl_->in_child) {
    // The memory is the parent's: nothing here may unmap or destroy it.
    (void)impl_.release();
    return;
  }
  const std::lock_guard lock(impl_->mutex());
  const Bytes live = impl_->empty_all(Impl::Lanes::kDropped);
  TERRACE_CHECK(live == 0_B, "every block is freed before its pool");
  TERRACE_PARANOID(impl_->walk().ok(), "the heap is whole at its end");
}

// The fast paths: this thread's cache, entered with a plain store; nothing shared is written. They call
// nothing but at their very end and give back one word, so that they save no register.
Address HbmPool::take_cached(Stream stream, Bytes size, Pool pool) {
  ThreadCache* cache = cache_of_this_thread(key_);
  if (cache == nullptr || !cache->gate().enter()) [[unlikely]]
    return nullptr;
  if (!ThreadCache::is_small(size)) return Impl::take_large(*cache, stream, size, pool);
  Address at = nullptr;
  const auto outcome = cache->take_small(stream, size, pool, TenantId{}, at);
  if (outcome == ThreadCache::Outcome::kCount) [[unlikely]]
    return Impl::taken(*cache, at, size);
  cache->gate().leave();
  return outcome == ThreadCache::Outcome::kDone ? at : nullptr;
}

bool HbmPool::put_cached(Stream stream, const Block& block) {
  ThreadCache* cache = cache_of_this_thread(key_);
  if (cache == nullptr || !cache->gate().enter()) [[unlikely]]
    return false;
  if (!ThreadCache::is_small(block.size)) return Impl::put_large(*cache, stream, block);
  ThreadCache::Found found;
  auto outcome = ThreadCache::Outcome::kMiss;
  if (cache->find_plain(block, found)) [[likely]]
    outcome = cache->put_small(stream, found);
  if (outcome == ThreadCache::Outcome::kCount) [[unlikely]]
    return Impl::put_away(*cache, found.units);
  cache->gate().leave();
  return outcome == ThreadCache::Outcome::kDone;
}

Result<Block> HbmPool::allocate_slowly(Stream stream, Bytes size, Pool pool) {
  return impl_->allocate_slowly({.stream = stream, .size = size, .pool = pool, .options = {}});
}

Status HbmPool::free_slowly(Stream stream, Address at) { return impl_->free_slowly(stream, at); }

Result<Block> HbmPool::allocate(Stream stream, Bytes size, Pool pool, const BlockOptions& options) {
  if (!std::has_single_bit(options.alignment.count()) || options.alignment > impl_->centre->chunk()) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "an alignment of " + std::to_string(options.alignment.count()) +
                         " bytes is no power of two up to the chunk, " + format_bytes(impl_->centre->chunk()),
                 .bytes = size,
                 .pool = pool};
  }
  if (auto known = impl_->quotas.check(options.tenant); !known) return known.error();
  return impl_->allocate_slowly({.stream = stream, .size = size, .pool = pool, .options = options});
}

Status HbmPool::free_completed(const Block& block) {
  const std::lock_guard lock(impl_->mutex());
  if (auto here = impl_->refuse_in_child(); !here) return here;
  const auto word = impl_->live_word(block.address);
  if (!word) return word.error();
  if (impl_->recorded) trace::record_free(block.address, 0);
  impl_->quotas.refund(word->span(), word->pool(), word->tenant());
  impl_->count_removed(impl_->own_cache(), *word);
  impl_->give_back(block.address, {});
  return {};
}

Bytes HbmPool::trim() {
  const std::lock_guard lock(impl_->mutex());
  if (impl_->in_child) return 0_B;
  HbmCentre& centre = *impl_->centre;
  (void)impl_->empty_all(Impl::Lanes::kKept);
  const Bytes before = centre.mapped();
  while (centre.release_chunk()) {
  }
  TERRACE_PARANOID(impl_->walk().ok(), "the heap is whole after a trim");
  return before - centre.mapped();
}

Bytes HbmPool::set_budget(Bytes budget) {
  const std::lock_guard lock(impl_->mutex());
  if (impl_->in_child) return 0_B;
  HbmCentre& centre = *impl_->centre;
  centre.set_budget(budget);
  impl_->published.set_budget(budget);
  {
    const Impl::StoppedThreads stopped(*impl_);
    for (auto& cache : impl_->caches) {
      cache->set_limits({budget});
      if (centre.mapped() > budget) impl_->empty_cache(*cache, Impl::Lanes::kKept);
    }
  }
  while (centre.mapped() > budget && centre.release_chunk()) {
  }
  return saturating_sub(centre.mapped(), budget);
}

void HbmPool::set_limit(Pool pool, Bytes limit) {
  const std::lock_guard lock(impl_->mutex());
  if (impl_->in_child) return;
  const Impl::StoppedThreads stopped(*impl_);
  impl_->quotas.set_limit(pool, limit, impl_->totals().live(pool));
  for (auto& cache : impl_->caches) {
    if (impl_->quotas.limits_a_pool()) {
      cache->gate().raise(OwnerGate::kAttention);
    } else {
      cache->gate().lower(OwnerGate::kAttention);
    }
  }
}

Status HbmPool::set_limit(TenantId tenant, Bytes limit) { return impl_->quotas.set_limit(tenant, limit); }
Result<TenantId> HbmPool::tenant(std::string_view label) { return impl_->quotas.tenant(label); }
std::vector<TenantUsage> HbmPool::tenants() const { return impl_->quotas.tenants(); }

std::optional<Block> HbmPool::find(const std::byte* address) const {
  return impl_->centre->table().find(address);
}

PoolUsage HbmPool::usage() const {
  const std::lock_guard lock(impl_->mutex());
  PoolUsage usage;
  usage.budget = impl_->centre->budget();
  usage.mapped = impl_->centre->mapped();
  usage.mapped_peak = impl_->centre->mapped_peak();
  impl_->totals().fill(usage);
  return usage;
}

void HbmPool::reset_peaks() {
  const std::lock_guard lock(impl_->mutex());
  if (impl_->in_child) return;
  const Impl::StoppedThreads stopped(*impl_);
  impl_->centre->reset_mapped_peak();
  impl_->restart_peaks(LiveTotals::Since::kPeak);
}

Bytes HbmPool::take_watermark() {
  const std::lock_guard lock(impl_->mutex());
  if (impl_->in_child) return 0_B;
  const Impl::StoppedThreads stopped(*impl_);
  PoolUsage usage;
  impl_->totals().fill(usage);
  impl_->restart_peaks(LiveTotals::Since::kWatermark);
  return usage.watermark;
}

Bytes HbmPool::largest_available() const {
  const std::lock_guard lock(impl_->mutex());
  if (!impl_->in_child) (void)impl_->empty_all(Impl::Lanes::kKept);
  return impl_->centre->largest_available();
}

Result<HeapWalk> HbmPool::walk() const {
  const std::lock_guard lock(impl_->mutex());
  if (auto here = impl_->refuse_in_child(); !here) return here.error();
  return impl_->walk();
}

}  // namespace terrace
