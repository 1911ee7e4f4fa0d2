// What gathers for dsa_forward_hopper.cu: the shared memory of a block, its barriers, and the warpgroup that
// fills it with one token's Q and tiles of rows after the other's.
#pragma once

#include "examples/moe_trainer/ops/cuda/dsa_forward_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/dsa_hopper.cuh"

namespace terrace::trainer::cuda::dsa_forward {

inline constexpr int kTileRows = 64;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kThreads = (kConsumers + 1) * hopper::kWarpgroup;
inline constexpr int kConsumerThreads = kConsumers * hopper::kWarpgroup;
inline constexpr int kBoxBytes = kTileRows * 128;
inline constexpr int kHalves = 2;  // of a tile's rows
inline constexpr int kParts = 2;   // of a tile's columns

template <typename Form>
struct Layout {
  static constexpr int kStages = Form::kShared ? 2 : 4;
  static constexpr int kKeyBoxes = Form::kKey / kBoxColumns;
  static constexpr int kValueBoxes = Form::kValue / kBoxColumns;
  static constexpr int kStageBytes = (kKeyBoxes + (Form::kShared ? 0 : kValueBoxes)) * kBoxBytes;
  static constexpr int kFirstValueBox = Form::kShared ? 0 : kKeyBoxes;
  static constexpr int kFirstBoxes = Form::kShared ? 5 : kKeyBoxes;  // the first part
  static constexpr int kStage = kKeyBoxes * kBoxBytes;               // after Q
  static constexpr int kExchange = kStage + kStages * kStageBytes;
  static constexpr int kExchangeBytes = Form::kShared ? kBoxBytes : kConsumers * kDsaHeads * Form::kValue * 2;
  static constexpr int kTops = kExchange + kExchangeBytes;
  static constexpr int kSums = kTops + kConsumers * kDsaHeads * 4;
  static constexpr int kBarriers = kSums + 2 * kConsumers * kDsaHeads * 4;  // of two tokens
  static constexpr int kBytes = kBarriers + 192 + 1024;                     // the start is rounded up to 1024
  static constexpr int kReleases = (Form::kShared ? kConsumers : 1) * hopper::kWarpgroup / kWarp;
};

struct Barriers {
  hopper::Barrier q_full, q_empty, full[4][kParts], empty[4][kHalves];
  int count;  // of the positions of the token whose q is there
};
static_assert(sizeof(Barriers) <= 192);

// The tokens of this block; the last ones have most to do and go first. Negative: none is left.
__device__ inline std::int64_t token_of_turn(const HopperForward& a, int turn) {
  const std::int64_t index = blockIdx.x + std::int64_t{turn} * gridDim.x;
  return index < a.count ? a.first + (a.count - 1 - index) : -1;
}

// Of a ring's round: where it is, and the parity of its barriers.
template <typename Form>
struct Place {
  unsigned stage, parity;
  __device__ explicit Place(unsigned tile)
      : stage(tile % Layout<Form>::kStages), parity(tile / Layout<Form>::kStages % 2) {}
};

// How many positions a list has before its padding; by a whole warp.
__device__ inline int count_chosen(const std::int32_t* list, int slots) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (slots == 0 || __ldg(list + slots - 1) >= 0) return slots;
  int low = 0, high = slots - 1;  // all before low are chosen, none from high on
  while (low < high) {
    const int step = (high - low + kWarp - 1) / kWarp, probe = low + lane * step;
    const int found = __popc(__ballot_sync(kFullWarp, probe < high && __ldg(list + probe) >= 0));
    if (found == 0) return low;
    high = min(high, low + found * step);
    low += (found - 1) * step + 1;
  }
  return low;
}

// The gathering warpgroup's thread: piece t % 8 of the rows t / 8 + 16 i of every box.
template <typename Form>
struct Gatherer {
  using L = Layout<Form>;
  const HopperForward& a;
  Barriers& barriers;
  std::uint32_t shared;
  unsigned tile = 0;  // of all tokens

