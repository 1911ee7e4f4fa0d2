// Along a sequence, chunk after chunk, S in registers:
//   vn = u - w S      o = from_start S + A vn      S = D S + to_end^T vn
// The product w S sees S and w rounded to bf16, the difference is fp32: an error of 2^-9 of what the state
// holds for a key, which is what rounding k itself would cause. D multiplies the fp32 state, never a rounded
// one, so a decay near 1 does not drift however many chunks it is applied to.
#include "examples/moe_trainer/ops/cuda/kda_walk.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Barrier;

// For backward only w, to_end and u are read.
template <int kWarps>
struct Stage {
  unsigned char w[kWideTile], to_end[kWideTile], from_start[kWideTile], a[kSquareTile], u[kWarps * 2048];
  float decay[kChunkedWidth];
};
template <int kWarps>
struct Shared {
  Stage<kWarps> stages[kStages];
  unsigned char staged[kWarps * 2048];
  Barrier full[kStages];
};

// What a walk is for.
enum class Walk : std::uint8_t { kOutput, kStates };

// By one thread.
template <int kWarps, Walk kFor>
__device__ void request(const KdaChunked& a, std::int64_t tile, int first, Stage<kWarps>& stage,
                        Barrier* full) {
  constexpr std::uint32_t kColumns = kWarps * 2048, kDecay = kChunkedWidth * sizeof(float);
  constexpr std::uint32_t kOutputOnly = kFor == Walk::kOutput ? kWideTile + kSquareTile : 0;
  hopper::fence_shared_for_async();
  full->arrive_expecting(2 * kWideTile + kColumns + kDecay + kOutputOnly);
  load_bulk(stage.w, a.w + tile * kWideTile, kWideTile, full);
  load_bulk(stage.to_end, a.to_end + tile * kWideTile, kWideTile, full);
  load_bulk(stage.u, a.u + tile * kWideTile + first / 16 * 2048, kColumns, full);
  load_bulk(stage.decay, a.decay + tile * kChunkedWidth, kDecay, full);
  if (kFor == Walk::kOutput) {
    load_bulk(stage.from_start, a.from_start + tile * kWideTile, kWideTile, full);
    load_bulk(stage.a, a.a + tile * kSquareTile, kSquareTile, full);
  }
}

// acc = u - acc, transposed.
__device__ void residual(const unsigned char* u, float (&acc)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, matrix = lane >> 3, r = lane & 7;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    std::uint32_t x[4];  // rows 8 n: values 0-7, values 8-15; rows 8 n + 8: the same
    load_matrices_transposed(x, u + ColumnTile::at(8 * (n + (matrix >> 1)) + r, matrix & 1));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float(&to)[4] = acc[n + j / 2];
      const int c = 2 * (j % 2);
      to[c] = low_half(x[j]) - to[c];
      to[c + 1] = high_half(x[j]) - to[c + 1];
    }
  }
}

// acc += vn^T A^T: row i takes rows j <= i.
__device__ void add_inside(const std::uint32_t (&vn)[4][4], const unsigned char* pairs, float (&acc)[8][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int n = 2 * step; n < 8; n += 2) {
      std::uint32_t b[4];
      load_b<SquareTile>(b, pairs, 8 * n, 2 * step);
      mma_bf16(acc[n], vn[step], b[0], b[1]);
      mma_bf16(acc[n + 1], vn[step], b[2], b[3]);
    }
  }
}

__device__ void write_output(const KdaChunked& a, const KdaWalk& walk, const SequencePlace& at,
                             std::int64_t index, const StateColumn& mine, const unsigned char* staged) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 16 + lane / 2, half = lane & 1;
    const std::int64_t token = index * kChunk + row;
    if (token >= at.length) continue;
    std::uint16_t* to = walk.o + ((at.first_token + token) * a.value_heads + mine.head) * kChunkedWidth +
                        mine.first + 8 * half;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(staged + ColumnTile::at(row, half));
  }
}

