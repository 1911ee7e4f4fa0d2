// One warp's share of a KDA head and one step of the recurrence, for the forward and the backward kernels.
//   Sd = exp(g) S;  r = v - Sd^T k;  S = Sd + beta k r^T
#pragma once

#include "examples/moe_trainer/ops/cuda/kda.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {

template <int kRows>
using LaneState = float[kRows][kColumnsPerWarp];

struct KdaHead {
  std::int64_t head;  // sequence * HV + hv
  std::int64_t sequence, value_head, key_head;
  std::int64_t first_token, length;  // of the sequence
  std::int64_t column;               // the warp's first
};
__device__ inline KdaHead kda_head(const KdaSizes& sizes, std::int64_t sequence, std::int64_t value_head,
                                   std::int64_t column) {
  const bool packed = sizes.starts != nullptr;
  const std::int64_t first = packed ? sizes.starts[sequence] : sequence * sizes.length;
  return {sequence * sizes.value_heads + value_head,
          sequence,
          value_head,
          value_head / (sizes.value_heads / sizes.key_heads),
          first,
          packed ? sizes.starts[sequence + 1] - first : sizes.length,
          column};
}
// Where the state before chunk n of a sequence is kept: sequences follow one another, each with a slot to
// spare.
__device__ inline std::int64_t kda_state_slot(const KdaHead& at, std::int64_t chunk, std::int64_t n) {
  return at.first_token / chunk + at.sequence + n;
}

// What a lane needs of step t: its rows of q, k and the decay, the warp's columns of v, and beta. Rows and
// columns that do not exist are zero, with decay 1: their state stays zero.
template <int kRows>
struct KdaStep {
  float q[kRows];
  float k[kRows];
  float decay[kRows];
  float v[kColumnsPerWarp];
  float beta;
};

__device__ inline std::int64_t value_row(const KdaSizes& sizes, const KdaHead& at, std::int64_t t) {
  return (at.first_token + t) * sizes.value_heads + at.value_head;
}

// The warp's columns of row t of a (B, T, HV, V) tensor.
__device__ inline void load_columns(const KdaSizes& sizes, const KdaHead& at, std::int64_t t,
                                    const float* from, float (&to)[kColumnsPerWarp]) {
  const float* row = from + value_row(sizes, at, t) * sizes.value_width;
#pragma unroll
  for (int c = 0; c < kColumnsPerWarp; ++c) {
    to[c] = at.column + c < sizes.value_width ? row[at.column + c] : 0.0F;
  }
}

template <int kRows>
__device__ void load_step(const KdaSizes& sizes, const KdaPrepared& in, const float* v, const KdaHead& at,
                          std::int64_t t, KdaStep<kRows>& step) {
  const std::int64_t lane = threadIdx.x % kWarp;
  const std::int64_t head_row = value_row(sizes, at, t);
  const std::int64_t key_row = (at.first_token + t) * sizes.key_heads + at.key_head;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t row = lane + std::int64_t{i} * kWarp;
    const bool exists = row < sizes.key_width;
    step.q[i] = exists ? in.q[key_row * sizes.key_width + row] : 0.0F;
    step.k[i] = exists ? in.k[key_row * sizes.key_width + row] : 0.0F;
    step.decay[i] = exists ? expf(in.g[head_row * sizes.key_width + row]) : 1.0F;
  }
  load_columns(sizes, at, t, v, step.v);
  step.beta = in.beta[head_row];
}

// column[c] = sum over all rows of state[row][c] row_factor[row], in every lane.
template <int kRows>
__device__ void sum_over_rows(const LaneState<kRows>& state, const float (&row_factor)[kRows],
                              float (&column)[kColumnsPerWarp]) {
#pragma unroll
  for (int c = 0; c < kColumnsPerWarp; ++c) {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum += state[i][c] * row_factor[i];
    column[c] = warp_sum(sum);
  }
}

// state becomes Sd, residual r.
template <int kRows>
__device__ void decay_state(const KdaStep<kRows>& step, LaneState<kRows>& state,
                            float (&residual)[kColumnsPerWarp]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c) state[i][c] *= step.decay[i];
  }
  sum_over_rows<kRows>(state, step.k, residual);
#pragma unroll
  for (int c = 0; c < kColumnsPerWarp; ++c) residual[c] = step.v[c] - residual[c];
}

template <int kRows>
__device__ void advance_state(const KdaStep<kRows>& step, LaneState<kRows>& state) {
  float residual[kColumnsPerWarp];
  decay_state<kRows>(step, state, residual);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c) state[i][c] += step.beta * step.k[i] * residual[c];
  }
}

// A warp's state in the lanes' order: (rows a lane, columns a warp, 32 lanes); each lane reads what it wrote.
template <int kRows>
__device__ void store_lanes(const LaneState<kRows>& state, float* to) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c)
      to[(i * kColumnsPerWarp + c) * kWarp + threadIdx.x % kWarp] = state[i][c];
  }
}
template <int kRows>
__device__ void load_lanes(const float* from, LaneState<kRows>& state) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c) {
      state[i][c] = from[(i * kColumnsPerWarp + c) * kWarp + threadIdx.x % kWarp];
    }
  }
}

// A warp's share of a state tensor (B, HV, K, V); null: zero.
template <int kRows>
__device__ void load_state(const KdaSizes& sizes, const KdaHead& at, const float* from,
                           LaneState<kRows>& state) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t row = threadIdx.x % kWarp + std::int64_t{i} * kWarp;
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c) {
      const bool exists = from != nullptr && row < sizes.key_width && at.column + c < sizes.value_width;
      state[i][c] =
          exists ? from[(at.head * sizes.key_width + row) * sizes.value_width + at.column + c] : 0.0F;
    }
  }
}
template <int kRows>
__device__ void store_state(const KdaSizes& sizes, const KdaHead& at, const LaneState<kRows>& state,
                            float* to) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t row = threadIdx.x % kWarp + std::int64_t{i} * kWarp;
#pragma unroll
    for (int c = 0; c < kColumnsPerWarp; ++c) {
      if (row < sizes.key_width && at.column + c < sizes.value_width) {
        to[(at.head * sizes.key_width + row) * sizes.value_width + at.column + c] = state[i][c];
      }
    }
  }
}

// Calls launch_rows.template operator()<rows a lane>().
template <typename LaunchRows>
void with_rows_per_lane(const KdaSizes& sizes, const LaunchRows& launch_rows) {
  switch (kda_rows_per_lane(sizes)) {
    case 1:
      return launch_rows.template operator()<1>();
    case 2:
      return launch_rows.template operator()<2>();
    case 3:
      return launch_rows.template operator()<3>();
    default:
      return launch_rows.template operator()<4>();
  }
}

}  // namespace terrace::trainer::cuda
