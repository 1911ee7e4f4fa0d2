// Against the sequence, last chunk first, dS in registers; dS' is the gradient of the state after the chunk:
//   dvn = A^T do + to_end dS'      dS = D dS' + from_start^T do - w^T dvn
#include "examples/moe_trainer/ops/cuda/kda_walk.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Barrier;

template <int kWarps>
struct Stage {
  // do comes row by row; a row longer by one piece keeps eight rows in different banks.
  static constexpr int kRowBytes = kWarps * 32 + 16;
  unsigned char w[kWideTile], to_end[kWideTile], from_start[kWideTile], a[kSquareTile];
  unsigned char d_o[kChunk * kRowBytes];
  float decay[kChunkedWidth];
};
template <int kWarps>
struct Shared {
  Stage<kWarps> stages[kStages];
  unsigned char staged[kWarps * 2048];
  Barrier full[kStages];
};

// By the first warp. Rows of do past the sequence are zeroed by hand.
template <int kWarps>
__device__ void request(const KdaChunked& a, const KdaWalk& walk, const SequencePlace& at, std::int64_t index,
                        const StateColumn& mine, Stage<kWarps>& stage, Barrier* full) {
  constexpr std::uint32_t kRow = kWarps * 32, kDecay = kChunkedWidth * sizeof(float);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t left = at.length - index * kChunk;
  const int rows = static_cast<int>(left < kChunk ? left : kChunk);
  const std::int64_t tile = tile_index(a, at, index, mine.head);
  hopper::fence_shared_for_async();
  if (lane == 0) {
    full->arrive_expecting(3 * kWideTile + kSquareTile + kDecay + static_cast<std::uint32_t>(rows) * kRow);
    load_bulk(stage.w, a.w + tile * kWideTile, kWideTile, full);
    load_bulk(stage.to_end, a.to_end + tile * kWideTile, kWideTile, full);
    load_bulk(stage.from_start, a.from_start + tile * kWideTile, kWideTile, full);
    load_bulk(stage.a, a.a + tile * kSquareTile, kSquareTile, full);
    load_bulk(stage.decay, a.decay + tile * kChunkedWidth, kDecay, full);
  }
  __syncwarp();
  for (int row = lane; row < kChunk; row += kWarp) {
    unsigned char* to = stage.d_o + row * Stage<kWarps>::kRowBytes;
    if (row < rows) {
      const std::int64_t token = at.first_token + index * kChunk + row;
      load_bulk(to, walk.d_o + (token * a.value_heads + mine.head) * kChunkedWidth + mine.first, kRow, full);
    } else {
      for (std::uint32_t i = 0; i < kRow; i += 16) *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
    }
  }
}

// do^T (16 values, 64 rows) as operand A.
template <int kWarps>
__device__ void load_columns(const Stage<kWarps>& stage, std::uint32_t (&columns)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, matrix = lane >> 3, r = lane & 7;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int row = 16 * step + (matrix >> 1) * 8 + r;
    load_matrices_transposed(columns[step],
                             stage.d_o + row * Stage<kWarps>::kRowBytes + warp * 32 + (matrix & 1) * 16);
  }
}

// acc += do^T A: row i takes rows j >= i.
__device__ void add_inside(const std::uint32_t (&d_o)[4][4], const unsigned char* pairs, float (&acc)[8][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int n = 0; n <= 2 * step; n += 2) {
      std::uint32_t b[4];
      load_b_transposed<SquareTile>(b, pairs, 16 * step, n);
      mma_bf16(acc[n], d_o[step], b[0], b[1]);
      mma_bf16(acc[n + 1], d_o[step], b[2], b[3]);
    }
  }
}

template <int kWarps>
__device__ void walk_chunk(const KdaChunked& a, std::int64_t tile, const StateColumn& mine,
                           const Stage<kWarps>& stage, unsigned char* staged, StateTiles& d_state) {
  write_state_tile(d_state, mine.first, a.d_state + tile * kStateTile);
  std::uint32_t d_o[4][4], d_vn[4][4];
  load_columns<kWarps>(stage, d_o);
  {
    float acc[8][4] = {};
    state_times_rows(d_state, stage.to_end, acc);
    add_inside(d_o, stage.a, acc);
    pack_columns(acc, d_vn);
  }
  stage_columns(d_vn, staged);
  copy_column(staged, a.d_vn + tile * kWideTile + mine.first / 16 * 2048);
  decay_keys(stage.decay, d_state);
  add_outer(d_o, stage.from_start, d_state);
#pragma unroll
  for (auto& step : d_vn) {
#pragma unroll
    for (std::uint32_t& pair : step) pair ^= 0x80008000U;  // minus
  }
  add_outer(d_vn, stage.w, d_state);
}

template <int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, 1) kda_walk_gradients(KdaChunked a, KdaWalk walk) {
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
  if (warp == 0) {
    for (int i = 0; i < kStages && turn.begin + i < turn.end; ++i) {
      request<kWarps>(a, walk, at, turn.end - 1 - i, mine, shared.stages[i], &shared.full[i]);
    }
  }
  __syncthreads();  // zeroed rows
  const std::int64_t carried = state_offset(a, carry_slot(a, mine.sequence), mine.head);
  const std::int64_t border = state_offset(a, mine.sequence, mine.head);
  StateTiles d_state;
  if (turn.end < at.chunks) {
    read_state(walk.carry_in + carried, mine.first, d_state);
  } else {
    read_state(walk.from == nullptr ? nullptr : walk.from + border, mine.first, d_state);
  }
  for (std::int64_t index = turn.end - 1; index >= turn.begin; --index) {
    const auto turn_index = static_cast<unsigned>(turn.end - 1 - index);
    const unsigned slot = turn_index % kStages;
    shared.full[slot].wait((turn_index / kStages) & 1U);
    walk_chunk<kWarps>(a, tile_index(a, at, index, mine.head), mine, shared.stages[slot],
                       shared.staged + warp * 2048, d_state);
    __syncthreads();
    if (warp == 0 && index - kStages >= turn.begin) {
      request<kWarps>(a, walk, at, index - kStages, mine, shared.stages[slot], &shared.full[slot]);
    }
  }
  if (turn.begin > 0) {
    write_state(d_state, mine.first, walk.carry_out + carried);
  } else {
    write_state(d_state, mine.first, walk.to == nullptr ? nullptr : walk.to + border);
  }
}

}  // namespace

void walk_gradients(OpCall& call, const KdaChunked& chunked, const KdaWalk& walk) {
  with_warps(chunked, [&]<int kWarps>() {
    call.launch(kda_walk_gradients<kWarps>,
                Grid{.x = chunked.sequences * (8 / kWarps),
                     .y = chunked.value_heads,
                     .threads = kWarps * kWarp,
                     .shared_bytes = sizeof(Shared<kWarps>)},
                chunked, walk);
  });
}

}  // namespace terrace::trainer::cuda
