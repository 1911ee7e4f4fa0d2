// The pool behind the threads' caches: ranges, the chunks mapped under them, and what is free in them.
//
// Four ranges of one reservation: two lifetimes, and in each blocks of up to 32 KiB apart from larger ones,
// so that a small block never keeps a hole open between large ones, nor a long-lived one between short-lived.
// A block is carved from the smallest free extent that holds it, among equals from one that its stream may
// use at once. Only where the alternative is a refusal does a block go to the other range of its lifetime.
//
// Not thread-safe: the pool locks. What is carved is in the table, as cached; the pool makes it live.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/block_table.hpp"
#include "allocator/chunk_range.hpp"
#include "allocator/stream_order.hpp"
#include "allocator/thread_cache.hpp"

namespace terrace {

class HbmCentre {
 public:
  static constexpr std::size_t kRangeCount = 4;
  struct Options {
    Bytes budget;
    Bytes chunk;  // the largest, a multiple of the device's granularity
  };
  [[nodiscard]] static Result<std::unique_ptr<HbmCentre>> create(Device& device, Options options);
  ~HbmCentre();  // waits for what was freed; every block is freed before

  struct Request {
    Bytes span;  // a multiple of the unit
    Pool pool = Pool::kScratch;
    StreamOrder::Index stream = 0;
    Bytes alignment = kUnit;
    std::uint32_t most = 1;  // blocks of `span` next to each other, if one extent holds so many
  };
  struct Carved {
    Address first = nullptr;
    std::uint32_t count = 0;  // 0: nothing fits
  };
  enum class Where : std::uint8_t { kOwnRange, kSiblingRange };
  // Takes free bytes for the request and orders its stream behind what is pending there. Errors: the
  // device's; nothing changed.
  [[nodiscard]] Result<Carved> carve(const Request& request, Where where);
  // Maps chunks until one block of the request fits its own range. Errors: kOutOfBudget, the device's.
  [[nodiscard]] Status grow(const Request& request, Bytes live);
  [[nodiscard]] Error refusal(const Request& request, Bytes live) const;

  // The block at `at` is free once `pending` is over.
  void give_back(Address at, const Pending& pending);

  // Unmaps one wholly free chunk, its last use waited for, and gives it back to the device. False: there is
  // none, or the device refuses.
  [[nodiscard]] bool release_chunk();
  void set_budget(Bytes budget) { budget_ = budget; }
  void reset_mapped_peak() { mapped_peak_ = mapped_; }
  [[nodiscard]] Bytes budget() const { return budget_; }
  [[nodiscard]] Bytes mapped() const { return mapped_; }
  [[nodiscard]] Bytes mapped_peak() const { return mapped_peak_; }
  [[nodiscard]] Bytes chunk() const { return chunk_; }
  [[nodiscard]] Bytes largest_available() const;

  [[nodiscard]] StreamOrder& order() { return order_; }
  [[nodiscard]] BlockTable& table() { return table_; }
  [[nodiscard]] const BlockTable& table() const { return table_; }
  [[nodiscard]] const std::vector<ChunkRange>& ranges() const { return ranges_; }

 private:
  HbmCentre(Device& device, Options options, Reservation reservation, BlockTable table);
  [[nodiscard]] ChunkRange& range_for(const Request& request, Where where);
  [[nodiscard]] ChunkRange& range_at(Address at);
  struct Place {
    Extent extent;
    std::uint64_t offset = 0;
  };
  [[nodiscard]] std::optional<Place> find(const ChunkRange& range, const Request& request) const;
  // What a growth must leave alone while it gathers chunks.
  struct Growing {
    const ChunkRange* range = nullptr;
    const ChunkRange::Growth* growth = nullptr;
  };
  // What one growth has learned while it gathers chunks.
  struct Search {
    std::optional<Nanoseconds> patience_ends;  // from the first look on
    bool may_find_quiet = true;
  };
  // One chunk for a growth that lacks `missing` bytes.
  [[nodiscard]] Result<PhysicalPiece> obtain_chunk(const Growing& growing, Bytes missing, Search& search);
  [[nodiscard]] Result<PhysicalPiece> create_chunk(Bytes size);
  void destroy_chunk(const PhysicalPiece& chunk);
  // Nothing: no free chunk is quiet. Else the chunk, or why it could not be unmapped.
  [[nodiscard]] std::optional<Result<PhysicalPiece>> move_quiet_chunk(const Growing& growing,
                                                                      Nanoseconds patience_ends);
  [[nodiscard]] Result<PhysicalPiece> reclaim_chunk(const Growing& growing);
  [[nodiscard]] Result<PhysicalPiece> take_out(ChunkRange& range, std::uint64_t chunk);
  [[nodiscard]] Status open_words(const ChunkRange& range, const ChunkRange::Growth& growth);
  [[nodiscard]] Bytes worth_mapping() const;
  [[nodiscard]] Bytes chunk_for(Bytes missing) const;
  // Bytes that may still be mapped within the budget, in the device's granularity.
  [[nodiscard]] Bytes mappable() const { return round_down(saturating_sub(budget_, mapped_), granularity_); }
  [[nodiscard]] Bytes obtainable(const Growing& growing) const;
  void set_mapped(Bytes mapped);

  Device& device_;
  Bytes granularity_;
  Bytes chunk_;
  Bytes budget_;
  Bytes mapped_;
  Bytes mapped_peak_;
  Bytes wanted_peak_;  // the most bytes that were live, or were to be, when the pool grew
  Reservation reservation_;
  BlockTable table_;
  std::vector<bool> opened_;  // by chunk_ of the reservation: its words in the table can be written
  std::vector<ChunkRange> ranges_;
  StreamOrder order_;
};

}  // namespace terrace