template <int kWarps, Walk kFor>
__device__ void walk_chunk(const KdaChunked& a, const KdaWalk& walk, const SequencePlace& at,
                           std::int64_t index, const StateColumn& mine, const Stage<kWarps>& stage,
                           unsigned char* staged, StateTiles& state) {
  const std::int64_t tile = tile_index(a, at, index, mine.head);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (kFor == Walk::kStates) write_state_tile(state, mine.first, a.state + tile * kStateTile);
  std::uint32_t vn[4][4];
  {
    float acc[8][4] = {};
    state_times_rows(state, stage.w, acc);
    residual(stage.u + warp * 2048, acc);
    pack_columns(acc, vn);
  }
  if (kFor == Walk::kOutput) {
    float out[8][4] = {};
    state_times_rows(state, stage.from_start, out);
    add_inside(vn, stage.a, out);
    std::uint32_t packed[4][4];
    pack_columns(out, packed);
    stage_columns(packed, staged);
    write_output(a, walk, at, index, mine, staged);
  } else {
    stage_columns(vn, staged);
    copy_column(staged, a.vn + tile * kWideTile + mine.first / 16 * 2048);
  }
  decay_keys(stage.decay, state);
  add_outer(vn, stage.to_end, state);
}

template <int kWarps, Walk kFor>
__global__ void __launch_bounds__(kWarps* kWarp, 1) kda_walk_states(KdaChunked a, KdaWalk walk) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  constexpr int kSplits = 8 / kWarps;
  auto& shared = *reinterpret_cast<Shared<kWarps>*>(kda_shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int block_column = static_cast<int>(blockIdx.x % kSplits) * kWarps * 16;
  const StateColumn mine{blockIdx.x / kSplits, blockIdx.y, block_column + warp * 16};
  const SequencePlace at = sequence_place(a, mine.sequence);
  const TurnChunks turn = turn_chunks(a, at);
  if (turn.begin == turn.end && (at.chunks > 0 || a.first > 0)) return;
  if (threadIdx.x == 0) {
    for (Barrier& full : shared.full) full.init(1);
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages && turn.begin + i < turn.end; ++i) {
      request<kWarps, kFor>(a, tile_index(a, at, turn.begin + i, mine.head), block_column, shared.stages[i],
                            &shared.full[i]);
    }
  }
  const std::int64_t carried = state_offset(a, carry_slot(a, mine.sequence), mine.head);
  const std::int64_t border = state_offset(a, mine.sequence, mine.head);
  StateTiles state;
  if (turn.begin > 0) {
    read_state(walk.carry_in + carried, mine.first, state);
  } else {
    read_state(walk.from == nullptr ? nullptr : walk.from + border, mine.first, state);
  }
  for (std::int64_t index = turn.begin; index < turn.end; ++index) {
    const auto turn_index = static_cast<unsigned>(index - turn.begin);
    const unsigned slot = turn_index % kStages;
    shared.full[slot].wait((turn_index / kStages) & 1U);
    walk_chunk<kWarps, kFor>(a, walk, at, index, mine, shared.stages[slot], shared.staged + warp * 2048,
                             state);
    __syncthreads();
    if (threadIdx.x == 0 && index + kStages < turn.end) {
      request<kWarps, kFor>(a, tile_index(a, at, index + kStages, mine.head), block_column,
                            shared.stages[slot], &shared.full[slot]);
    }
  }
  if (turn.end < at.chunks) {
    write_state(state, mine.first, walk.carry_out + carried);
  } else {
    write_state(state, mine.first, walk.to == nullptr ? nullptr : walk.to + border);
  }
}

}  // namespace

void walk_states(OpCall& call, const KdaChunked& chunked, const KdaWalk& walk) {
  with_warps(chunked, [&]<int kWarps>() {
    const Grid grid{.x = chunked.sequences * (8 / kWarps),
                    .y = chunked.value_heads,
                    .threads = kWarps * kWarp,
                    .shared_bytes = sizeof(Shared<kWarps>)};
    if (walk.o != nullptr) {
      call.launch(kda_walk_states<kWarps, Walk::kOutput>, grid, chunked, walk);
    } else {
      call.launch(kda_walk_states<kWarps, Walk::kStates>, grid, chunked, walk);
    }
  });
}

}  // namespace terrace::trainer::cuda
