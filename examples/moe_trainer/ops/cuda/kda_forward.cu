// The gated delta rule, one step after another, S [K, V] in fp32 registers:
//   Sd = exp(g_t) S;  r = v_t - Sd^T k_t;  S = Sd + b_t k_t r^T;  o_t = scale S^T q_t
// One warp for 4 columns of one head's state; no shared memory, no barrier.
#include "examples/moe_trainer/ops/cuda/kda.hpp"
#include "examples/moe_trainer/ops/cuda/kda_chunked.hpp"
#include "examples/moe_trainer/ops/cuda/kda_scan.cuh"
#include "examples/moe_trainer/ops/cuda/kda_widen.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;

template <int kRows>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) kda_forward(KdaScan scan) {
  const KdaSizes& sizes = scan.sizes;
  const std::int64_t warps_per_head = (sizes.value_width + kColumnsPerWarp - 1) / kColumnsPerWarp;
  const std::int64_t warp = std::int64_t{blockIdx.y} * kWarpsPerBlock + threadIdx.x / kWarp;
  if (warp >= warps_per_head) return;
  const std::int64_t turn_head = blockIdx.x % scan.heads;
  const KdaHead at =
      kda_head(sizes, blockIdx.x / scan.heads, scan.first_head + turn_head, warp * kColumnsPerWarp);
  const std::int64_t lane_floats = std::int64_t{kRows} * kColumnsPerWarp * kWarp;
  LaneState<kRows> state;
  load_state<kRows>(sizes, at, scan.initial_state, state);
  for (std::int64_t t = 0; t < at.length; ++t) {
    if (scan.checkpoints != nullptr && t % scan.chunk == 0) {
      const std::int64_t place =
          (turn_head * scan.slots + kda_state_slot(at, scan.chunk, t / scan.chunk)) * warps_per_head + warp;
      store_lanes<kRows>(state, scan.checkpoints + place * lane_floats);
    }
    KdaStep<kRows> step;
    load_step<kRows>(sizes, scan.in, scan.v, at, t, step);
    advance_state<kRows>(step, state);
    if (scan.o == nullptr) continue;
    float out[kColumnsPerWarp];
    sum_over_rows<kRows>(state, step.q, out);
    float* o = scan.o + value_row(sizes, at, t) * sizes.value_width + at.column;
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c) {
      if (threadIdx.x % kWarp == c && at.column + c < sizes.value_width) o[c] = sizes.scale * out[c];
    }
  }
  if (scan.final_state != nullptr) store_state<kRows>(sizes, at, state, scan.final_state);
}

}  // namespace

void scan_kda(OpCall& call, const KdaScan& scan) {
  const Grid grid{.x = scan.sizes.sequences * scan.heads,
                  .y = ceil_div(kda_warps_per_head(scan.sizes), kWarpsPerBlock),
                  .threads = kWarpsPerBlock * kWarp};
  with_rows_per_lane(scan.sizes, [&]<int kRows>() { call.launch(kda_forward<kRows>, grid, scan); });
}

namespace {

void launch_steps(OpCall& call, const Kda& op) {
  const KdaSizes sizes = kda_sizes(call, op.shape);
  const KdaPrepared prepared = prepare_kda(call, op.shape, op.in);
  scan_kda(call, KdaScan{.sizes = sizes,
                         .in = prepared,
                         .v = op.in.v,
                         .initial_state = op.in.initial_state,
                         .o = op.o,
                         .final_state = op.final_state,
                         .checkpoints = nullptr,
                         .chunk = 1,
                         .slots = 0,
                         .first_head = 0,
                         .heads = sizes.value_heads});
}

}  // namespace

void launch(OpCall& call, const Kda& op) {
  if (runs_chunked(call, op)) {
    launch_chunked(call, op);
  } else {
    run_widened(call, op, launch_steps);
  }
}

}  // namespace terrace::trainer::cuda
