#include "allocator/hbm_pool.hpp"

#include <algorithm>
#include <cstdio>
#include <mutex>

#include "allocator/hbm_pool_impl.hpp"
#include "runtime/assert.hpp"
#include "runtime/trace/recorder.hpp"

namespace terrace {
namespace {

std::string in_hex(const void* at) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%p", at);
  return text.data();
}

}  // namespace

HbmPool::Impl::Impl(Device& d, std::unique_ptr<HbmCentre> c)
    : device(d),
      centre(std::move(c)),
      published(centre->budget()),
      cacheless(published),
      recorded(trace::recording_is_asked_for()) {
  if (recorded) trace::describe_recording(trace::Layer::kPool, device.info().kind);
}

// --- Caches and who may touch them ---

HbmPool::Impl::StoppedThreads::StoppedThreads(Impl& pool) : pool_(pool), own_(pool.own_cache_if_any()) {
  bool others = false;
  for (auto& cache : pool_.caches) {
    if (cache.get() == own_) continue;
    cache->gate().raise(OwnerGate::kStop);
    others = true;
  }
  if (!others) return;
  OwnerGate::barrier();
  for (auto& cache : pool_.caches) {
    if (cache.get() != own_) cache->gate().await_owner();
  }
}

HbmPool::Impl::StoppedThreads::~StoppedThreads() {
  for (auto& cache : pool_.caches) {
    if (cache.get() != own_) cache->gate().lower(OwnerGate::kStop);
  }
}

ThreadCache* HbmPool::Impl::own_cache() {
  if (ThreadCache* own = own_cache_if_any()) {
    if (own->streams_ended() != device.streams_ended()) {
      // Lanes of streams that ended go, so that nothing is taken on those any more.
      const std::uint64_t ended = device.streams_ended();
      for (std::size_t i = 0; i < ThreadCache::kLanes; ++i) {
        if (own->lanes()[i] != nullptr && !device.alive(own->lanes()[i]->stream)) drop_lane(*own, i);
      }
      own->saw_streams_ended(ended);
    }
    return own;
  }
  if (recorded || !CacheRegistry::admits(*this)) return nullptr;
  auto cache = std::make_unique<ThreadCache>(device, centre->table(), published,
                                             ThreadCache::Limits{centre->budget()});
  if (quotas.limits_a_pool()) cache->gate().raise(OwnerGate::kAttention);
  CacheRegistry::set_cache(*this, *cache);
  caches.push_back(std::move(cache));
  return caches.back().get();
}

void HbmPool::Impl::empty_lane(ThreadCache& cache, ThreadCache::Lane& lane) {
  std::optional<Pending> pending;  // one for all, and none where the lane is empty
  cache.empty(lane, [&](Address at) {
    if (!pending) pending = centre->order().freed_on(lane.index);
    give_back(at, *pending);
  });
}

void HbmPool::Impl::drop_lane(ThreadCache& cache, std::size_t lane) {
  if (cache.lanes()[lane] == nullptr) return;
  empty_lane(cache, *cache.lanes()[lane]);
  centre->order().release(cache.lanes()[lane]->index);
  cache.drop_lane(lane);
}

void HbmPool::Impl::empty_cache(ThreadCache& cache, Lanes lanes) {
  for (std::size_t i = 0; i < ThreadCache::kLanes; ++i) {
    if (cache.lanes()[i] == nullptr) continue;
    if (lanes == Lanes::kDropped || !device.alive(cache.lanes()[i]->stream)) {
      drop_lane(cache, i);
    } else {
      empty_lane(cache, *cache.lanes()[i]);
    }
  }
}

Bytes HbmPool::Impl::empty_all(Lanes lanes) {
  const StoppedThreads stopped(*this);
  for (auto& cache : caches) empty_cache(*cache, lanes);
  return totals().live();
}

void HbmPool::Impl::empty_half(ThreadCache::Lane& lane, ThreadCache::SmallBin& bin) {
  const Pending pending = centre->order().freed_on(lane.index);
  for (const std::uint32_t keep = bin.count / 2; bin.count > keep;)
    give_back(bin.blocks[--bin.count], pending);
}

