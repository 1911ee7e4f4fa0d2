#include "allocator/block_table.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/assert.hpp"

namespace terrace {

void BlockTable::insert(const Block& block, Bytes span) {
  auto [it, fresh] = blocks_.emplace(block.address, Entry{block, span});
  TERRACE_CHECK(fresh, "a live block's address is its own");
  TERRACE_DCHECK(std::next(it) == blocks_.end() || block.address + span.count() <= std::next(it)->first,
                 "live blocks do not overlap");
}

Bytes BlockTable::remove(Address address) {
  auto it = blocks_.find(address);
  TERRACE_CHECK(it != blocks_.end(), "only a live block is freed, once, by its first address");
  const Bytes span = it->second.span;
  blocks_.erase(it);
  return span;
}

std::optional<Block> BlockTable::find(const std::byte* address) const {
  auto it = blocks_.upper_bound(address);
  if (it == blocks_.begin()) return std::nullopt;
  --it;
  if (address >= it->first + it->second.span.count()) return std::nullopt;
  return it->second.block;
}

void PoolUsage::add(Pool pool, Bytes span) {
  const auto index = static_cast<std::size_t>(pool);
  live += span;
  live_by_pool[index] += span;
  live_peak = std::max(live_peak, live);
  watermark = std::max(watermark, live);
  peak_by_pool[index] = std::max(peak_by_pool[index], live_by_pool[index]);
}

void PoolUsage::remove(Pool pool, Bytes span) {
  live -= span;
  live_by_pool[static_cast<std::size_t>(pool)] -= span;
}

void PoolUsage::set_mapped(Bytes now) {
  mapped = now;
  mapped_peak = std::max(mapped_peak, now);
}

Bytes PoolUsage::restart_watermark() { return std::exchange(watermark, live); }

void PoolUsage::reset_peaks() {
  mapped_peak = mapped;
  live_peak = live;
  peak_by_pool = live_by_pool;
}

}  // namespace terrace
