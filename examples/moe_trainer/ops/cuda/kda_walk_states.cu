// Along a sequence, chunk after chunk, S in registers:
//   x = b (v - (k D) S)      vn = M x      o = s ((q D) S + A vn)      S = D S + (k R)^T vn
// The solve comes after the state: x is rounded before M takes differences of its rows, not after, so what
// rounding leaves of a row vanishes in the state with the next one. D multiplies the fp32 state, never a
// rounded one, so a decay near 1 does not drift however many chunks it is applied to.
//
// Where heads are few, the time is that of one warp going through its chunks: o then has warps of its own,
// which take S and vn from shared memory, while the state goes on.
#include "examples/moe_trainer/ops/cuda/kda_walk.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Barrier;

// For backward from_start and a are not read.
template <int kWarps>
struct Stage {
  unsigned char key_start[kWideTile], to_end[kWideTile], from_start[kWideTile];
  unsigned char a[kSquareTile], solve[kSquareTile];
  ValueRows<kWarps> v;
  float decay[kDecayFloats];
};
// What a warp with a state passes to the one that forms its o: operands A, and what undoes their lift.
struct Passed {
  uint4 state[8][kWarp], vn[4][kWarp];
  float2 down[kWarp];
};
template <int kWarps>
struct Shared {
  Stage<kWarps> stages[kStages];
  unsigned char staged[kWarps * 2048];
  Passed passed[kWarps < 8 ? kWarps : 1];
  Barrier full[kStages];
};

// What a walk is for.
enum class Walk : std::uint8_t { kOutput, kStates };
// Whether o has its own warps, as many as the states.
template <int kWarps, Walk kFor>
constexpr bool kApart = kFor == Walk::kOutput&& kWarps < 8;
template <int kWarps, Walk kFor>
constexpr int kThreads = kWarps* kWarp*(kApart<kWarps, kFor> ? 2 : 1);

// By the first warp.
template <int kWarps, Walk kFor>
__device__ void request(const KdaChunked& a, const SequencePlace& at, std::int64_t index,
                        const StateColumn& mine, Stage<kWarps>& stage, Barrier* full) {
  constexpr std::uint32_t kDecay = kDecayFloats * sizeof(float);
  constexpr std::uint32_t kOutputOnly = kFor == Walk::kOutput ? kWideTile + kSquareTile : 0;
  const std::int64_t tile = tile_index(a, at, index, mine.head);
  hopper::fence_shared_for_async();
  if ((threadIdx.x & 31) == 0) {
    full->arrive_expecting(2 * kWideTile + kSquareTile + kDecay + kOutputOnly +
                           static_cast<std::uint32_t>(rows_there(at, index)) * kWarps * 32);
    load_bulk(stage.key_start, a.key_start + tile * kWideTile, kWideTile, full);
    load_bulk(stage.to_end, a.to_end + tile * kWideTile, kWideTile, full);
    load_bulk(stage.solve, a.solve + tile * kSquareTile, kSquareTile, full);
    load_bulk(stage.decay, a.decay + tile * kDecayFloats, kDecay, full);
    if (kFor == Walk::kOutput) {
      load_bulk(stage.from_start, a.from_start + tile * kWideTile, kWideTile, full);
      load_bulk(stage.a, a.a + tile * kSquareTile, kSquareTile, full);
    }
  }
  __syncwarp();
  request_rows<kWarps>(a, a.v, at, index, mine, stage.v, full);
}

// acc = b (v - acc), lifted.
__device__ void residual(const std::uint32_t (&v)[4][4], const float* beta, const Lift& lift,
                         float (&acc)[8][4]) {
  const int quad = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 b = *reinterpret_cast<const float2*>(beta + 8 * n + 2 * quad);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::uint32_t pair = v[n / 2][2 * (n % 2) + e];
      acc[n][2 * e] = b.x * (low_half(pair) * lift.up[e] - acc[n][2 * e]);
      acc[n][2 * e + 1] = b.y * (high_half(pair) * lift.up[e] - acc[n][2 * e + 1]);
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

__device__ void finish_output(const KdaChunked& a, const KdaWalk& walk, const SequencePlace& at,
                              std::int64_t index, const StateColumn& mine, const float2& down,
                              const float (&out)[8][4], unsigned char* staged) {
  std::uint32_t results[4][4];
  pack_results(out, {a.scale * down.x, a.scale * down.y}, results);
  stage_columns(results, staged);
  write_output(a, walk, at, index, mine, staged);
}

// By a warp with a state. `passed` is used where o has its own warps.
template <int kWarps, Walk kFor>
__device__ void walk_chunk(const KdaChunked& a, const KdaWalk& walk, const SequencePlace& at,
                           std::int64_t index, const StateColumn& mine, const Stage<kWarps>& stage,
                           unsigned char* staged, Passed& passed, StateTiles& state, Lift& lift) {
  constexpr bool kPasses = kApart<kWarps, kFor>, kOwnOutput = kFor == Walk::kOutput && !kPasses;
  const std::int64_t tile = tile_index(a, at, index, mine.head);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t v[4][4];
  stage.v.load_columns(v);
  float inputs[2];
  largest_inputs(v, inputs);
  lift_columns(inputs, 1.0F, state, lift);
  if (kPasses) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      std::uint32_t keys[4];
      as_half_operand(state[2 * step], state[2 * step + 1], keys);
      passed.state[step][lane] = as_piece(keys);
    }
    passed.down[lane] = make_float2(lift.down[0], lift.down[1]);
    hopper::named_barrier_sync(1, kThreads<kWarps, kFor>);
  }
  float acc[8][4] = {}, out[8][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    std::uint32_t keys[4];
    as_half_operand(state[2 * step], state[2 * step + 1], keys);
    add_step(keys, stage.key_start, step, acc);
    if (kOwnOutput) add_step(keys, stage.from_start, step, out);
  }
  if (kFor == Walk::kStates) write_state_tile(state, lift.down, mine.first, a.state + tile * kStateTile);
  residual(v, stage.decay + kChunkedWidth, lift, acc);
  std::uint32_t vn[4][4];
  pack_columns(acc, vn);
  float solved[8][4] = {};
  add_earlier(vn, stage.solve, solved);
  pack_columns(solved, vn);
  if (kPasses) {
#pragma unroll
    for (int step = 0; step < 4; ++step) passed.vn[step][lane] = as_piece(vn[step]);
    hopper::named_barrier_sync(1, kThreads<kWarps, kFor>);
  }
  decay_keys(stage.decay, state);
  add_outer(vn, stage.to_end, state);
  if (kOwnOutput) {
    add_earlier(vn, stage.a, out);
    finish_output(a, walk, at, index, mine, make_float2(lift.down[0], lift.down[1]), out, staged);
  } else if (kFor == Walk::kStates) {
    std::uint32_t results[4][4];
    pack_results(solved, lift.down, results);
    stage_columns(results, staged);
    const std::int64_t place = tile * kWideTile + mine.first / 16 * 2048;
    copy_column(staged, a.vn + place);
    pack_rests(solved, lift.down, results);
    stage_columns(results, staged);
    copy_column(staged, a.vn_rest + place);
  }
}

