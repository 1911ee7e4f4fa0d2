#include "allocator/small_blocks.hpp"

#include <terrace_jemalloc.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

#include "allocator/extent_map.hpp"
#include "runtime/assert.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr Bytes kPage = 4_KiB;
constexpr Bytes kLine = 64_B;

// Why the source refused the extent that this thread's allocate() asks jemalloc for: jemalloc passes on only
// that there is none.
constinit thread_local std::optional<Error>* refusal = nullptr;

void refused(Error error) {
  if (refusal != nullptr) *refusal = std::move(error);
}

// What was taken from the source, an area each, and which of it jemalloc does not use.
class Areas {
 public:
  Areas(SmallBlockSource& source, Bytes area) : source_(source), area_(area) {}

  // An extent of a multiple of kPage; null: refused.
  Address take(Bytes size);
  void give(Address address, Bytes size);
  bool same_area(Address a, Address b);
  // Areas without an extent in use, or all of them, go back to the source.
  enum class Release : std::uint8_t { kFree, kAll };
  Bytes release(Release which);
  [[nodiscard]] Bytes held() const { return Bytes(held_.load(std::memory_order_relaxed)); }

 private:
  struct Area {
    Bytes size;
    ExtentMap free;
  };
  using Map = std::map<Address, Area>;

  Map::iterator area_of(Address address) { return std::prev(areas_.upper_bound(address)); }
  Result<Address> take_from_source(Bytes size);
  bool add_area(Bytes least);
  void list(Map::iterator area) { by_largest_.emplace(area->second.free.largest(), area->first); }
  void unlist(Map::iterator area) { by_largest_.erase({area->second.free.largest(), area->first}); }

  SmallBlockSource& source_;
  const Bytes area_;
  std::mutex mutex_;
  Map areas_;
  std::set<std::pair<Bytes, Address>> by_largest_;  // every area, by its largest free extent
  std::atomic<std::uint64_t> held_{0};
};

Result<Address> Areas::take_from_source(Bytes size) {
  if (fault_point(FaultPoint::kSmallBlocksTake)) {
    return Error{Errc::kOutOfMemory, "no host memory for an area of " + format_bytes(size), size, {}};
  }
  return source_.take(size);
}

bool Areas::add_area(Bytes least) {
  Bytes size = std::max(area_, least);
  auto base = take_from_source(size);
  if (!base && size > least) {
    size = least;
    base = take_from_source(size);
  }
  if (!base) {
    refused(std::move(base).error());
    return false;
  }
  const auto area = areas_.emplace(*base, Area{size, {}}).first;
  area->second.free.insert({0, size, 0});
  list(area);
  held_.fetch_add(size.count(), std::memory_order_relaxed);
  return true;
}

Address Areas::take(Bytes size) {
  const std::lock_guard lock(mutex_);
  auto found = by_largest_.lower_bound({size, nullptr});
  if (found == by_largest_.end()) {
    if (!add_area(size)) return nullptr;
    found = by_largest_.lower_bound({size, nullptr});
  }
  const auto area = areas_.find(found->second);
  const auto extent = area->second.free.best_fit(size);
  TERRACE_CHECK(extent.has_value(), "the area chosen has room");
  unlist(area);
  area->second.free.take(extent->offset, size);
  list(area);
  return area->first + extent->offset;
}

void Areas::give(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  const auto area = area_of(address);
  unlist(area);
  area->second.free.insert({static_cast<std::uint64_t>(address - area->first), size, 0});
  list(area);
}

bool Areas::same_area(Address a, Address b) {
  const std::lock_guard lock(mutex_);
  return area_of(a) == area_of(b);
}

Bytes Areas::release(Release which) {
  const std::lock_guard lock(mutex_);
  Bytes released;
  for (auto area = areas_.begin(); area != areas_.end();) {
    const Bytes size = area->second.size;
    if (which == Release::kFree && area->second.free.total() != size) {
      ++area;
      continue;
    }
    unlist(area);
    ASAN_UNPOISON_MEMORY_REGION(area->first, size.count());
    source_.give(area->first, size);
    released += size;
    area = areas_.erase(area);
  }
  held_.fetch_sub(released.count(), std::memory_order_relaxed);
  return released;
}

// What jemalloc calls for extents. The memory is committed for good: hooks to commit, decommit and purge are
// left out, which tells jemalloc that there is no such thing.
struct Hooks {
  extent_hooks_t table{};
  Areas& areas;

  explicit Hooks(Areas& a);
};

