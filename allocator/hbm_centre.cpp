#include "allocator/hbm_centre.hpp"

#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

// Addresses are free. Large blocks have room to grow past fragmented parts; small ones fill any chunk.
constexpr std::array<std::uint64_t, HbmCentre::kRangeCount> kRangesPerDevice = {1, 4, 1, 4};

constexpr std::uint64_t kSlackShare = 64;

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
    centre->ranges_.emplace_back(device, centre->reservation_,
                                 ChunkRange::Place{offset, whole * share, options.chunk});
    offset += (whole * share).count();
  }
  return centre;
}

HbmCentre::HbmCentre(Device& device, Options options, Reservation reservation, BlockTable table)
    : device_(device),
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
std::optional<Result<Physical>> HbmCentre::move_quiet_chunk(const Growing& growing,
                                                            Nanoseconds patience_ends) {
  for (ChunkRange& range : ranges_) {
    const auto* growth = &range == growing.range ? growing.growth : nullptr;
    const auto index = range.free_chunk(growth, [&](const Extent& extent) {
      return order_.is_over({extent.pending, extent.sequence}, patience_ends);
    });
    if (index) return take_out(range, *index);
  }
  return std::nullopt;
}

// Any one that is free; its last use is waited for, if all are in use yet.
Result<Physical> HbmCentre::reclaim_chunk(const Growing& growing) {
  const Nanoseconds began = steady_clock().now();
  if (auto quiet = move_quiet_chunk(growing, began); quiet && quiet->ok()) return std::move(*quiet);
  Error failure{.code = Errc::kNotFound, .text = "no chunk is free"};
  for (ChunkRange& range : ranges_) {
    const auto* growth = &range == growing.range ? growing.growth : nullptr;
    const auto index = range.free_chunk(growth, [](const Extent&) { return true; });
    if (!index) continue;
    const Extent& extent = range.extent_of(*index);
    Status done = order_.finish({extent.pending, extent.sequence});
    metrics().add<Metric::kStallSeconds>(StallReason::kBudget, steady_clock().now() - began);
    if (done) {
      auto physical = take_out(range, *index);
      if (physical) return physical;
      done = physical.error();
    }
    if (failure.code == Errc::kNotFound) failure = done.error();
  }
  return failure;
}

Result<Physical> HbmCentre::take_out(ChunkRange& range, std::size_t index) {
  auto physical = range.unmap_chunk(index);
  if (physical) table_.clear(range.address_of(index * chunk_.count()), chunk_);
  return physical;
}

// Up to here another chunk is mapped without looking for a free one to move: a little above the most that was
// ever live, so that a step whose blocks fall a little otherwise than the last one's moves nothing.
Bytes HbmCentre::worth_mapping() const {
  return std::min(budget_, wanted_peak_ + wanted_peak_ / kSlackShare);
}

// Chunks that a growth could gather without exceeding the budget.
std::size_t HbmCentre::obtainable(const Growing& growing) const {
  std::size_t chunks = saturating_sub(budget_, mapped_) / chunk_;
  for (const ChunkRange& range : ranges_)
    chunks += range.free_chunks(&range == growing.range ? growing.growth : nullptr);
  return chunks;
}

Result<Physical> HbmCentre::obtain_chunk(const Growing& growing, Search& search) {
  if (mapped_ + chunk_ > worth_mapping() && search.may_find_quiet) {
    // Free memory elsewhere in the pool moves under the range that needs it.
    auto moved = move_quiet_chunk(growing, search.patience_ends);
    if (moved && moved->ok()) return std::move(*moved);
    search.may_find_quiet = false;
  }
  if (mapped_ + chunk_ > budget_) return reclaim_chunk(growing);
  auto created = device_.create_physical(chunk_);
  if (created) set_mapped(mapped_ + chunk_);
  if (created || created.error().code != Errc::kOutOfMemory) return created;
  // Others hold the device's memory: what the pool has must do.
  if (auto moved = reclaim_chunk(growing)) return moved;
  return created;
}

// Makes the table's words for the chunks of a growth writable.
Status HbmCentre::open_words(const ChunkRange& range, const ChunkRange::Growth& growth) {
  for (std::size_t i = 0; i < growth.chunks; ++i) {
    const Address at = range.address_of((growth.first_chunk + i) * chunk_.count());
    const std::size_t place = table_.offset_of(at) / chunk_.count();
    if (opened_[place]) continue;
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
  if (!growth || growth->chunks > obtainable({&range, &*growth})) return refusal(request, live);
  std::vector<Physical> chunks;
  Search search{.patience_ends = steady_clock().now() + kPatience};
  Status status = open_words(range, *growth);
  while (status.ok() && chunks.size() < growth->chunks) {
    auto physical = obtain_chunk({&range, &*growth}, search);
    if (physical) chunks.push_back(*physical);
    if (!physical) status = physical.error();
  }
  if (status.ok()) status = range.map_chunks(growth->first_chunk, chunks);
  if (status.ok()) return {};
  // A lost device keeps what may still be mapped; else nothing of it is.
  for (const Physical chunk : chunks) {
    if (status.error().code == Errc::kDeviceLost) break;
    device_.destroy_physical(chunk);
    mapped_ -= chunk_;
  }
  return status.error().code == Errc::kNotFound ? Status(refusal(request, live)) : status;
}

bool HbmCentre::release_chunk() {
  auto physical = reclaim_chunk({});
  if (!physical) return false;
  device_.destroy_physical(*physical);
  mapped_ -= chunk_;
  return true;
}

Bytes HbmCentre::largest_available() const {
  const std::size_t mappable = saturating_sub(budget_, mapped_) / chunk_;
  Bytes best;
  for (const ChunkRange& range : ranges_) best = std::max(best, range.largest_with(mappable));
  return best;
}

}  // namespace terrace