ThreadCache::Lane& HbmPool::Impl::lane_of(ThreadCache& cache, Stream stream, StreamOrder::Index index,
                                          Pool pool) {
  if (ThreadCache::Lane* lane = cache.use_lane(stream, pool)) return *lane;
  auto& lanes = cache.lanes();
  const auto empty = std::find(lanes.begin(), lanes.end(), nullptr);
  const std::size_t place =
      empty != lanes.end() ? static_cast<std::size_t>(empty - lanes.begin()) : cache.next_victim();
  drop_lane(cache, place);
  centre->order().hold(index);
  cache.set_lane(place, stream, lifetime_of(pool), index);
  return *cache.use_lane(stream, pool);
}

Result<StreamOrder::Index> HbmPool::Impl::index_of(Stream stream) {
  auto index = centre->order().index_of(stream);
  if (index || index.error().code != Errc::kOutOfMemory) return index;
  // Lanes hold the bits of their streams.
  (void)empty_all(Lanes::kDropped);
  return centre->order().index_of(stream);
}

Status HbmPool::Impl::refuse_in_child() const {
  if (!in_child) return {};
  return Error{.code = Errc::kNotSupported,
               .text = "this process was forked from the one that opened the device: open one here"};
}

void HbmPool::Impl::thread_ended(ThreadCache& cache) {
  const std::lock_guard lock(mutex_);
  if (in_child) return;
  empty_cache(cache, Lanes::kDropped);
  cacheless.absorb(cache.counter());
  std::erase_if(caches, [&](const auto& held) { return held.get() == &cache; });
}

void HbmPool::Impl::forked() {
  in_child = true;
  for (auto& cache : caches) cache->gate().raise(OwnerGate::kStop);
}

// --- Ends of the fast paths, and their like under other conditions ---

Address HbmPool::Impl::take_large(ThreadCache& cache, Stream stream, Bytes size, Pool pool) {
  Address at = nullptr;
  const auto outcome = cache.take_large(stream, size, pool, TenantId{}, at);
  if (outcome == ThreadCache::Outcome::kCount) [[unlikely]]
    return taken(cache, at, size);
  cache.gate().leave();
  return outcome == ThreadCache::Outcome::kDone ? at : nullptr;
}

bool HbmPool::Impl::put_large(ThreadCache& cache, Stream stream, const Block& block) {
  ThreadCache::Found found;
  auto outcome = ThreadCache::Outcome::kMiss;
  if (cache.find_plain(block, found)) [[likely]]
    outcome = cache.put_large(stream, found);
  if (outcome == ThreadCache::Outcome::kCount) [[unlikely]]
    return put_away(cache, found.units);
  cache.gate().leave();
  return outcome == ThreadCache::Outcome::kDone;
}

Address HbmPool::Impl::taken(ThreadCache& cache, Address at, Bytes size) {
  cache.counter().note(round_up(size, kUnit).count(), LiveCounter::Change::kAdded);
  cache.gate().leave();
  return at;
}

bool HbmPool::Impl::put_away(ThreadCache& cache, std::uint64_t units) {
  cache.counter().note(units << kUnitShift, LiveCounter::Change::kRemoved);
  cache.gate().leave();
  return true;
}

Address HbmPool::Impl::take(ThreadCache& cache, const Wanted& wanted) {
  (void)cache.use_lane(wanted.stream, wanted.pool);
  Address at = nullptr;
  const TenantId tenant = wanted.options.tenant;
  const auto outcome = ThreadCache::is_small(wanted.size)
                           ? cache.take_small(wanted.stream, wanted.size, wanted.pool, tenant, at)
                           : cache.take_large(wanted.stream, wanted.size, wanted.pool, tenant, at);
  if (outcome == ThreadCache::Outcome::kCount) {
    cache.counter().note(wanted.span().count(), LiveCounter::Change::kAdded);
  }
  return at;
}

bool HbmPool::Impl::put(ThreadCache& cache, Stream stream, Address at, BlockWord word) {
  (void)cache.use_lane(stream, word.pool());
  const ThreadCache::Found found{at, centre->table().words().index_of(at), word.units(), word.pool()};
  const auto outcome = found.units <= ThreadCache::kSmallBins ? cache.put_small(stream, found)
                                                              : cache.put_large(stream, found);
  if (outcome == ThreadCache::Outcome::kCount) {
    cache.counter().note(word.span().count(), LiveCounter::Change::kRemoved);
  }
  return outcome != ThreadCache::Outcome::kMiss;
}

