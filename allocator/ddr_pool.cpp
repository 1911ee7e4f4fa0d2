#include "allocator/ddr_pool.hpp"

#include <numa.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "allocator/extent_map.hpp"
#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

constexpr Bytes kPage = 4_KiB;

void place(void* slab, Bytes size, const std::vector<int>& nodes) {
  if (nodes.empty() || numa_available() < 0) return;
  if (nodes.size() == 1) return numa_tonode_memory(slab, size.count(), nodes.front());
  bitmask* mask = numa_allocate_nodemask();
  for (const int node : nodes) numa_bitmask_setbit(mask, static_cast<unsigned>(node));
  numa_interleave_memory(slab, size.count(), mask);
  numa_free_nodemask(mask);
}

// Host memory on the wanted nodes, every page present, so that pinning finds it in place.
Result<Address> map_slab(Bytes size, const DdrPool::Options& options) {
  void* slab = fault_point(FaultPoint::kHostMap)
                   ? MAP_FAILED
                   : mmap(nullptr, size.count(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (slab == MAP_FAILED) {
    return Error{
        Errc::kOutOfMemory, "the system refused " + format_bytes(size) + " of host memory (mmap)", size, {}};
  }
  // Both are requests: without huge pages or on another node the memory is slower, not wrong.
  if (options.hugepages) (void)madvise(slab, size.count(), MADV_HUGEPAGE);
  place(slab, size, options.numa_nodes);
  auto* bytes = static_cast<volatile unsigned char*>(slab);
  for (std::uint64_t at = 0; at < size.count(); at += kPage.count()) bytes[at] = 0;
  return static_cast<Address>(slab);
}

struct Slab {
  Address base = nullptr;
  Bytes size;
  ExtentMap free;
};

}  // namespace

struct DdrPool::Impl {
  Device& device;
  Options options;
  mutable std::mutex mutex;
  std::vector<std::unique_ptr<Slab>> slabs;
  BlockTable live;
  PoolUsage usage;

  Impl(Device& d, Options o) : device(d), options(o) { usage.budget = o.budget; }
  Result<Slab*> slab_for(Bytes span, Pool pool);
  Result<Slab*> pin_slab(Bytes size);
};

Result<Slab*> DdrPool::Impl::slab_for(Bytes span, Pool pool) {
  Slab* best = nullptr;
  Bytes best_size;
  for (auto& slab : slabs) {
    const auto fit = slab->free.best_fit(span);
    if (fit && (best == nullptr || fit->size < best_size)) {
      best = slab.get();
      best_size = fit->size;
    }
  }
  if (best != nullptr) return best;
  const Bytes room = round_down(saturating_sub(usage.budget, usage.mapped), kPage);
  if (room < span) {
    return out_of_budget(span, pool,
                         format_bytes(span) + " of pinned host memory for " + name_of(pool) +
                             " do not fit: " + format_bytes(usage.live) + " of the DDR budget of " +
                             format_bytes(usage.budget) + " are in use");
  }
  return pin_slab(std::min(room, std::max(span, round_up(options.slab, kPage))));
}

Result<Slab*> DdrPool::Impl::pin_slab(Bytes size) {
  const Nanoseconds began = steady_clock().now();
  auto base = map_slab(size, options);
  if (!base) return std::move(base).error();
  if (auto pinned = device.pin(*base, size); !pinned) {
    munmap(*base, size.count());
    return pinned.error();
  }
  metrics().add<Metric::kPinSeconds>(steady_clock().now() - began);
  auto slab = std::make_unique<Slab>(Slab{*base, size, {}});
  slab->free.insert({0, size, 0});
  usage.set_mapped(usage.mapped + size);
  slabs.push_back(std::move(slab));
  return slabs.back().get();
}

DdrPool::DdrPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<DdrPool>> DdrPool::create(Device& device, Options options) {
  return std::unique_ptr<DdrPool>(new DdrPool(std::make_unique<Impl>(device, options)));
}

DdrPool::~DdrPool() {
  TERRACE_CHECK(impl_->live.count() == 0, "every block is freed before its pool");
  for (auto& slab : impl_->slabs) {
    impl_->device.unpin(slab->base, slab->size);
    munmap(slab->base, slab->size.count());
  }
}

Result<Block> DdrPool::allocate(Bytes size, Pool pool) {
  const Bytes span = round_up(std::max(size, 1_B), kPage);
  std::lock_guard lock(impl_->mutex);
  auto slab = impl_->slab_for(span, pool);
  if (!slab) return std::move(slab).error();
  const auto fit = (*slab)->free.best_fit(span);
  TERRACE_CHECK(fit.has_value(), "the slab chosen has room");
  (*slab)->free.take(fit->offset, span);
  const Block block{(*slab)->base + fit->offset, size, pool};
  impl_->live.insert(block, span);
  impl_->usage.add(pool, span);
  return block;
}

void DdrPool::free(const Block& block) {
  std::lock_guard lock(impl_->mutex);
  const Bytes span = impl_->live.remove(block.address);
  for (auto& slab : impl_->slabs) {
    if (block.address < slab->base || block.address >= slab->base + slab->size.count()) continue;
    slab->free.insert({static_cast<std::uint64_t>(block.address - slab->base), span, 0});
    impl_->usage.remove(block.pool, span);
    return;
  }
  TERRACE_CHECK(false, "a live block lies in a slab");
}

void DdrPool::set_budget(Bytes budget) {
  std::lock_guard lock(impl_->mutex);
  impl_->usage.budget = budget;
}

PoolUsage DdrPool::usage() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->usage;
}

void DdrPool::reset_peaks() {
  std::lock_guard lock(impl_->mutex);
  impl_->usage.reset_peaks();
}

}  // namespace terrace