// By a warp that forms the o of another warp's state.
template <int kWarps>
__device__ void form_output(const KdaChunked& a, const KdaWalk& walk, const SequencePlace& at,
                            std::int64_t index, const StateColumn& mine, const Stage<kWarps>& stage,
                            unsigned char* staged, const Passed& passed) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto take = [](const uint4& from, std::uint32_t(&to)[4]) {
    to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
  };
  float out[8][4] = {};
  hopper::named_barrier_sync(1, kThreads<kWarps, Walk::kOutput>);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    std::uint32_t keys[4];
    take(passed.state[step][lane], keys);
    add_step(keys, stage.from_start, step, out);
  }
  hopper::named_barrier_sync(1, kThreads<kWarps, Walk::kOutput>);
  std::uint32_t vn[4][4];
#pragma unroll
  for (int step = 0; step < 4; ++step) take(passed.vn[step][lane], vn[step]);
  add_earlier(vn, stage.a, out);
  finish_output(a, walk, at, index, mine, passed.down[lane], out, staged);
}

template <int kWarps, Walk kFor>
__global__ void __launch_bounds__(kThreads<kWarps, kFor>, 1) kda_walk_states(KdaChunked a, KdaWalk walk) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  constexpr int kSplits = 8 / kWarps;
  auto& shared = *reinterpret_cast<Shared<kWarps>*>(kda_shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int block_column = static_cast<int>(blockIdx.x % kSplits) * kWarps * 16;
  const int column_warp = warp % kWarps;
  const StateColumn mine{blockIdx.x / kSplits, blockIdx.y, block_column + column_warp * 16};
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
      request<kWarps, kFor>(a, at, turn.begin + i, mine, shared.stages[i], &shared.full[i]);
    }
  }
  __syncthreads();  // zeroed rows
  const std::int64_t carried = state_offset(a, carry_slot(a, mine.sequence), mine.head);
  const std::int64_t border = state_offset(a, mine.sequence, mine.head);
  const bool forms_output = kApart<kWarps, kFor> && warp >= kWarps;
  StateTiles state;
  Lift lift;
  if (forms_output) {
    read_state(nullptr, mine.first, state);
  } else if (turn.begin > 0) {
    read_state(walk.carry_in + carried, mine.first, state);
  } else {
    read_state(walk.from == nullptr ? nullptr : walk.from + border, mine.first, state);
  }
  for (std::int64_t index = turn.begin; index < turn.end; ++index) {
    const auto turn_index = static_cast<unsigned>(index - turn.begin);
    const unsigned slot = turn_index % kStages;
    shared.full[slot].wait((turn_index / kStages) & 1U);
    unsigned char* staged = shared.staged + column_warp * 2048;
    Passed& passed = shared.passed[kWarps < 8 ? column_warp : 0];
    if (forms_output) {
      form_output<kWarps>(a, walk, at, index, mine, shared.stages[slot], staged, passed);
    } else {
      walk_chunk<kWarps, kFor>(a, walk, at, index, mine, shared.stages[slot], staged, passed, state, lift);
    }
    __syncthreads();
    if (warp == 0 && index + kStages < turn.end) {
      request<kWarps, kFor>(a, at, index + kStages, mine, shared.stages[slot], &shared.full[slot]);
    }
  }
  if (forms_output) return;
  if (turn.end < at.chunks) {
    write_state(state, lift.down, mine.first, walk.carry_out + carried);
  } else {
    write_state(state, lift.down, mine.first, walk.to == nullptr ? nullptr : walk.to + border);
  }
}

}  // namespace

void walk_states(OpCall& call, const KdaChunked& chunked, const KdaWalk& walk) {
  with_warps(chunked, [&]<int kWarps>() {
    Grid grid{.x = chunked.sequences * (8 / kWarps),
              .y = chunked.value_heads,
              .threads = kThreads<kWarps, Walk::kStates>,
              .shared_bytes = sizeof(Shared<kWarps>)};
    if (walk.o == nullptr) {
      call.launch(kda_walk_states<kWarps, Walk::kStates>, grid, chunked, walk);
      return;
    }
    grid.threads = kThreads<kWarps, Walk::kOutput>;
    call.launch(kda_walk_states<kWarps, Walk::kOutput>, grid, chunked, walk);
  });
}

}  // namespace terrace::trainer::cuda
