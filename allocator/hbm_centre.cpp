#include "allocator/hbm_centre.hpp"

#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

// Addresses are free. Large blocks have room to grow past fragmented parts; small ones fit a gap of a chunk.
constexpr std::array<std::uint64_t, HbmCentre::kRangeCount> kRangesPerDevice = {2, 4, 2, 4};

// Of the most that was live: what is mapped above it before free chunks move; the largest chunk; the step in
// which the last chunk of a growth is measured. docs/design/0003-chunk-size.md has the figures.
constexpr std::uint64_t kSlackShare = 128;
constexpr std::uint64_t kChunkShare = 256;
constexpr std::uint64_t kStepShare = 1024;

// What idle streams take to pass fences that were just recorded, with room to spare.
constexpr Nanoseconds kPatience{50'000};

std::size_t range_index(Lifetime lifetime, Bytes span) {
  return static_cast<std::size_t>(lifetime) * 2 + (span.count() > ThreadCache::kSmallBytes ? 1 : 0);
}

std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

}  // namespace

Result<std::unique_ptr<HbmCentre>> HbmCentre::create(Device& device, Options options) {
  const Bytes whole = round_up(device.info().capacity, options.chunk);
  std::uint64_t shares = 0;
  for (const std::uint64_t share : kRangesPerDevice) shares += share;
  auto reservation = Reservation::make(device, whole * shares);
  if (!reservation) return std::move(reservation).error();
  auto table = BlockTable::create(reservation->base(), reservation->size());
  if (!table) return std::move(table).error();
  std::unique_ptr<HbmCentre> centre(
      new HbmCentre(device, options, std::move(reservation).value(), std::move(table).value()));
  std::uint64_t offset = 0;
  for (const std::uint64_t share : kRangesPerDevice) {
    centre->ranges_.emplace_back(device, centre->reservation_, ChunkRange::Place{offset, whole * share},
                                 ChunkRange::ChunkSize{centre->granularity_, options.chunk});
    offset += (whole * share).count();
  }
  return centre;
}

HbmCentre::HbmCentre(Device& device, Options options, Reservation reservation, BlockTable table)
    : device_(device),
      granularity_(device.info().granularity),
      chunk_(options.chunk),
      budget_(options.budget),
      reservation_(std::move(reservation)),
      table_(std::move(table)),
      opened_(reservation_.size() / chunk_),
      order_(device) {
  ranges_.reserve(kRangeCount);
}

HbmCentre::~HbmCentre() { order_.finish_all(); }

ChunkRange& HbmCentre::range_for(const Request& request, Where where) {
  const std::size_t own = range_index(lifetime_of(request.pool), request.span);
  return ranges_[where == Where::kOwnRange ? own : own ^ 1];
}

ChunkRange& HbmCentre::range_at(Address at) {
  for (ChunkRange& range : ranges_) {
    if (range.holds(at)) return range;
  }
  TERRACE_CHECK(false, "a block lies in a range");
}

std::optional<HbmCentre::Place> HbmCentre::find(const ChunkRange& range, const Request& request) const {
  const auto ready = [&](const Extent& extent) {
    return extent.pending == 0 || order_.ready_for(request.stream, {extent.pending, extent.sequence});
  };
  if (request.alignment <= kUnit) {
    const auto fit = range.free().best_fit(request.span, ready);
    if (!fit) return std::nullopt;
    return Place{*fit, fit->offset};
  }
  const auto base = reinterpret_cast<std::uintptr_t>(range.address_of(0));
  const auto aligned_in = [&](const Extent& extent) {
    return align_up(base + extent.offset, request.alignment.count()) - base;
  };
  const auto fit = range.free().first_fit(request.span, [&](const Extent& extent) {
    return aligned_in(extent) + request.span.count() <= extent.end();
  });
  if (!fit) return std::nullopt;
  return Place{*fit, aligned_in(*fit)};
}

