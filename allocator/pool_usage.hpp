// What a pool holds, and the most it held.
#pragma once

#include <array>

#include "runtime/units.hpp"

namespace terrace {

// What a pool holds, in bytes.
struct PoolUsage {
  Bytes budget;
  Bytes mapped;  // physical memory held: what the budget is compared with
  Bytes mapped_peak;
  Bytes live;  // in blocks, rounding included
  Bytes live_peak;
  Bytes watermark;  // most live bytes since restart_watermark()
  std::array<Bytes, kPoolCount> live_by_pool{};

  void add(Pool pool, Bytes span);
  void remove(Pool pool, Bytes span);
  void set_mapped(Bytes now);
  void reset_peaks();
  Bytes restart_watermark();  // returns what it was
};

}  // namespace terrace
