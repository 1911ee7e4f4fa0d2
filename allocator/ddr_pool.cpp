#include "allocator/ddr_pool.hpp"

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "allocator/pinned_extents.hpp"
#include "allocator/small_blocks.hpp"
#include "runtime/assert.hpp"

namespace terrace {
namespace {

constexpr Bytes kPage = 4_KiB;

// The areas that small blocks are cut from are ranges like any other.
class AreaSource final : public SmallBlockSource {
 public:
  explicit AreaSource(PinnedExtents& extents) : extents_(extents) {}
  [[nodiscard]] Result<Address> take(Bytes size) override { return extents_.take(size); }
  void give(Address address, Bytes size) override { extents_.give(address, size); }

 private:
  PinnedExtents& extents_;
};

struct LiveBlock {
  Bytes span;
  Pool pool = Pool::kScratch;
  bool small = false;
};

}  // namespace

struct DdrPool::Impl {
  std::shared_ptr<HostLease> lease;
  PinnedExtents extents;
  AreaSource source{extents};
  std::unique_ptr<SmallBlocks> small;

  mutable std::mutex mutex;  // the two below; never held while the parts above are called
  std::unordered_map<const std::byte*, LiveBlock> live;
  PoolUsage blocks;  // live bytes only

  Impl(Device& device, PinnedExtents::Options options)
      : lease(options.lease), extents(device, std::move(options)) {}
  [[nodiscard]] Result<Address> take(Bytes size, const LiveBlock& block);
  [[nodiscard]] Error explain(Error refusal, Bytes size, Pool pool) const;
};

DdrPool::DdrPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<DdrPool>> DdrPool::create(Device& device, Options options) {
  if (Status nodes = check_numa_nodes(options.numa_nodes); !nodes.ok()) return nodes.error();
  PinnedExtents::Options extents;
  extents.lease = options.lease ? options.lease : std::make_shared<HostLease>(options.budget);
  extents.least_slab = round_up(options.slab, kPage);
  extents.slab.huge_pages = options.huge_pages;
  extents.slab.numa_nodes = options.numa_nodes;
  extents.say = std::move(options.say);
  auto impl = std::make_unique<Impl>(device, std::move(extents));
  auto small = SmallBlocks::create(impl->source, {});
  if (!small) return std::move(small).error();
  impl->small = std::move(small).value();
  return std::unique_ptr<DdrPool>(new DdrPool(std::move(impl)));
}

DdrPool::~DdrPool() { TERRACE_CHECK(impl_->live.empty(), "every block is freed before its pool"); }

Result<Address> DdrPool::Impl::take(Bytes size, const LiveBlock& block) {
  auto taken = block.small ? small->allocate(size) : extents.take(block.span);
  // What small blocks keep for reuse may be just what is missing.
  if (!taken && small->purge() > 0_B) taken = block.small ? small->allocate(size) : extents.take(block.span);
  return taken;
}

Error DdrPool::Impl::explain(Error refusal, Bytes size, Pool pool) const {
  refusal.bytes = size;
  refusal.pool = pool;
  if (refusal.code != Errc::kOutOfBudget) return refusal;
  const std::lock_guard lock(mutex);
  refusal.text = format_bytes(size) + " of pinned host memory for " + name_of(pool) +
                 " do not fit: " + format_bytes(blocks.live) + " of the DDR budget of " +
                 format_bytes(lease->budget()) + " are in use";
  return refusal;
}

Result<Block> DdrPool::allocate(Bytes size, Pool pool) {
  // Before anything is rounded: rounding up what is absurd would wrap around.
  if (size > impl_->lease->budget()) return impl_->explain(out_of_budget(size, pool, ""), size, pool);
  LiveBlock block{.span = {}, .pool = pool, .small = size < kSmallBlockLimit};
  block.span = block.small ? SmallBlocks::span_of(size) : round_up(size, kPage);
  auto address = impl_->take(size, block);
  if (!address) return impl_->explain(std::move(address).error(), size, pool);
  const std::lock_guard lock(impl_->mutex);
  const bool fresh = impl_->live.emplace(*address, block).second;
  TERRACE_CHECK(fresh, "a live block's address is its own");
  impl_->blocks.add(pool, block.span);
  return Block{*address, size, pool};
}

Status DdrPool::free(const Block& block) {
  LiveBlock freed;
  {
    const std::lock_guard lock(impl_->mutex);
    const auto found = impl_->live.find(block.address);
    if (found != impl_->live.end()) {
      freed = found->second;
      impl_->live.erase(found);
      impl_->blocks.remove(freed.pool, freed.span);
    }
  }
  if (freed.span == 0_B) {
    return Error{
        .code = Errc::kInvalidArgument,
        .text = impl_->extents.contains(block.address)
                    ? "free of a DDR block: the address is the start of none that is live; it was freed "
                      "already, or lies inside one"
                    : "free of a DDR block: the address is not of this pool",
        .bytes = block.size};
  }
  if (freed.small) {
    impl_->small->free(block.address);
  } else {
    impl_->extents.give(block.address, freed.span);
  }
  return {};
}

Bytes DdrPool::set_budget(Bytes budget) {
  impl_->lease->set_budget(budget);
  if (impl_->lease->excess() > 0_B) {
    impl_->small->purge();
    impl_->extents.trim(PinnedExtents::Until::kBudgetIsKept);
  }
  return impl_->lease->excess();
}

Bytes DdrPool::trim() {
  impl_->small->purge();
  return impl_->extents.trim(PinnedExtents::Until::kNothingIsFree);
}

PoolUsage DdrPool::usage() const {
  PoolUsage usage;
  {
    const std::lock_guard lock(impl_->mutex);
    usage = impl_->blocks;
  }
  usage.budget = impl_->lease->budget();
  usage.mapped = impl_->extents.mapped();
  usage.mapped_peak = impl_->extents.mapped_peak();
  return usage;
}

void DdrPool::reset_peaks() {
  impl_->extents.reset_peak();
  const std::lock_guard lock(impl_->mutex);
  impl_->blocks.reset_peaks();
}

}  // namespace terrace