Result<HbmCentre::Carved> HbmCentre::carve(const Request& request, Where where) {
  ChunkRange& range = range_for(request, where);
  const auto place = find(range, request);
  if (!place) return Carved{};
  const Extent& extent = place->extent;
  const std::uint64_t fitting = (extent.end() - place->offset) / request.span.count();
  const auto count = static_cast<std::uint32_t>(std::min<std::uint64_t>(request.most, fitting));
  if (auto ordered = order_.order_behind(request.stream, {extent.pending, extent.sequence}); !ordered) {
    return ordered.error();
  }
  range.free().take(place->offset, request.span * count);
  const Address first = range.address_of(place->offset);
  const BlockWord word = BlockWord::cached(request.span.count() >> kUnitShift);
  for (std::uint32_t i = 0; i < count; ++i) table_.place(first + i * request.span.count(), word);
  return Carved{first, count};
}

void HbmCentre::give_back(Address at, const Pending& pending) {
  const Bytes span = table_.word_at(at).span();
  table_.remove(at);
  ChunkRange& range = range_at(at);
  range.free().insert({range.offset_of(at), span, pending.streams, pending.sequence});
}

Error HbmCentre::refusal(const Request& request, Bytes live) const {
  return out_of_budget(request.span, request.pool,
                       format_bytes(request.span) + " of HBM for " + name_of(request.pool) + " do not fit: " +
                           format_bytes(live) + " of the budget of " + format_bytes(budget_) + " are in use");
}

void HbmCentre::set_mapped(Bytes mapped) {
  mapped_ = mapped;
  mapped_peak_ = std::max(mapped_peak_, mapped);
}

// One that no work uses any more, as far as shows before `patience_ends`.
std::optional<Result<PhysicalPiece>> HbmCentre::move_quiet_chunk(const Growing& growing,
                                                                 Nanoseconds patience_ends) {
  for (ChunkRange& range : ranges_) {
    const auto* growth = &range == growing.range ? growing.growth : nullptr;
    const auto chunk = range.free_chunk(growth, [&](const Extent& extent) {
      return order_.is_over({extent.pending, extent.sequence}, patience_ends);
    });
    if (chunk) return take_out(range, *chunk);
  }
  return std::nullopt;
}

// Any one that is free; its last use is waited for, if all are in use yet.
Result<PhysicalPiece> HbmCentre::reclaim_chunk(const Growing& growing) {
  const Nanoseconds began = steady_clock().now();
  if (auto quiet = move_quiet_chunk(growing, began); quiet && quiet->ok()) return std::move(*quiet);
  Error failure{.code = Errc::kNotFound, .text = "no chunk is free"};
  for (ChunkRange& range : ranges_) {
    const auto* growth = &range == growing.range ? growing.growth : nullptr;
    const auto chunk = range.free_chunk(growth, [](const Extent&) { return true; });
    if (!chunk) continue;
    const Extent& extent = range.extent_of(*chunk);
    Status done = order_.finish({extent.pending, extent.sequence});
    metrics().add<Metric::kStallSeconds>(StallReason::kBudget, steady_clock().now() - began);
    if (done) {
      auto taken = take_out(range, *chunk);
      if (taken) return taken;
      done = taken.error();
    }
    if (failure.code == Errc::kNotFound) failure = done.error();
  }
  return failure;
}

Result<PhysicalPiece> HbmCentre::take_out(ChunkRange& range, std::uint64_t chunk) {
  auto taken = range.unmap_chunk(chunk);
  if (taken) table_.clear(range.address_of(chunk), taken->size);
  return taken;
}

// Up to here another chunk is mapped without looking for a free one to move: a little above the most that was
// ever live, so that a step whose blocks fall a little otherwise than the last one's moves nothing.
Bytes HbmCentre::worth_mapping() const {
  return std::min(budget_, wanted_peak_ + wanted_peak_ / kSlackShare);
}

// What a growth could gather without exceeding the budget.
Bytes HbmCentre::obtainable(const Growing& growing) const {
  Bytes sum = mappable();
  for (const ChunkRange& range : ranges_)
    sum += range.free_chunk_bytes(&range == growing.range ? growing.growth : nullptr);
  return sum;
}