Areas& areas_of(extent_hooks_t* hooks) { return reinterpret_cast<Hooks*>(hooks)->areas; }

void* alloc_extent(extent_hooks_t* hooks, void* wanted, std::size_t size, std::size_t alignment, bool* zero,
                   bool* commit, unsigned /*arena*/) noexcept {
  // An address of jemalloc's choice would grow an extent in place, a wider alignment would serve aligned
  // blocks: neither is needed, and no is an answer.
  if (wanted != nullptr || alignment > kPage.count()) return nullptr;
  const Address extent = areas_of(hooks).take(Bytes(size));
  if (extent == nullptr) return nullptr;
  if (*zero) std::memset(extent, 0, size);
  *commit = true;
  return extent;
}

// Here and below false means done: it is jemalloc's convention.
bool dalloc_extent(extent_hooks_t* hooks, void* extent, std::size_t size, bool /*committed*/,
                   unsigned /*arena*/) noexcept {
  areas_of(hooks).give(static_cast<Address>(extent), Bytes(size));
  return false;
}

bool split_extent(extent_hooks_t* /*hooks*/, void* /*extent*/, std::size_t /*size*/, std::size_t /*first*/,
                  std::size_t /*second*/, bool /*committed*/, unsigned /*arena*/) noexcept {
  return false;
}

// Neighbours of two areas may be pinned apart: no block may lie across.
bool merge_extents(extent_hooks_t* hooks, void* a, std::size_t /*a_size*/, void* b, std::size_t /*b_size*/,
                   bool /*committed*/, unsigned /*arena*/) noexcept {
  return !areas_of(hooks).same_area(static_cast<Address>(a), static_cast<Address>(b));
}

Hooks::Hooks(Areas& a) : areas(a) {
  table.alloc = alloc_extent;
  table.dalloc = dalloc_extent;
  table.split = split_extent;
  table.merge = merge_extents;
}

// jemalloc's arena_config_t, which its public header lacks: the argument of experimental.arenas_create_ext.
struct ArenaConfig {
  extent_hooks_t* extent_hooks;
  bool metadata_use_hooks;
};

std::optional<unsigned> create_arena(extent_hooks_t* hooks) {
  if (fault_point(FaultPoint::kSmallBlocksArena)) return std::nullopt;
  ArenaConfig config{.extent_hooks = hooks, .metadata_use_hooks = false};
  unsigned arena = 0;
  std::size_t size = sizeof arena;
  const int wrong =
      terrace_je_mallctl("experimental.arenas_create_ext", &arena, &size, &config, sizeof config);
  return wrong == 0 ? std::optional(arena) : std::nullopt;
}

void control_arena(unsigned arena, const char* verb) {
  char name[64];
  std::snprintf(name, sizeof name, "arena.%u.%s", arena, verb);
  const int wrong = terrace_je_mallctl(name, nullptr, nullptr, nullptr, 0);
  TERRACE_CHECK(wrong == 0, "jemalloc knows its own arena");
}

constexpr unsigned kNoTcache = ~0U;

// One thread's blocks for reuse. `busy` is held for each use: the thread's own, where it is free, and the
// rare flush by another.
struct alignas(64) Cache {
  std::atomic<bool> busy{false};
  unsigned tcache = kNoTcache;
  std::atomic<std::int64_t> live{0};  // bytes allocated less bytes freed through this cache, of either sign
  Cache* next = nullptr;              // set before the cache is in the list

  void lock() {
    while (busy.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
  }
  void unlock() { busy.store(false, std::memory_order_release); }
  // Holding `busy`.
  void count(std::int64_t bytes) {
    live.store(live.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] int flag() {
    if (tcache == kNoTcache) create();
    return tcache == kNoTcache ? MALLOCX_TCACHE_NONE : static_cast<int>(MALLOCX_TCACHE(tcache));
  }
  void create();
  void drop();
};

// Without one the thread is slower, not wrong, and asks again at its next call.
void Cache::create() {
  if (fault_point(FaultPoint::kSmallBlocksCache)) return;
  unsigned id = 0;
  std::size_t size = sizeof id;
  if (terrace_je_mallctl("tcache.create", &id, &size, nullptr, 0) == 0) tcache = id;
}

// Destroyed rather than flushed: jemalloc makes a flushed one anew in the middle of an allocation, and aborts
// at the next where it found no memory for it.
void Cache::drop() {
  if (tcache == kNoTcache) return;
  const int wrong = terrace_je_mallctl("tcache.destroy", nullptr, nullptr, &tcache, sizeof tcache);
  TERRACE_CHECK(wrong == 0, "jemalloc knows its own cache");
  tcache = kNoTcache;
}

std::atomic<std::uint64_t> next_serial{1};

}  // namespace

// Shared with the threads that have a cache of it: they may end after it.
struct SmallBlocks::Impl {
  const std::uint64_t serial = next_serial.fetch_add(1, std::memory_order_relaxed);  // never used twice
  Areas areas;
  Hooks hooks;
  unsigned arena = 0;
  std::mutex mutex;                     // before a cache's `busy`
  std::atomic<Cache*> caches{nullptr};  // all there ever were: only grows, so that live() needs no lock
  std::vector<Cache*> unused;           // of threads that have ended
  std::atomic<std::int64_t> uncached_live{0};  // as Cache::live, of threads on their way out

