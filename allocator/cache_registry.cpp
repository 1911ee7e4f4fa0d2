#include "allocator/cache_registry.hpp"

#include <pthread.h>

#include <algorithm>
#include <vector>

namespace terrace {

constinit thread_local std::array<CacheEntry, kCacheSlots + 1> thread_caches{};

namespace {

enum class ThreadPhase : std::uint8_t { kFresh, kWatched, kEnding };
constinit thread_local ThreadPhase thread_phase = ThreadPhase::kFresh;

struct EndOfThread {
  ~EndOfThread() { CacheRegistry::end_of_thread(); }
};

void watch_this_thread() {
  static thread_local EndOfThread at_end;
  (void)at_end;
  thread_phase = ThreadPhase::kWatched;
}

}  // namespace

struct CacheRegistry::State {
  std::mutex mutex;
  std::uint64_t last_number = 0;
  std::array<CachedPool*, kCacheSlots> slots{};
  std::vector<CachedPool*> pools;

  State() {
    pthread_atfork(
        [] {
          State& all = state();
          all.mutex.lock();
          for (CachedPool* pool : all.pools) pool->mutex_.lock();
        },
        [] { unlock_all(state()); },
        [] {
          for (CachedPool* pool : state().pools) pool->forked();
          unlock_all(state());
        });
  }
  static void unlock_all(State& all) {
    for (CachedPool* pool : all.pools) pool->mutex_.unlock();
    all.mutex.unlock();
  }
};

// Never destroyed: threads may end after static objects have gone.
CacheRegistry::State& CacheRegistry::state() {
  static auto* all = new State;
  return *all;
}

void CacheRegistry::add(CachedPool& pool) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  pool.key_.pool = ++all.last_number;
  const auto empty = std::find(all.slots.begin(), all.slots.end(), nullptr);
  pool.key_.slot = static_cast<std::size_t>(empty - all.slots.begin());
  if (empty != all.slots.end()) *empty = &pool;
  all.pools.push_back(&pool);
}

void CacheRegistry::remove(CachedPool& pool) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (pool.key_.slot < kCacheSlots) all.slots[pool.key_.slot] = nullptr;
  std::erase(all.pools, &pool);
}

bool CacheRegistry::admits(const CachedPool& pool) {
  return pool.key().slot < kCacheSlots && thread_phase != ThreadPhase::kEnding;
}

void CacheRegistry::set_cache(const CachedPool& pool, ThreadCache& cache) {
  if (thread_phase == ThreadPhase::kFresh) watch_this_thread();
  thread_caches[pool.key().slot] = {pool.key().pool, &cache};
}

void CacheRegistry::end_of_thread() {
  thread_phase = ThreadPhase::kEnding;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  for (std::size_t slot = 0; slot < kCacheSlots; ++slot) {
    CacheEntry& entry = thread_caches[slot];
    CachedPool* pool = all.slots[slot];
    if (entry.cache != nullptr && pool != nullptr && pool->key_.pool == entry.pool) {
      pool->thread_ended(*entry.cache);
    }
    entry = {};
  }
}

}  // namespace terrace