void HbmPool::Impl::count_removed(ThreadCache* own, BlockWord word) {
  LiveCounter& counter = counter_of(own);
  if (!counter.remove(word.pool(), word.span().count())) {
    counter.note(word.span().count(), LiveCounter::Change::kRemoved);
  }
}

// --- Allocation ---

Result<Block> HbmPool::Impl::allocate_slowly(const Wanted& wanted) {
  ThreadCache* own = own_cache_if_any();
  const TenantId tenant = wanted.options.tenant;
  const bool may_be_cached =
      own != nullptr && wanted.options.alignment <= kUnit && wanted.size <= BlockWord::kMostBytes;
  // The cache may yet serve: from a lane that is not in its place, or once quotas are charged.
  if (may_be_cached && own->gate().enter_anyway()) {
    Status charged = quotas.charge(wanted.span(), wanted.pool, tenant);
    Address at = nullptr;
    if (charged) {
      at = take(*own, wanted);
      if (at == nullptr) quotas.refund(wanted.span(), wanted.pool, tenant);
    }
    own->gate().leave();
    if (!charged) return charged.error();
    if (at != nullptr) return Block{at, wanted.size, wanted.pool};
  }
  const std::lock_guard lock(mutex_);
  return allocate(wanted);
}

Result<Block> HbmPool::Impl::allocate(const Wanted& wanted) {
  if (auto here = refuse_in_child(); !here) return here.error();
  if (wanted.size > BlockWord::kMostBytes) {
    return centre->refusal({.span = wanted.size, .pool = wanted.pool}, totals().live());
  }
  ThreadCache* own = own_cache();
  const auto index = index_of(wanted.stream);
  if (!index) return index.error();
  const TenantId tenant = wanted.options.tenant;
  if (auto charged = quotas.charge(wanted.span(), wanted.pool, tenant); !charged) return charged.error();
  if (own != nullptr && wanted.options.alignment <= kUnit) {
    if (const Address at = take(*own, wanted)) return Block{at, wanted.size, wanted.pool};
  }
  auto at = obtain(wanted, *index, own);
  if (!at) {
    quotas.refund(wanted.span(), wanted.pool, tenant);
    return at.error();
  }
  centre->table().set_word(*at, BlockWord::live(std::max(wanted.size, 1_B), wanted.pool, tenant));
  LiveCounter& counter = counter_of(own);
  if (!counter.add(wanted.pool, wanted.span().count())) {
    counter.note(wanted.span().count(), LiveCounter::Change::kAdded);
  }
  if (recorded) trace::record_allocate(*at, wanted.size, wanted.stream.id, wanted.pool);
  return Block{*at, wanted.size, wanted.pool};
}

// One block of the centre, and for small sizes a few more for the thread's cache.
Result<Address> HbmPool::Impl::obtain(const Wanted& wanted, StreamOrder::Index index, ThreadCache* own) {
  HbmCentre::Request request{
      .span = wanted.span(), .pool = wanted.pool, .stream = index, .alignment = wanted.options.alignment};
  ThreadCache::SmallBin* bin = nullptr;
  if (own != nullptr && request.span.count() <= ThreadCache::kSmallBytes && request.alignment <= kUnit) {
    bin = &lane_of(*own, wanted.stream, index, wanted.pool).small_bin(request.span.count() >> kUnitShift);
    request.most = 1 + bin->limit / 2;
  }
  const auto carved = carve(request, own);
  if (!carved) return carved.error();
  for (std::uint32_t i = carved->count; i > 1; --i) {
    own->stock(*bin, carved->first + (i - 1) * request.span.count());
  }
  return carved->first;
}

// Caches may hold what fits: they are emptied before memory is mapped or refused.
Result<HbmCentre::Carved> HbmPool::Impl::carve(const HbmCentre::Request& request, ThreadCache* own) {
  using Where = HbmCentre::Where;
  auto carved = centre->carve(request, Where::kOwnRange);
  if (!carved || carved->count != 0) return carved;
  if (own != nullptr) {
    empty_cache(*own, Lanes::kKept);
    carved = centre->carve(request, Where::kOwnRange);
    if (!carved || carved->count != 0) return carved;
  }
  const Bytes live = empty_all(Lanes::kKept);
  carved = centre->carve(request, Where::kOwnRange);
  if (!carved || carved->count != 0) return carved;
  const Status grown = centre->grow(request, live);
  if (grown) {
    carved = centre->carve(request, Where::kOwnRange);
    TERRACE_CHECK(!carved || carved->count != 0, "growth makes room");
    return carved;
  }
  HbmCentre::Request single = request;
  single.most = 1;
  carved = centre->carve(single, Where::kSiblingRange);
  if (!carved || carved->count != 0) return carved;
  return grown.error();
}

