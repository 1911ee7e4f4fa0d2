// Device memory at stable addresses, inside a hard budget.
//
// A block freed on a stream may be reused on that stream at once. On another stream reuse is ordered behind
// the point of the free by a device-side wait; the host never waits. Blocks of long-lived pools (weights,
// optimizer, gradient, comm) and of short-lived ones (activation, expert, scratch) come from separate ranges,
// and in each small ones apart from large. A thread that takes what it freed before touches no lock and no
// shared cache line (thread_cache.hpp). The pool never calls up: out of budget is a value, and the caller
// decides. Why it is built so: docs/design/0005-hbm-pool.md.
//
// Every method may be called from any thread, on any block. A child of fork() has no device: there every call
// that would change something is refused (kNotSupported).
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "allocator/block.hpp"
#include "allocator/cache_registry.hpp"
#include "allocator/heap_walk.hpp"
#include "allocator/pool_usage.hpp"
#include "allocator/quota.hpp"
#include "runtime/device.hpp"

namespace terrace {

class HbmPool {
 public:
  struct Options {
    Bytes budget;   // never exceeded by mapped memory, rounding included
    Bytes chunk{};  // the largest, of physical memory; zero: from the budget (docs/design/0003-chunk-size.md)
  };
  struct BlockOptions {
    TenantId tenant{};        // whose quota the block counts in
    Bytes alignment = 512_B;  // of the address: a power of two up to the chunk
  };
  [[nodiscard]] static Result<std::unique_ptr<HbmPool>> create(Device& device, Options options);
  ~HbmPool();  // every block freed before; waits for the streams they were freed on

  // Returns a block of at least `size` bytes (zero counts as one) in a range of a multiple of 512 bytes,
  // 512-byte aligned, ordered after earlier frees of that range. Errors: kOutOfBudget (nothing changed; spill
  // and ask again; the text says whether the budget refused or which quota), kOutOfMemory, kInvalidArgument
  // (the stream has ended, or never was; bad options), kDeviceLost.
  [[nodiscard]] Result<Block> allocate(Stream stream, Bytes size, Pool pool) {
    if (const Address at = take_cached(stream, size, pool)) [[likely]]
      return Block{at, size, pool};
    return allocate_slowly(stream, size, pool);
  }
  [[nodiscard]] Result<Block> allocate(Stream stream, Bytes size, Pool pool, const BlockOptions& options);

  // Gives the block back once `stream` has passed this point; a stream that has ended has. Errors:
  // kInvalidArgument where no live block starts at the address (freed before, foreign, an interior pointer),
  // kOutOfMemory (64 other streams have frees pending). On error nothing changed. Two frees of one block at
  // the same time from two threads are a race between those threads, and not caught.
  Status free(Stream stream, const Block& block) {
    if (put_cached(stream, block)) [[likely]]
      return {};
    return free_slowly(stream, block.address);
  }
  // Gives the block back now: the caller has seen every use of it complete, and what its stream had before
  // the allocation.
  Status free_completed(const Block& block);

  // Unmaps every free chunk; the host waits for the last use of each. Returns the bytes given back to the
  // device.
  Bytes trim();
  // Changes the budget. Lowered under what is mapped, free chunks are given back first; what remains above it
  // is kept and no more is mapped until usage falls. Returns the bytes by which mapped memory still exceeds
  // it.
  Bytes set_budget(Bytes budget);

  // Limits on live bytes inside the budget; kNoLimit ends one. quota.hpp says what counts.
  void set_limit(Pool pool, Bytes limit);
  [[nodiscard]] Status set_limit(TenantId tenant, Bytes limit);
  [[nodiscard]] Result<TenantId> tenant(std::string_view label);
  [[nodiscard]] std::vector<TenantUsage> tenants() const;

  // The live block whose range holds `address`, interior pointers included. Wait-free.
  [[nodiscard]] std::optional<Block> find(const std::byte* address) const;

  // Live bytes are exact; peaks as live_counter.hpp says: exact for one thread, else a close upper bound.
  [[nodiscard]] PoolUsage usage() const;
  // Forgets the peaks: they start again from what is held now.
  void reset_peaks();
  // The most bytes live at one time since the last call.
  Bytes take_watermark();
  // A block that allocate() could serve now without exceeding the budget, at least; a hint for messages. What
  // moving free chunks would give is not counted.
  [[nodiscard]] Bytes largest_available() const;

  // Checks, with every thread held off, that each byte of each mapped chunk lies in exactly one live block,
  // cached block or free extent, and that all counters agree. Errors: kInvalidArgument, saying where.
  [[nodiscard]] Result<HeapWalk> walk() const;

 private:
  struct Impl;
  // From and to this thread's cache; null, false: nothing done, and the slow way decides.
  [[nodiscard]] Address take_cached(Stream stream, Bytes size, Pool pool);
  [[nodiscard]] bool put_cached(Stream stream, const Block& block);
  [[nodiscard]] Result<Block> allocate_slowly(Stream stream, Bytes size, Pool pool);
  [[nodiscard]] Status free_slowly(Stream stream, Address at);
  explicit HbmPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  CacheKey key_;
};

}  // namespace terrace
