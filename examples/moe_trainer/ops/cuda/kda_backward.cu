// Backward of the gated delta rule, t descending, dS [K, V] in fp32 registers, dS = gradient of the final
// state at first:
//   dq_t = scale S_t do_t;   dS += scale q_t do_t^T
//   dr = b_t dS^T k_t;   db_t = k_t^T dS r
//   dk_t = b_t dS r - Sd dr;   dv_t = dr
//   dS -= k_t dr^T;   dg_t = rowsum(dS * Sd);   dS *= exp(g_t)
// A forward scan keeps the state before every chunk; each chunk, last first, runs forward once more from
// there and keeps the state before each step. One block a head, one warp for 4 of its columns: sums over K
// stay in a warp, sums over V go through shared memory, warp after warp in order.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/kda.hpp"
#include "examples/moe_trainer/ops/cuda/kda_chunked.hpp"
#include "examples/moe_trainer/ops/cuda/kda_gradients.hpp"
#include "examples/moe_trainer/ops/cuda/kda_scan.cuh"
#include "examples/moe_trainer/ops/cuda/kda_widen.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

constexpr int kMaxThreads = static_cast<int>(kMaxKdaWidth) / kColumnsPerWarp * kWarp;
// Of kept states; heads go in as many turns as it takes.
constexpr std::int64_t kStateBytes = 128LL << 20;

struct Reverse {
  KdaSizes sizes;
  KdaPrepared in;
  const float* v;
  const float* d_o;
  const float* d_final_state;
  const float* checkpoints;  // (heads of this turn, slots, state)
  float* history;            // (sequences, heads of this turn, chunk, state)
  std::int64_t chunk, slots, first_head, heads;
  KdaHeadGradients out;
  float* d_v;
  float* d_initial_state;
};

// The sums over V that a step leaves in shared memory, for one warp: dq (K), dk (K), dg (K), db.
__device__ std::int64_t partial_floats(const KdaSizes& sizes) { return 3 * sizes.key_width + 1; }

template <int kRows>
__device__ void reverse_step(const Reverse& a, const KdaHead& at, std::int64_t t, const float* before,
                             LaneState<kRows>& d_state, float* partial) {
  const KdaSizes& sizes = a.sizes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  KdaStep<kRows> step;
  load_step<kRows>(sizes, a.in, a.v, at, t, step);
  float d_o[kColumnsPerWarp];
  load_columns(sizes, at, t, a.d_o, d_o);
  LaneState<kRows> decayed;
  load_lanes<kRows>(before, decayed);
  float residual[kColumnsPerWarp];
  decay_state<kRows>(step, decayed, residual);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float d_q = 0.0F;
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c) {
      d_q += (decayed[i][c] + step.beta * step.k[i] * residual[c]) * d_o[c];
      d_state[i][c] += sizes.scale * step.q[i] * d_o[c];
    }
    const std::int64_t row = lane + std::int64_t{i} * kWarp;
    if (row < sizes.key_width) partial[row] = sizes.scale * d_q;
  }
  float d_residual[kColumnsPerWarp];
  sum_over_rows<kRows>(d_state, step.k, d_residual);
#pragma unroll
  for (int c = 0; c < kColumnsPerWarp; ++c) d_residual[c] *= step.beta;
  float* d_v = a.d_v + value_row(sizes, at, t) * sizes.value_width + at.column;
#pragma unroll
  for (int c = 0; c < kColumnsPerWarp; ++c) {
    if (lane == c && at.column + c < sizes.value_width) d_v[c] = d_residual[c];
  }
  float d_beta = 0.0F;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float along_residual = 0.0F;    // (dS r)
    float along_d_residual = 0.0F;  // (Sd dr)
    float d_g = 0.0F;
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c) {
      along_residual += d_state[i][c] * residual[c];
      along_d_residual += decayed[i][c] * d_residual[c];
      d_state[i][c] -= step.k[i] * d_residual[c];
      d_g += d_state[i][c] * decayed[i][c];
      d_state[i][c] *= step.decay[i];
    }
    d_beta += step.k[i] * along_residual;
    const std::int64_t row = lane + std::int64_t{i} * kWarp;
    if (row < sizes.key_width) {
      partial[sizes.key_width + row] = step.beta * along_residual - along_d_residual;
      partial[2 * sizes.key_width + row] = d_g;
    }
  }
  d_beta = warp_sum(d_beta);
  if (lane == 0) partial[3 * sizes.key_width] = d_beta;
}

// Adds the warps' sums in order and writes step t's gradients.
__device__ void write_step(const Reverse& a, const KdaHead& at, std::int64_t t, const float* partials) {
  const std::int64_t width = a.sizes.key_width;
  const std::int64_t floats = partial_floats(a.sizes);
  const std::int64_t row = value_row(a.sizes, at, t);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  for (std::int64_t j = threadIdx.x; j < floats; j += blockDim.x) {
    float sum = 0.0F;
    for (int warp = 0; warp < warps; ++warp) sum += partials[warp * floats + j];
    if (j == 3 * width) {
      a.out.d_beta[row] = sum;
    } else {
      float* out = j < width ? a.out.d_q : j < 2 * width ? a.out.d_k : a.out.d_g;
      out[row * width + j % width] = sum;
    }
  }
}