// --- Freeing ---

Result<BlockWord> HbmPool::Impl::live_word(Address at) const {
  const BlockTable& table = centre->table();
  if (table.may_start_at(at)) {
    const BlockWord word = table.word_at(at);
    if (word.state() == BlockWord::State::kLive) return word;
  }
  std::string text = "free of " + in_hex(at) + ": no live block starts there; ";
  if (!table.holds(at)) {
    text += "it is no address of this pool";
  } else if (const auto around = table.find(at)) {
    text += "it lies " + std::to_string(at - around->address) + " bytes inside the block of " +
            format_bytes(around->size) + " at " + in_hex(around->address);
  } else {
    text += "a block that was there is freed already";
  }
  return Error{.code = Errc::kInvalidArgument, .text = std::move(text)};
}

Status HbmPool::Impl::free_slowly(Stream stream, Address at) {
  ThreadCache* own = own_cache_if_any();
  if (own != nullptr && own->gate().enter_anyway()) {
    const auto word = live_word(at);
    const bool done = word.ok() && put(*own, stream, at, *word);
    if (done) quotas.refund(word->span(), word->pool(), word->tenant());
    own->gate().leave();
    if (done) return {};
    if (!word) return word.error();
  }
  const std::lock_guard lock(mutex_);
  if (auto here = refuse_in_child(); !here) return here;
  const auto word = live_word(at);
  if (!word) return word.error();
  return free(stream, at, *word);
}

Status HbmPool::Impl::free(Stream stream, Address at, BlockWord word) {
  ThreadCache* own = own_cache();
  Pending pending;
  if (device.alive(stream)) {
    const auto index = index_of(stream);
    if (!index) return index.error();
    if (own != nullptr) {
      ThreadCache::Lane& lane = lane_of(*own, stream, *index, word.pool());
      if (word.units() <= ThreadCache::kSmallBins) {
        ThreadCache::SmallBin& bin = lane.small_bin(word.units());
        if (bin.count == bin.limit) empty_half(lane, bin);
      } else {
        own->claim_bin(lane, word.units());
      }
      if (put(*own, stream, at, word)) {
        quotas.refund(word.span(), word.pool(), word.tenant());
        return {};
      }
    }
    pending = centre->order().freed_on(*index);
  }
  if (recorded) trace::record_free(at, stream.id);
  quotas.refund(word.span(), word.pool(), word.tenant());
  count_removed(own, word);
  give_back(at, pending);
  return {};
}

// --- Figures ---

LiveTotals HbmPool::Impl::totals() const {
  LiveTotals totals(published);
  totals.include(cacheless);
  for (const auto& cache : caches) totals.include(cache->counter());
  return totals;
}

void HbmPool::Impl::restart_peaks(LiveTotals::Since since) {
  totals().restart_published(since);
  LiveTotals::restart(cacheless, since);
  for (auto& cache : caches) LiveTotals::restart(cache->counter(), since);
}

Result<HeapWalk> HbmPool::Impl::walk() {
  const StoppedThreads stopped(*this);
  std::map<Address, Bytes> cached;
  for (const auto& cache : caches) {
    bool twice = false;
    cache->each_block([&](Address at, std::uint64_t units) {
      twice |= !cached.emplace(at, Bytes(units << kUnitShift)).second;
    });
    if (twice) return Error{.code = Errc::kInvalidArgument, .text = "heap walk: a block is cached twice"};
  }
  auto found = walk_heap(*centre, cached);
  if (!found) return found;
  const LiveTotals counted = totals();
  for (int i = 0; i < kPoolCount; ++i) {
    const Bytes live = found->live_by_pool[static_cast<std::size_t>(i)];
    if (counted.live(static_cast<Pool>(i)) == live) continue;
    return Error{.code = Errc::kInvalidArgument,
                 .text = std::string("heap walk: ") + format_bytes(live) + " are live for " +
                         name_of(static_cast<Pool>(i)) + ", counted as " +
                         format_bytes(counted.live(static_cast<Pool>(i)))};
  }
  return found;
}

}  // namespace terrace