  __device__ std::uint32_t place_in_box() const {
    const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
    const int piece = thread % 8, row = thread / 8;
    return shared + static_cast<std::uint32_t>(row * 128 + ((piece ^ (row % 8)) * 16));
  }
  template <int kFirst, int kEnd>
  __device__ static void copy_boxes(std::uint32_t to, const Bf16* row, std::uint32_t bytes) {
#pragma unroll
    for (int box = kFirst; box < kEnd; ++box) {
      copy_piece(to + static_cast<std::uint32_t>(box * kBoxBytes), row + box * kBoxColumns, bytes);
    }
  }
  template <int kPart>
  __device__ void copy_part(std::uint32_t to, std::int32_t position, const Bf16* k, const Bf16* v) const {
    const std::uint32_t bytes = position >= 0 ? 16 : 0;
    const std::int64_t row = position >= 0 ? position : 0;
    if constexpr (kPart == 0) {
      copy_boxes<0, L::kFirstBoxes>(to, k + row * Form::kKey, bytes);
    } else if constexpr (Form::kShared) {
      copy_boxes<L::kFirstBoxes, L::kKeyBoxes>(to, k + row * Form::kKey, bytes);
    } else {
      copy_boxes<0, L::kValueBoxes>(to + L::kFirstValueBox * kBoxBytes, v + row * Form::kValue, bytes);
    }
  }
  // This thread's piece of the first rows of the token's sequence.
  struct Sequence {
    const Bf16 *k, *v;
  };
  __device__ Sequence sequence_of(std::int64_t token) const {
    const std::int64_t first = token / a.sizes.length * a.sizes.length;
    const int column = static_cast<int>(threadIdx.x) % 8 * 8;
    return {a.k + first * Form::kKey + column, Form::kShared ? nullptr : a.v + first * Form::kValue + column};
  }
  __device__ void fill(const TilePositions<kTileRows>& positions, const Sequence& sequence) {
    const Bf16 *k = sequence.k, *v = sequence.v;
    const Place<Form> place(tile++);
    const std::uint32_t to = place_in_box() + L::kStage + place.stage * L::kStageBytes;
    constexpr int kBoxRows = kRowsAtOnce * 128;  // bytes
    barriers.empty[place.stage][0].wait(place.parity ^ 1U);
    copy_part<0>(to, positions.at[0], k, v);
    copy_part<0>(to + kBoxRows, positions.at[1], k, v);
    copy_part<1>(to, positions.at[0], k, v);
    copy_part<1>(to + kBoxRows, positions.at[1], k, v);
    barriers.empty[place.stage][1].wait(place.parity ^ 1U);
    copy_part<0>(to + 2 * kBoxRows, positions.at[2], k, v);
    copy_part<0>(to + 3 * kBoxRows, positions.at[3], k, v);
    arrive_when_copied(barriers.full[place.stage][0]);
    copy_part<1>(to + 2 * kBoxRows, positions.at[2], k, v);
    copy_part<1>(to + 3 * kBoxRows, positions.at[3], k, v);
    arrive_when_copied(barriers.full[place.stage][1]);
  }
  __device__ void fill_q(std::int64_t token, int turn, int count) const {
    const int heads = static_cast<int>(a.sizes.heads);
    const int row0 = static_cast<int>(threadIdx.x) % hopper::kWarpgroup / 8;
    const Bf16* q = a.q + token * heads * Form::kKey + static_cast<int>(threadIdx.x) % 8 * 8;
    barriers.q_empty.wait(static_cast<unsigned>(turn) % 2 ^ 1U);
#pragma unroll
    for (int i = 0; i < kDsaHeads / kRowsAtOnce; ++i) {
      const int head = row0 + i * kRowsAtOnce;
      copy_boxes<0, L::kKeyBoxes>(place_in_box() + i * kRowsAtOnce * 128,
                                  q + (head < heads ? std::int64_t{head} * Form::kKey : 0),
                                  head < heads ? 16 : 0);
    }
    arrive_when_copied(barriers.q_full);
    if (threadIdx.x % hopper::kWarpgroup == 0) {
      barriers.count = count;
      barriers.q_full.arrive();
    }
  }
  // Into L2: what the token's end and the next one's start read from memory.
  __device__ static void prefetch(const Bf16* rows, std::int64_t count) {
    for (std::int64_t at = static_cast<int>(threadIdx.x) % hopper::kWarpgroup * 64; at < count;
         at += hopper::kWarpgroup * 64) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(rows + at));
    }
  }
  __device__ void look_ahead(std::int64_t token, std::int64_t next_token) const {
    const std::int64_t outputs = a.sizes.heads * Form::kValue, queries = a.sizes.heads * Form::kKey;
    if (a.gate != nullptr && a.y != nullptr) prefetch(a.gate + token * outputs, outputs);
    if (next_token >= 0) prefetch(a.q + next_token * queries, queries);
  }
  __device__ void run() {
    const int slots = static_cast<int>(a.sizes.slots);
    std::int64_t token = token_of_turn(a, 0);
    const std::int32_t* list = a.selected + token * slots;
    int count = count_chosen(list, slots);
    TilePositions<kTileRows> ahead = tile_positions<kTileRows>(list, 0, slots);
    for (int turn = 0; token >= 0; ++turn) {
      const std::int64_t next_token = token_of_turn(a, turn + 1);
      const std::int32_t* next_list = next_token >= 0 ? a.selected + next_token * slots : list;
      const Sequence sequence = sequence_of(token);
      const int tiles = (count + kTileRows - 1) / kTileRows;
      int next_count = 0;
      if (tiles == 0) {
        fill_q(token, turn, count);
        ahead = tile_positions<kTileRows>(next_list, 0, slots);
      }
      for (int i = 0; i < tiles; ++i) {
        const TilePositions<kTileRows> now = ahead;
        const bool last = i + 1 == tiles;
        ahead = tile_positions<kTileRows>(last ? next_list : list, last ? 0 : i + 1, slots);
        fill(now, sequence);
        if (i == 0) fill_q(token, turn, count);  // the stage is free before Q is
        if (i == 1) {                            // no stage is free for a while
          next_count = count_chosen(next_list, slots);
          look_ahead(token, next_token);
        }
      }
      if (tiles < 2) next_count = count_chosen(next_list, slots);
      token = next_token;
      list = next_list;
      count = next_count;
    }
    wait_all_copies();
  }
};

}  // namespace terrace::trainer::cuda::dsa_forward