  Impl(SmallBlockSource& source, const Options& options) : areas(source, options.area), hooks(areas) {}
  ~Impl();
  Cache* add_cache();
  void retire(Cache* cache);
  void reclaim();
  void close();
  [[nodiscard]] Bytes live() const;
  [[nodiscard]] static Cache* mine(const std::shared_ptr<Impl>& impl);
  [[nodiscard]] static Address take(const std::shared_ptr<Impl>& impl, Bytes span);
};

namespace {

struct CacheEntry {
  std::uint64_t serial = 0;
  Cache* cache = nullptr;
};

// The one used last, and whether the thread's table is gone: plain data, to be read at any time of its life.
constinit thread_local CacheEntry last_used;
constinit thread_local bool thread_ends = false;

}  // namespace

// A thread's caches, of all SmallBlocks that it has used.
struct SmallBlocks::ThreadCaches {
  struct Row {
    CacheEntry entry;
    std::weak_ptr<SmallBlocks::Impl> owner;
  };
  std::vector<Row> rows;

  ThreadCaches() = default;
  ThreadCaches(const ThreadCaches&) = delete;
  ThreadCaches& operator=(const ThreadCaches&) = delete;
  ~ThreadCaches() {
    thread_ends = true;
    last_used = {};
    for (const Row& row : rows) {
      if (const auto owner = row.owner.lock()) owner->retire(row.entry.cache);
    }
  }
};

SmallBlocks::Impl::~Impl() {
  for (Cache* cache = caches.load(std::memory_order_acquire); cache != nullptr;) {
    delete std::exchange(cache, cache->next);
  }
}

Cache* SmallBlocks::Impl::add_cache() {
  const std::lock_guard lock(mutex);
  if (!unused.empty()) {
    Cache* cache = unused.back();
    unused.pop_back();
    return cache;
  }
  auto* cache = new Cache;
  cache->next = caches.load(std::memory_order_relaxed);
  caches.store(cache, std::memory_order_release);
  return cache;
}

void SmallBlocks::Impl::retire(Cache* cache) {
  const std::lock_guard lock(mutex);
  const std::lock_guard use(*cache);
  cache->drop();
  unused.push_back(cache);
}

Cache* SmallBlocks::Impl::mine(const std::shared_ptr<Impl>& impl) {
  if (last_used.serial == impl->serial) return last_used.cache;
  if (thread_ends) return nullptr;
  thread_local ThreadCaches table;
  auto& rows = table.rows;
  auto row =
      std::find_if(rows.begin(), rows.end(), [&](const auto& r) { return r.entry.serial == impl->serial; });
  if (row == rows.end()) {
    std::erase_if(rows, [](const auto& r) { return r.owner.expired(); });
    rows.push_back({{impl->serial, impl->add_cache()}, impl});
    row = rows.end() - 1;
  }
  last_used = row->entry;
  return last_used.cache;
}

Address SmallBlocks::Impl::take(const std::shared_ptr<Impl>& impl, Bytes span) {
  const int arena = static_cast<int>(MALLOCX_ARENA(impl->arena));
  const auto bytes = static_cast<std::int64_t>(span.count());
  Cache* cache = mine(impl);
  if (cache == nullptr) {
    void* block = terrace_je_mallocx(span.count(), arena | MALLOCX_TCACHE_NONE);
    if (block != nullptr) impl->uncached_live.fetch_add(bytes, std::memory_order_relaxed);
    return static_cast<Address>(block);
  }
  const std::lock_guard use(*cache);
  void* block = terrace_je_mallocx(span.count(), arena | cache->flag());
  if (block != nullptr) cache->count(bytes);
  return static_cast<Address>(block);
}

// Everything that is free goes from the caches and from jemalloc to the areas, where neighbours join.
void SmallBlocks::Impl::reclaim() {
  {
    const std::lock_guard lock(mutex);
    for (Cache* cache = caches.load(std::memory_order_relaxed); cache != nullptr; cache = cache->next) {
      const std::lock_guard use(*cache);
      cache->drop();
    }
  }
  control_arena(arena, "purge");
}

void SmallBlocks::Impl::close() {
  const std::lock_guard lock(mutex);
  for (Cache* cache = caches.load(std::memory_order_relaxed); cache != nullptr; cache = cache->next)
    cache->drop();
  control_arena(arena, "destroy");
  // jemalloc loses an extent where it finds no memory for its tables: what was taken is given all the same.
  areas.release(Areas::Release::kAll);
}

Bytes SmallBlocks::Impl::live() const {
  std::int64_t sum = uncached_live.load(std::memory_order_relaxed);
  for (const Cache* cache = caches.load(std::memory_order_acquire); cache != nullptr; cache = cache->next) {
    sum += cache->live.load(std::memory_order_relaxed);
  }
  // Beside running threads a free may be seen before the allocation it ends.
  return Bytes(static_cast<std::uint64_t>(std::max<std::int64_t>(sum, 0)));
}

SmallBlocks::SmallBlocks(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<SmallBlocks>> SmallBlocks::create(SmallBlockSource& source, Options options) {
  if (options.area < kPage || round_down(options.area, kPage) != options.area) {
    return Error{
        Errc::kInvalidArgument,
        "an area of " + std::to_string(options.area.count()) + " bytes: a multiple of 4 KiB would do",
        {},
        {}};
  }
  auto impl = std::make_shared<Impl>(source, options);
  const auto arena = create_arena(&impl->hooks.table);
  if (!arena)
    return Error{Errc::kOutOfMemory, "no memory for the tables of an arena of small blocks", {}, {}};
  impl->arena = *arena;
  return std::unique_ptr<SmallBlocks>(new SmallBlocks(std::move(impl)));
}

SmallBlocks::~SmallBlocks() {
  TERRACE_CHECK(impl_->live() == Bytes(), "every small block is freed before its pool");
  impl_->close();
}

// jemalloc's classes, four to each power of two, from which those that would share cache lines are left out.
Bytes SmallBlocks::span_of(Bytes size) {
  const Bytes lines = round_up(std::max(size, 1_B), kLine);
  const Bytes step(std::bit_floor(lines.count() - 1) / 4);
  return round_up(lines, std::max(step, kLine));
}

Bytes SmallBlocks::span_at(Address block) const { return Bytes(terrace_je_sallocx(block, 0)); }

Result<Address> SmallBlocks::allocate(Bytes size) {
  if (size >= kSmallBlockLimit) {
    return Error{
        Errc::kInvalidArgument,
        format_bytes(size) + " are no small block: those are under " + format_bytes(kSmallBlockLimit),
        size,
        {}};
  }
  const Bytes span = span_of(size);
  std::optional<Error> why;
  refusal = &why;
  Address block = Impl::take(impl_, span);
  // What other threads keep, or what lies in pieces, may be enough.
  if (block == nullptr && saturating_sub(impl_->areas.held(), impl_->live()) >= span) {
    impl_->reclaim();
    why.reset();
    block = Impl::take(impl_, span);
  }
  refusal = nullptr;
  if (block == nullptr) {
    if (why) return *std::move(why);
    return Error{Errc::kOutOfMemory, "no memory for the tables of small blocks", size, {}};
  }
  ASAN_UNPOISON_MEMORY_REGION(block, span.count());
  return block;
}

void SmallBlocks::free(Address block) {
  const Bytes span = span_at(block);
  const auto bytes = static_cast<std::int64_t>(span.count());
  ASAN_POISON_MEMORY_REGION(block, span.count());
  Cache* cache = Impl::mine(impl_);
  if (cache == nullptr) {
    terrace_je_sdallocx(block, span.count(), MALLOCX_TCACHE_NONE);
    impl_->uncached_live.fetch_sub(bytes, std::memory_order_relaxed);
    return;
  }
  const std::lock_guard use(*cache);
  terrace_je_sdallocx(block, span.count(), cache->flag());
  cache->count(-bytes);
}

Bytes SmallBlocks::purge() {
  impl_->reclaim();
  return impl_->areas.release(Areas::Release::kFree);
}

SmallBlocks::Usage SmallBlocks::usage() const { return {impl_->live(), impl_->areas.held()}; }

}  // namespace terrace
