#include "allocator/pinned_slab.hpp"

#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "allocator/host_room.hpp"
#include "runtime/assert.hpp"
#include "runtime/fault.hpp"
#include "runtime/pin_step.hpp"

namespace terrace {
namespace {

constexpr Bytes kPage = 4_KiB;
constexpr Bytes kHugePage = 2_MiB;
constexpr int kGap = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr int kMemory = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;

Error refused(const char* call, Bytes size) {
  return {.code = Errc::kOutOfMemory,
          .text = "the system refused " + format_bytes(size) + " of host memory (" + call +
                  "): " + std::strerror(errno),
          .bytes = size};
}

// Address space of `size` and a page behind it, from a multiple of kPinStep on; it faults when touched.
Result<Address> reserve(Bytes size) {
  const Bytes kept = size + kPage;
  const Bytes padded = kept + kPinStep;
  void* space = MAP_FAILED;
  errno = ENOMEM;
  if (!fault_point(FaultPoint::kHostMap) && padded > size)
    space = mmap(nullptr, padded.count(), PROT_NONE, kGap, -1, 0);
  if (space == MAP_FAILED) return refused("mmap", size);
  const auto start = reinterpret_cast<std::uintptr_t>(space);
  const std::uintptr_t base = round_up(Bytes(start), kPinStep).count();
  if (base > start) munmap(space, base - start);
  munmap(reinterpret_cast<void*>(base + kept.count()), start + padded.count() - (base + kept.count()));
  return reinterpret_cast<Address>(base);
}

void give_back(Address base, Bytes size) { munmap(base, size.count() + kPage.count()); }

// A kernel that can't populate would end the process where a page set aside is gone after all.
bool can_populate(Address base) { return madvise(base, 0, MADV_POPULATE_WRITE) == 0; }

bool map_explicit(Address base, Bytes size) {
  if (size.count() % kHugePage.count() != 0 || !can_populate(base)) return false;
  if (fault_point(FaultPoint::kHostMap)) return false;
  constexpr int kTwoMiB = 21 << MAP_HUGE_SHIFT;
  return mmap(base, size.count(), PROT_READ | PROT_WRITE, kMemory | MAP_HUGETLB | kTwoMiB, -1, 0) !=
         MAP_FAILED;
}

Status map_small(Address base, Bytes size, HugePages pages) {
  errno = ENOMEM;
  if (fault_point(FaultPoint::kHostMap) ||
      mmap(base, size.count(), PROT_READ | PROT_WRITE, kMemory, -1, 0) == MAP_FAILED) {
    return refused("mmap", size);
  }
  // A request: small pages are slower, not wrong. Where the system gives huge ones to all, off means off.
  (void)madvise(base, size.count(), pages == HugePages::kOff ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  return {};
}

// Before the first touch, which is what places a page. Not bound strictly: the kernel kills a process that
// touches more than a node has, where it could have taken the page from the next one.
void place(Address base, Bytes size, const std::vector<int>& nodes) {
  if (nodes.empty() || numa_available() < 0) return;
  bitmask* mask = numa_allocate_nodemask();
  for (const int node : nodes) numa_bitmask_setbit(mask, static_cast<unsigned>(node));
  (void)mbind(base, size.count(), nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE, mask->maskp,
              mask->size + 1, 0);
  numa_free_nodemask(mask);
}

Error with_limits(Error error) {
  const auto limits = memory_limits();
  if (!limits) return error;
  const LockLimit lock_limit = may_lock_any_amount() ? LockLimit::kIgnored : LockLimit::kCounts;
  error.text += "; " + least_room(*limits, lock_limit);
  return error;
}

Status touch_and_pin_slab(Device& device, Address base, Bytes size, const SlabOptions& options,
                          FirstTouch first_touch) {
  // The kernel copies pinned pages at once when the process forks, where it only notes others: a data loader
  // would cost the whole pool again.
  (void)madvise(base, size.count(), MADV_DONTFORK);
  place(base, size, options.numa_nodes);
  const auto node = options.numa_nodes.size() == 1 ? std::optional(options.numa_nodes.front()) : std::nullopt;
  return touch_and_pin(device, base, size,
                       {.cpus = usable_cpus(node),
                        .first_touch = first_touch,
                        .touching = options.touching_threads,
                        .pinning = options.pinning_threads});
}

}  // namespace

Status check_numa_nodes(const std::vector<int>& nodes) {
  if (numa_available() < 0) return {};  // one node, and nothing to ask
  for (const int node : nodes) {
    const std::string name = "NUMA node " + std::to_string(node);
    const auto bit = static_cast<unsigned>(node);
    const bool exists =
        node >= 0 && node <= numa_max_node() && numa_bitmask_isbitset(numa_nodes_ptr, bit) != 0;
    const char* problem = nullptr;
    if (!exists) {
      problem = " does not exist";
    } else if (numa_node_size64(node, nullptr) == 0) {
      problem = " has no memory";
    } else if (numa_bitmask_isbitset(numa_all_nodes_ptr, bit) == 0) {
      problem = " is closed to this process (cpuset.mems)";
    }
    if (problem != nullptr) {
      return Error{.code = Errc::kInvalidArgument,
                   .text = name + problem + "; `numactl --hardware` lists those that would do"};
    }
  }
  return {};
}

Result<std::unique_ptr<PinnedSlab>> PinnedSlab::create(Device& device, Bytes size,
                                                       const SlabOptions& options) {
  TERRACE_CHECK(size > 0_B && size.count() % kPage.count() == 0, "a slab is made of whole pages");
  auto reserved = reserve(size);
  if (!reserved) return with_limits(std::move(reserved).error());
  const Address base = *reserved;
  const auto made = [&](HugePages pages) {
    return std::unique_ptr<PinnedSlab>(new PinnedSlab(device, base, size, pages));
  };
  // The pages set aside are for the whole machine: those of one node may be gone, which the touch finds out.
  if (options.huge_pages == HugePages::kExplicit && map_explicit(base, size) &&
      touch_and_pin_slab(device, base, size, options, FirstTouch::kPopulate).ok()) {
    return made(HugePages::kExplicit);
  }
  const HugePages pages = options.huge_pages == HugePages::kOff ? HugePages::kOff : HugePages::kTransparent;
  Status ready;
  if (const auto limits = memory_limits()) ready = room_for(size, *limits);
  if (ready.ok()) {
    ready = map_small(base, size, pages);
    if (ready.ok()) ready = touch_and_pin_slab(device, base, size, options, FirstTouch::kWrite);
    if (ready.ok()) return made(pages);
    ready = with_limits(ready.error());
  }
  give_back(base, size);
  Error error = ready.error();
  error.text = "no slab of " + format_bytes(size) + ": " + error.text;
  return error;
}

PinnedSlab::~PinnedSlab() {
  unpin_pieces(device_, base_, size_);
  give_back(base_, size_);
}

}  // namespace terrace
