// The inside of HbmPool: the centre, the threads' caches of it, and who may touch what.
//
// Methods named _slowly take the lock; all others but the lock-free ones of Quotas want it held. The caches
// of other threads are touched only while a StoppedThreads lives.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "allocator/cache_registry.hpp"
#include "allocator/hbm_centre.hpp"
#include "allocator/hbm_pool.hpp"
#include "allocator/live_counter.hpp"
#include "allocator/thread_cache.hpp"

namespace terrace {

struct HbmPool::Impl final : CachedPool {
  Impl(Device& device, std::unique_ptr<HbmCentre> centre);

  // Holds every thread but the caller off its cache of this pool.
  class StoppedThreads {
   public:
    explicit StoppedThreads(Impl& pool);
    ~StoppedThreads();
    StoppedThreads(const StoppedThreads&) = delete;
    StoppedThreads& operator=(const StoppedThreads&) = delete;

   private:
    Impl& pool_;
    ThreadCache* own_;
  };

  struct Wanted {
    Stream stream;
    Bytes size;
    Pool pool = Pool::kScratch;
    BlockOptions options;
    [[nodiscard]] Bytes span() const { return round_up(std::max(size, 1_B), kUnit); }
  };
  [[nodiscard]] Result<Block> allocate_slowly(const Wanted& wanted);
  // The fast paths of large blocks, inside the gate, which they leave.
  [[nodiscard, gnu::noinline]] static Address take_large(ThreadCache& cache, Stream stream, Bytes size,
                                                         Pool pool);
  [[nodiscard, gnu::noinline]] static bool put_large(ThreadCache& cache, Stream stream, const Block& block);
  // Ends of the fast paths where the counter has more to do; they leave the gate.
  [[nodiscard, gnu::noinline, gnu::cold]] static Address taken(ThreadCache& cache, Address at, Bytes size);
  [[nodiscard, gnu::noinline, gnu::cold]] static bool put_away(ThreadCache& cache, std::uint64_t units);
  // The caches' take and put to the end, the lane found wherever it is; the gate stays as it is.
  [[nodiscard]] Address take(ThreadCache& cache, const Wanted& wanted);
  [[nodiscard]] bool put(ThreadCache& cache, Stream stream, Address at, BlockWord word);
  void count_removed(ThreadCache* own, BlockWord word);
  [[nodiscard]] Result<Block> allocate(const Wanted& wanted);
  [[nodiscard]] Result<Address> obtain(const Wanted& wanted, StreamOrder::Index index, ThreadCache* own);
  [[nodiscard]] Result<HbmCentre::Carved> carve(const HbmCentre::Request& request, ThreadCache* own);

  [[nodiscard]] Status free_slowly(Stream stream, Address at);
  [[nodiscard]] Status free(Stream stream, Address at, BlockWord word);
  void give_back(Address at, const Pending& pending) { centre->give_back(at, pending); }
  // The word of the live block that starts at `at`. Errors: kInvalidArgument, saying what is there instead.
  [[nodiscard]] Result<BlockWord> live_word(Address at) const;

  // This thread's cache, made where there may be one; else null.
  [[nodiscard]] ThreadCache* own_cache();
  [[nodiscard]] ThreadCache* own_cache_if_any() const { return cache_of_this_thread(key()); }
  [[nodiscard]] LiveCounter& counter_of(ThreadCache* own) {
    return own != nullptr ? own->counter() : cacheless;
  }
  // The bit of a stream, caches emptied where that is needed to find one.
  [[nodiscard]] Result<StreamOrder::Index> index_of(Stream stream);
  ThreadCache::Lane& lane_of(ThreadCache& cache, Stream stream, StreamOrder::Index index, Pool pool);
  void drop_lane(ThreadCache& cache, std::size_t lane);
  void empty_lane(ThreadCache& cache, ThreadCache::Lane& lane);
  void empty_half(ThreadCache::Lane& lane, ThreadCache::SmallBin& bin);
  enum class Lanes : std::uint8_t { kKept, kDropped };
  void empty_cache(ThreadCache& cache, Lanes lanes);
  Bytes empty_all(Lanes lanes);  // returns what was live while all stood still
  [[nodiscard]] Status refuse_in_child() const;

  [[nodiscard]] LiveTotals totals() const;
  void restart_peaks(LiveTotals::Since since);
  [[nodiscard]] Result<HeapWalk> walk();

  void thread_ended(ThreadCache& cache) override;
  void forked() override;
  std::mutex& mutex() { return mutex_; }

  Device& device;
  std::unique_ptr<HbmCentre> centre;
  mutable PublishedLive published;
  mutable LiveCounter cacheless;  // what threads without a cache take and free
  Quotas quotas;
  std::vector<std::unique_ptr<ThreadCache>> caches;
  bool in_child = false;
  // Each block is told to the recorder: no thread has a cache, so that every call comes by here.
  const bool recorded;
};

}  // namespace terrace
