// Against the sequence, last chunk first, dS in registers; dS' is the gradient of the state after the chunk:
//   dvn = s A^T do + (k R) dS'      dvb = M^T dvn      dS = D dS' + s (q D)^T do - (k D)^T b dvb
#include "examples/moe_trainer/ops/cuda/kda_walk.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Barrier;

template <int kWarps>
struct Stage {
  unsigned char key_start[kWideTile], to_end[kWideTile], from_start[kWideTile];
  unsigned char a[kSquareTile], solve[kSquareTile];
  ValueRows<kWarps> d_o;
  float decay[kDecayFloats];
};
template <int kWarps>
struct Shared {
  Stage<kWarps> stages[kStages];
  unsigned char staged[kWarps * 2048];
  Barrier full[kStages];
};

// By the first warp.
template <int kWarps>
__device__ void request(const KdaChunked& a, const KdaWalk& walk, const SequencePlace& at, std::int64_t index,
                        const StateColumn& mine, Stage<kWarps>& stage, Barrier* full) {
  constexpr std::uint32_t kDecay = kDecayFloats * sizeof(float);
  const std::int64_t tile = tile_index(a, at, index, mine.head);
  hopper::fence_shared_for_async();
  if ((threadIdx.x & 31) == 0) {
    full->arrive_expecting(3 * kWideTile + 2 * kSquareTile + kDecay +
                           static_cast<std::uint32_t>(rows_there(at, index)) * kWarps * 32);
    load_bulk(stage.key_start, a.key_start + tile * kWideTile, kWideTile, full);
    load_bulk(stage.to_end, a.to_end + tile * kWideTile, kWideTile, full);
    load_bulk(stage.from_start, a.from_start + tile * kWideTile, kWideTile, full);
    load_bulk(stage.a, a.a + tile * kSquareTile, kSquareTile, full);
    load_bulk(stage.solve, a.solve + tile * kSquareTile, kSquareTile, full);
    load_bulk(stage.decay, a.decay + tile * kDecayFloats, kDecay, full);
  }
  __syncwarp();
  request_rows<kWarps>(a, walk.d_o, at, index, mine, stage.d_o, full);
}

// do^T, times the scale and lifted, as operand A in fp16.
__device__ void lift_outputs(float scale, const Lift& lift, std::uint32_t (&columns)[4][4]) {
#pragma unroll
  for (auto& step : columns) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = scale * lift.up[i % 2];
      step[i] = pack_half(factor * low_half(step[i]), factor * high_half(step[i]));
    }
  }
}

template <int kWarps>
__device__ void walk_chunk(const KdaChunked& a, std::int64_t tile, const StateColumn& mine,
                           const Stage<kWarps>& stage, unsigned char* staged, StateTiles& d_state,
                           Lift& lift) {
  std::uint32_t d_o[4][4], d_vn[4][4];
  stage.d_o.load_columns(d_o);
  float inputs[2];
  largest_inputs(d_o, inputs);
  lift_columns(inputs, fabsf(a.scale), d_state, lift);
  lift_outputs(a.scale, lift, d_o);
  float acc[8][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    std::uint32_t keys[4];
    as_half_operand(d_state[2 * step], d_state[2 * step + 1], keys);
    add_step(keys, stage.to_end, step, acc);
  }
  write_state_tile(d_state, lift.down, mine.first, a.d_state + tile * kStateTile);
  add_later(d_o, stage.a, acc);
  pack_columns(acc, d_vn);
  float d_vb[8][4] = {};
  add_later(d_vn, stage.solve, d_vb);
  decay_keys(stage.decay, d_state);
  add_outer(d_o, stage.from_start, d_state);
  std::uint32_t results[4][4];
  pack_results(d_vb, lift.down, results);
  stage_columns(results, staged);
  copy_column(staged, a.d_vb + tile * kWideTile + mine.first / 16 * 2048);
  const int quad = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 b = *reinterpret_cast<const float2*>(stage.decay + kChunkedWidth + 8 * n + 2 * quad);
    d_vb[n][0] *= -b.x, d_vb[n][1] *= -b.y, d_vb[n][2] *= -b.x, d_vb[n][3] *= -b.y;
  }
  pack_columns(d_vb, d_vn);
  add_outer(d_vn, stage.key_start, d_state);
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
  Lift lift;
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
                       shared.staged + warp * 2048, d_state, lift);
    __syncthreads();
    if (warp == 0 && index - kStages >= turn.begin) {
      request<kWarps>(a, walk, at, index - kStages, mine, shared.stages[slot], &shared.full[slot]);
    }
  }
  if (turn.begin > 0) {
    write_state(d_state, lift.down, mine.first, walk.carry_out + carried);
  } else {
    write_state(d_state, lift.down, mine.first, walk.to == nullptr ? nullptr : walk.to + border);
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
