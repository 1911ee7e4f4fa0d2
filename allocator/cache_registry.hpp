// Where a thread finds its cache of a pool, and what happens to caches when a thread, a pool or the process's
// other half goes.
//
// Each thread has an array of pointers, one for each pool that has a slot; an entry names its pool by a
// number that is never used again, so what a dead pool left in other threads' arrays is never followed. Pools
// beyond the slots do without caches. A thread that ends hands its cached blocks to the pools that still
// exist. After fork() the child's pools refuse: the device, its streams and the other threads stayed with the
// parent.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

namespace terrace {

class ThreadCache;

inline constexpr std::size_t kCacheSlots = 16;

struct CacheEntry {
  std::uint64_t pool = 0;  // its number
  ThreadCache* cache = nullptr;
};
// The last entry stays empty: it is the slot of pools that have none.
extern constinit thread_local std::array<CacheEntry, kCacheSlots + 1> thread_caches;

// What finds a pool's cache in any thread.
struct CacheKey {
  std::uint64_t pool = 0;
  std::size_t slot = kCacheSlots;
};
// This thread's cache of a pool, or null.
[[nodiscard, gnu::always_inline]] inline ThreadCache* cache_of_this_thread(const CacheKey& key) {
  const CacheEntry& entry = thread_caches[key.slot];
  if (entry.pool != key.pool) return nullptr;
  if (entry.cache == nullptr) __builtin_unreachable();  // an entry that names a pool has its cache
  return entry.cache;
}

// A pool, as the registry sees it.
class CachedPool {
 public:
  virtual ~CachedPool() = default;
  [[nodiscard]] const CacheKey& key() const { return key_; }

 protected:
  friend class CacheRegistry;
  std::mutex mutex_;                                  // taken after the registry's
  virtual void thread_ended(ThreadCache& cache) = 0;  // takes the lock itself; ends the cache
  virtual void forked() = 0;                          // in the child, the lock held

 private:
  CacheKey key_;
};

class CacheRegistry {
 public:
  static void add(CachedPool& pool);  // gives it its number and slot
  static void remove(CachedPool& pool);
  // Whether this thread may have a cache of the pool: it has a slot, and the thread is not ending.
  [[nodiscard]] static bool admits(const CachedPool& pool);
  // Precondition: admits(pool), whose lock is held.
  static void set_cache(const CachedPool& pool, ThreadCache& cache);

  static void end_of_thread();

 private:
  struct State;
  static State& state();
};

}  // namespace terrace
