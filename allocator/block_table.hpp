// Which live block an address belongs to, interior pointers included.
//
// Not thread-safe: the owning pool locks. Constant-time, wait-free look-up for hooks is a table of its own
// kind.
#pragma once

#include <array>
#include <map>
#include <optional>

#include "runtime/device.hpp"

namespace terrace {

// A contiguous range with one owner and one size.
struct Block {
  Address address = nullptr;
  Bytes size;  // as asked for; the range behind it is rounded up by its pool
  Pool pool = Pool::kScratch;
};

class BlockTable {
 public:
  // Adds a live block whose range is `span` bytes from its address. Overlap with a live block is a programmer
  // error.
  void insert(const Block& block, Bytes span);
  // Removes the block that starts at `address`; returns its span. Removing what is not live is a programmer
  // error.
  Bytes remove(Address address);
  // The live block whose range holds `address`.
  [[nodiscard]] std::optional<Block> find(const std::byte* address) const;
  [[nodiscard]] std::size_t count() const { return blocks_.size(); }

 private:
  struct Entry {
    Block block;
    Bytes span;
  };
  std::map<const std::byte*, Entry> blocks_;
};

// What a pool holds, in bytes.
struct PoolUsage {
  Bytes budget;
  Bytes mapped;  // physical memory held: what the budget is compared with
  Bytes mapped_peak;
  Bytes live;  // in blocks, rounding included
  Bytes live_peak;
  Bytes watermark;  // most live bytes since restart_watermark()
  std::array<Bytes, kPoolCount> live_by_pool{};
  std::array<Bytes, kPoolCount> peak_by_pool{};

  void add(Pool pool, Bytes span);
  void remove(Pool pool, Bytes span);
  void set_mapped(Bytes now);
  void reset_peaks();
  Bytes restart_watermark();  // returns what it was
};

}  // namespace terrace
