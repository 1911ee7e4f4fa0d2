// Where a group's optimizer state lives outside of HBM.
//
// Both moments of all trained numbers, and the fp32 values of those at the front that products read in bf16,
// are cut into chunks. A chunk is in pinned memory or, where that has no room, on NVMe, a block there for
// each kind. A StateStream takes chunks through HBM; here is what is done once, while none is on its way: the
// start, and checkpoints.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "examples/moe_trainer/cold_ranges.hpp"
#include "examples/moe_trainer/memory.hpp"

namespace terrace::trainer {

enum class StateKind : std::uint8_t { kM, kV, kValue };

class StateHome {
 public:
  struct Plan {
    std::int64_t numbers = 0;
    std::int64_t values = 0;  // numbers at the front that have one
    std::int64_t chunk = 0;   // numbers
    std::vector<bool> cold;   // by chunk, whether on NVMe; empty: none is
    Tier* tier = nullptr;     // that NVMe is
  };
  // Of the block in DDR beside a file. Smaller ones are cut from areas, in which more is taken than is used.
  static constexpr Bytes kLeastInDdr = 1_MiB;
  // Numbers in a chunk, of groups with so many each whose state streams: small models have small rings.
  [[nodiscard]] static std::int64_t chunk_of(std::span<const std::int64_t> groups);
  // Of each chunk, in order; and of those on NVMe all together, as files hold them.
  [[nodiscard]] static std::vector<Bytes> chunk_bytes(const Plan& plan);
  [[nodiscard]] static Bytes file_bytes(const Plan& plan);

  // All zeros. Memory and tier outlive it. Throws OutOfMemory, Failure.
  StateHome(Memory& memory, const Plan& plan);

  struct Place {  // one of both; neither where a kind has no numbers in the chunk
    float* in_ddr = nullptr;
    TierBlock on_tier{};
  };
  struct Chunk {
    std::int64_t first = 0, count = 0, values = 0;
    std::array<Place, 3> places{};
    [[nodiscard]] const Place& of(StateKind kind) const { return places[static_cast<std::size_t>(kind)]; }
  };
  [[nodiscard]] const std::vector<Chunk>& chunks() const { return chunks_; }
  [[nodiscard]] std::int64_t chunk() const { return chunk_; }
  [[nodiscard]] Tier* tier() const { return cold_ != nullptr ? tier_ : nullptr; }  // null: none is there
  [[nodiscard]] bool has_value(std::int64_t number) const { return number < values_; }
  // The first number of the next chunk.
  [[nodiscard]] std::int64_t next_chunk(std::int64_t number) const { return (number / chunk_ + 1) * chunk_; }

  // Numbers from `first` on, from device memory and to it, in order of the compute stream.
  void store(StateKind kind, std::int64_t first, const float* from, std::int64_t count);
  void load(StateKind kind, std::int64_t first, float* to, std::int64_t count);
  // From the host and to it. The compute stream is idle.
  void write(StateKind kind, std::int64_t first, std::span<const float> from);
  [[nodiscard]] std::vector<float> read(StateKind kind, std::int64_t first, std::int64_t count);

 private:
  struct Stretch {  // of numbers in DDR
    std::int64_t first, count;
    float* at;
  };
  [[nodiscard]] std::vector<Stretch> in_ddr(StateKind kind, std::int64_t first, std::int64_t count) const;
  // Of a number on NVMe, in the block that ColdRanges knows: one kind behind the other.
  [[nodiscard]] Bytes cold_at(StateKind kind, std::int64_t number) const;
  void place_in_ddr();
  void place_on_tier();

  Memory& memory_;
  std::int64_t numbers_, values_, chunk_;
  Tier* tier_;
  std::vector<bool> is_cold_;
  std::vector<Chunk> chunks_;
  BlockRef home_;  // of the chunks in DDR
  std::unique_ptr<ColdRanges> cold_;
};

}  // namespace terrace::trainer
