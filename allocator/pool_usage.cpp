#include "allocator/pool_usage.hpp"

#include <algorithm>
#include <utility>

namespace terrace {

void PoolUsage::add(Pool pool, Bytes span) {
  live += span;
  live_by_pool[static_cast<std::size_t>(pool)] += span;
  live_peak = std::max(live_peak, live);
  watermark = std::max(watermark, live);
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
}

}  // namespace terrace
