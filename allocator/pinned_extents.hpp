// Page-granular ranges of pinned host memory: slabs that come when they are needed, and the free part of
// them.
//
// A range freed is kept for the next one of the same size, and joined with its neighbours only when no range
// of that size fits: a second allocation of the same bytes costs two look-ups. New slabs are charged to the
// lease before they are mapped; they are pinned without any lock that take() and give() of others want.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "allocator/extent_map.hpp"
#include "allocator/host_lease.hpp"
#include "allocator/pinned_slab.hpp"

namespace terrace {

class PinnedExtents {
 public:
  struct Options {
    std::shared_ptr<HostLease> lease;
    Bytes least_slab = 64_MiB;  // mapped at a time; more where much is mapped already
    SlabOptions slab{};
    // Where a line for a person goes, each kind once; empty: stderr.
    std::function<void(std::string_view line)> say{};
  };

  PinnedExtents(Device& device, Options options);
  ~PinnedExtents();  // every range was given back
  PinnedExtents(const PinnedExtents&) = delete;
  PinnedExtents& operator=(const PinnedExtents&) = delete;

  // All below is thread-safe. Precondition: span is a multiple of 4 KiB, more than zero. Errors: kOutOfBudget
  // (the lease has no room, wholly free slabs given up included), kOutOfMemory as PinnedSlab. Nothing
  // changed.
  [[nodiscard]] Result<Address> take(Bytes span);
  // Precondition: exactly one earlier take, address and span.
  void give(Address address, Bytes span);

  // Unpins and unmaps slabs that are wholly free: every one, or until the lease's budget is kept. Returns the
  // bytes given back.
  enum class Until : std::uint8_t { kNothingIsFree, kBudgetIsKept };
  Bytes trim(Until until);

  [[nodiscard]] bool contains(const std::byte* address) const;
  [[nodiscard]] Bytes mapped() const;
  [[nodiscard]] Bytes mapped_peak() const;
  void reset_peak();

 private:
  struct Slab {
    std::unique_ptr<PinnedSlab> memory;
    Bytes free;
  };
  using Slabs = std::map<const std::byte*, Slab>;  // by base

  [[nodiscard]] std::optional<Address> take_free(Bytes span);  // mutex_ held, as the next four
  [[nodiscard]] std::optional<Address> best_fit(Bytes span);
  void join_kept();
  [[nodiscard]] Slab& slab_of(const std::byte* address);
  [[nodiscard]] Slabs::const_iterator slab_at(const std::byte* address) const;
  [[nodiscard]] std::vector<std::unique_ptr<PinnedSlab>> detach_free_slabs(Bytes enough);
  // growth_ held, mutex_ not.
  [[nodiscard]] Result<Address> grow(Bytes span);
  [[nodiscard]] Result<std::unique_ptr<PinnedSlab>> new_slab(Bytes span);
  [[nodiscard]] HostLease::Range wanted(Bytes span) const;
  [[nodiscard]] Bytes charge(Bytes span);
  Bytes release(std::vector<std::unique_ptr<PinnedSlab>> slabs);
  void note_pages(HugePages pages);

  Device& device_;
  const Options options_;
  std::mutex growth_;  // one slab is pinned at a time; taken before mutex_
  bool said_ = false;  // growth_ held

  mutable std::mutex mutex_;  // all below
  Slabs slabs_;
  ExtentMap free_;  // offsets are addresses: slabs never touch, so no extent spans two
  std::unordered_map<std::uint64_t, std::vector<Address>> kept_;  // freed and not joined, by span
  Bytes mapped_;
  Bytes mapped_peak_;
};

}  // namespace terrace