// What is missing, in measures that grow with what the pool holds: the ends of its ranges take no visible
// part of it, and it is not made of more chunks than a driver maps in a moment.
Bytes HbmCentre::chunk_for(Bytes missing) const {
  const auto share = [&](std::uint64_t divisor) {
    return std::max(granularity_, round_down(wanted_peak_ / divisor, granularity_));
  };
  return std::min({chunk_, share(kChunkShare), round_up(missing, share(kStepShare))});
}

Result<PhysicalPiece> HbmCentre::create_chunk(Bytes size) {
  auto physical = device_.create_physical(size);
  if (!physical) return physical.error();
  set_mapped(mapped_ + size);
  return PhysicalPiece{*physical, size};
}

void HbmCentre::destroy_chunk(const PhysicalPiece& chunk) {
  device_.destroy_physical(chunk.physical);
  mapped_ -= chunk.size;
}

Result<PhysicalPiece> HbmCentre::obtain_chunk(const Growing& growing, Bytes missing, Search& search) {
  const Bytes size = chunk_for(missing);
  if (mapped_ + size > worth_mapping() && search.may_find_quiet) {
    // Free memory elsewhere in the pool moves under the range that needs it.
    if (!search.patience_ends) search.patience_ends = steady_clock().now() + kPatience;
    auto moved = move_quiet_chunk(growing, *search.patience_ends);
    if (moved && moved->ok()) return std::move(*moved);
    search.may_find_quiet = false;
  }
  if (mappable() == 0_B) return reclaim_chunk(growing);
  auto created = create_chunk(std::min(size, mappable()));
  if (created || created.error().code != Errc::kOutOfMemory) return created;
  // Others hold the device's memory: what the pool has must do.
  if (auto moved = reclaim_chunk(growing)) return moved;
  return created;
}

// Makes the table's words for whatever a growth may map writable.
Status HbmCentre::open_words(const ChunkRange& range, const ChunkRange::Growth& growth) {
  const std::uint64_t begin = table_.offset_of(range.address_of(growth.first));
  const std::uint64_t end = begin + growth.room.count();
  for (std::uint64_t place = begin / chunk_.count(); place * chunk_.count() < end; ++place) {
    if (opened_[place]) continue;
    const Address at = reservation_.base() + place * chunk_.count();
    if (auto opened = table_.open(at, chunk_); !opened) return opened;
    opened_[place] = true;
  }
  return {};
}

Status HbmCentre::grow(const Request& request, Bytes live) {
  if (live > budget_ || request.span > budget_ - live) return refusal(request, live);
  wanted_peak_ = std::max(wanted_peak_, live + request.span);
  ChunkRange& range = range_for(request, Where::kOwnRange);
  // Somewhere in so many bytes lies an aligned place.
  const Bytes room = request.span + (request.alignment - kUnit);
  const auto growth = range.plan_growth(room);
  if (!growth || growth->missing > obtainable({&range, &*growth})) return refusal(request, live);
  std::vector<PhysicalPiece> chunks;
  Bytes gathered;
  Search search;
  Status status = open_words(range, *growth);
  while (status.ok() && gathered < growth->missing) {
    const auto chunk = obtain_chunk({&range, &*growth}, growth->missing - gathered, search);
    if (!chunk) {
      status = chunk.error();
    } else {
      chunks.push_back(*chunk);
      gathered += chunk->size;
    }
  }
  if (status.ok()) status = range.map_chunks(growth->first, chunks);
  if (status.ok()) return {};
  // A lost device keeps what may still be mapped; else nothing of it is.
  for (const PhysicalPiece& chunk : chunks) {
    if (status.error().code == Errc::kDeviceLost) break;
    destroy_chunk(chunk);
  }
  return status.error().code == Errc::kNotFound ? Status(refusal(request, live)) : status;
}

bool HbmCentre::release_chunk() {
  const auto chunk = reclaim_chunk({});
  if (!chunk) return false;
  destroy_chunk(*chunk);
  return true;
}

Bytes HbmCentre::largest_available() const {
  Bytes best;
  for (const ChunkRange& range : ranges_) best = std::max(best, range.largest_with(mappable()));
  return best;
}

}  // namespace terrace