template <int kRows>
__global__ void __launch_bounds__(kMaxThreads) kda_reverse(Reverse a) {
  extern __shared__ float
      kda_partials[];  // (2, warps, partial_floats): one half is read while the next is written
  const KdaSizes& sizes = a.sizes;
  const std::int64_t warps = blockDim.x / kWarp;
  const std::int64_t warp = threadIdx.x / kWarp;
  const std::int64_t turn_head = blockIdx.x % a.heads;
  const KdaHead at = kda_head(sizes, blockIdx.x / a.heads, a.first_head + turn_head, warp * kColumnsPerWarp);
  const std::int64_t lane_floats = std::int64_t{kRows} * kColumnsPerWarp * kWarp;
  const std::int64_t half = warps * partial_floats(sizes);
  float* history = a.history + (std::int64_t{blockIdx.x} * warps + warp) * a.chunk * lane_floats;
  LaneState<kRows> d_state;
  load_state<kRows>(sizes, at, a.d_final_state, d_state);
  int turn = 0;
  for (std::int64_t chunk = (at.length + a.chunk - 1) / a.chunk - 1; chunk >= 0; --chunk) {
    const std::int64_t begin = chunk * a.chunk;
    const std::int64_t end = begin + a.chunk < at.length ? begin + a.chunk : at.length;
    {
      LaneState<kRows> state;
      load_lanes<kRows>(
          a.checkpoints +
              ((turn_head * a.slots + kda_state_slot(at, a.chunk, chunk)) * warps + warp) * lane_floats,
          state);
      for (std::int64_t t = begin; t < end; ++t) {
        store_lanes<kRows>(state, history + (t - begin) * lane_floats);
        if (t + 1 == end) break;
        KdaStep<kRows> step;
        load_step<kRows>(sizes, a.in, a.v, at, t, step);
        advance_state<kRows>(step, state);
      }
    }
    for (std::int64_t t = end - 1; t >= begin; --t) {
      float* partials = kda_partials + turn * half;
      reverse_step<kRows>(a, at, t, history + (t - begin) * lane_floats, d_state,
                          partials + warp * partial_floats(sizes));
      __syncthreads();
      write_step(a, at, t, partials);
      turn = 1 - turn;
    }
  }
  if (a.d_initial_state != nullptr) store_state<kRows>(sizes, at, d_state, a.d_initial_state);
}

struct Plan {
  std::int64_t chunk, slots, heads;  // value heads a turn
};
// Chunks near the square root of the length keep the fewest states.
Plan plan_states(const KdaSizes& sizes) {
  std::int64_t chunk = 16;
  const std::int64_t tokens = sizes.batch * sizes.length;
  while (chunk * chunk * sizes.sequences < tokens && chunk < 128) chunk *= 2;
  const std::int64_t slots = tokens / chunk + sizes.sequences;
  const std::int64_t head_bytes =
      (chunk * sizes.sequences + slots) * kda_state_floats(sizes) * static_cast<std::int64_t>(sizeof(float));
  return {.chunk = chunk,
          .slots = slots,
          .heads = std::clamp<std::int64_t>(kStateBytes / head_bytes, 1, sizes.value_heads)};
}

void launch_steps(OpCall& call, const KdaBackward& op) {
  const KdaSizes sizes = kda_sizes(call, op.shape);
  const std::int64_t heads = sizes.value_heads;
  if (heads <= 0 || sizes.sequences <= 0) return;
  const KdaPrepared prepared = prepare_kda(call, op.shape, op.in);
  const KdaHeadGradients gradients = kda_head_gradients(call, op);
  const Plan plan = plan_states(sizes);
  auto* checkpoints = call.scratch<float>(plan.heads * plan.slots * kda_state_floats(sizes));
  auto* history = call.scratch<float>(sizes.sequences * plan.heads * plan.chunk * kda_state_floats(sizes));
  const std::int64_t warps = kda_warps_per_head(sizes);
  for (std::int64_t first = 0; first < heads; first += plan.heads) {
    const std::int64_t count = std::min(plan.heads, heads - first);
    scan_kda(call, KdaScan{.sizes = sizes,
                           .in = prepared,
                           .v = op.in.v,
                           .initial_state = op.in.initial_state,
                           .o = nullptr,
                           .final_state = nullptr,
                           .checkpoints = checkpoints,
                           .chunk = plan.chunk,
                           .slots = plan.slots,
                           .first_head = first,
                           .heads = count});
    const Reverse reverse{.sizes = sizes,
                          .in = prepared,
                          .v = op.in.v,
                          .d_o = op.d_o,
                          .d_final_state = op.d_final_state,
                          .checkpoints = checkpoints,
                          .history = history,
                          .chunk = plan.chunk,
                          .slots = plan.slots,
                          .first_head = first,
                          .heads = count,
                          .out = gradients,
                          .d_v = op.d_v,
                          .d_initial_state = op.d_initial_state};
    const auto shared_floats = static_cast<std::size_t>(2 * warps * (3 * sizes.key_width + 1));
    const Grid grid{.x = sizes.sequences * count,
                    .threads = static_cast<int>(warps) * kWarp,
                    .shared_bytes = shared_floats * sizeof(float)};
    with_rows_per_lane(sizes, [&]<int kRows>() { call.launch(kda_reverse<kRows>, grid, reverse); });
  }
  finish_kda_gradients(call, op, prepared, gradients);
}

}  // namespace

void launch(OpCall& call, const KdaBackward& op) {
  if (runs_chunked(call, op)) {
    launch_chunked(call, op);
  } else {
    run_widened(call, op, launch_steps);
  }
}

}  // namespace terrace::trainer::cuda
