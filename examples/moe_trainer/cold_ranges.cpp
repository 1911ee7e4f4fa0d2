#include "examples/moe_trainer/cold_ranges.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/host_copy.hpp"

namespace terrace::trainer {

ColdRanges::ColdRanges(Memory& memory, Tier& tier, Pool pool, std::vector<SlotRing::PartRange> ranges)
    : memory_(memory), tier_(tier) {
  for (const SlotRing::PartRange& range : ranges) {
    auto block = tier.allocate(range.size, pool);
    if (!block) {
      for (const Range& taken : ranges_) (void)tier.free(taken.block);
      Error error = std::move(block).error();
      error.text += "; what would help in the policy: [nvme] budget = a larger size, or [ddr] budget";
      fail(error);
    }
    ranges_.push_back({.range = range, .block = *block});
  }
}

ColdRanges::~ColdRanges() {
  for (const Range& range : ranges_) (void)tier_.free(range.block);
}

template <typename Run>
void ColdRanges::each_in(Bytes at, Bytes size, const Run& run) {
  for (Range& one : ranges_) {
    const Bytes from = std::max(at, one.range.at);
    const Bytes to = std::min(at + size, one.range.at + one.range.size);
    if (from < to) run(one, from - one.range.at, to - from, from - at);
  }
}

BlockRef ColdRanges::loaded(Range& range) {
  Session& session = memory_.session();
  BlockRef here = memory_.block(range.range.size, Pool::kScratch);
  if (!range.written) {
    require(session.device().fill(session.compute(), here->address, 0, range.range.size));
    return here;
  }
  require(session.device().synchronize(session.compute()));  // who had the memory before is done with it
  require(require(tier_.load(here->address, range.block, Event{})).synchronize());
  return here;
}

void ColdRanges::store(Range& range, const std::byte* from) {
  Session& session = memory_.session();
  require(session.device().synchronize(session.compute()));
  require(require(tier_.store(range.block, from, Event{})).synchronize());
  range.written = true;
}

void ColdRanges::write(Bytes at, const std::byte* from, Bytes size) {
  Session& session = memory_.session();
  each_in(at, size, [&](Range& range, Bytes first, Bytes bytes, Bytes offset) {
    if (bytes == range.range.size) return store(range, from + offset.count());
    const BlockRef whole = loaded(range);
    require(session.device().copy(session.compute(), Direction::kD2D, whole->address + first.count(),
                                  from + offset.count(), bytes));
    store(range, whole->address);
  });
}

std::vector<std::byte> ColdRanges::read(Bytes at, Bytes size) {
  std::vector<std::byte> bytes(size.count());
  each_in(at, size, [&](Range& range, Bytes first, Bytes count, Bytes offset) {
    const BlockRef whole = loaded(range);
    const std::vector<std::byte> here =
        download_bytes(memory_.session(), whole->address + first.count(), count.count());
    std::memcpy(bytes.data() + offset.count(), here.data(), here.size());
  });
  return bytes;
}

void ColdRanges::copy_to(std::byte* to, Bytes at, Bytes size) {
  Session& session = memory_.session();
  each_in(at, size, [&](Range& range, Bytes first, Bytes count, Bytes offset) {
    const BlockRef whole = loaded(range);
    require(session.device().copy(session.compute(), Direction::kD2D, to + offset.count(),
                                  whole->address + first.count(), count));
  });
}

void ColdRanges::write_zeros() {
  for (Range& range : ranges_) {
    if (!range.written) store(range, loaded(range)->address);
  }
}

std::vector<TierBlock> ColdRanges::blocks_of(std::uint32_t part) const {
  std::vector<TierBlock> blocks;
  for (const Range& one : ranges_) {
    if (one.range.part == part) blocks.push_back(one.block);
  }
  return blocks;
}

}  // namespace terrace::trainer
