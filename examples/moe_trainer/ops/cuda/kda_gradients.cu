// l2norm:  y = x r, r = (sum x^2 + eps)^-1/2:  d_x = r (d_y - y <y, d_y>), d_y summed over the value heads of
// the key head softplus gate:     d_z = -exp(A) d_g sigmoid(z + dt),  d_A = sum of d_g g lower-bound gate:  y
// = sigmoid(exp(A) (z + dt)),  d_z = d_g lower_bound y (1 - y) exp(A),  d_A = sum of d_z (z + dt) both: d_dt
// = sum over b, t of d_z beta:              d_beta sigmoid' = d_beta b (1 - b)
#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/kda_gradients.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

struct NormBackward {
  std::int64_t rows, group, width;  // rows = B T H; group = HV / H
  float eps;
  const float* x;    // (rows, width)
  const float* d_y;  // (rows, group, width); may be d_x where group is 1
  float* d_x;
};

__device__ float group_sum(const NormBackward& a, std::int64_t row, std::int64_t column) {
  float sum = 0.0F;
  for (std::int64_t i = 0; i < a.group; ++i) sum += a.d_y[(row * a.group + i) * a.width + column];
  return sum;
}

// One warp a row; a lane writes only where it alone has read.
__global__ void l2_norm_backward(NormBackward a) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= a.rows) return;
  const float* x = a.x + row * a.width;
  float squares = 0.0F;
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < a.width; c += kWarp) {
    squares += x[c] * x[c];
    product += x[c] * group_sum(a, row, c);
  }
  const float r = 1.0F / sqrtf(warp_sum(squares) + a.eps);
  const float pull = warp_sum(product) * r * r;
  for (std::int64_t c = threadIdx.x % kWarp; c < a.width; c += kWarp) {
    a.d_x[row * a.width + c] = r * (group_sum(a, row, c) - x[c] * pull);
  }
}

__global__ void beta_backward(const float* beta, std::int64_t count, float* d_beta) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < count) d_beta[at] *= beta[at] * (1.0F - beta[at]);
}

struct GateBackward {
  std::int64_t rows, columns, key_width;  // rows = B T; columns = HV K
  KdaGate gate;
  float lower_bound;
  const float* z;
  const float* a_log;
  const float* dt_bias;
  const float* g;
  float* d_gate;  // d_g in, d_z out
  RowSlices slices;
  float* d_dt;  // (slices, columns)
  float* d_a;   // (slices, columns)
};

__global__ void gate_backward(GateBackward a) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kColumnThreads + threadIdx.x;
  if (column >= a.columns) return;
  const std::int64_t begin = std::int64_t{blockIdx.y} * a.slices.rows_per_slice;
  const std::int64_t end =
      begin + a.slices.rows_per_slice < a.rows ? begin + a.slices.rows_per_slice : a.rows;
  const float rate = expf(a.a_log[column / a.key_width]);
  const float dt = a.dt_bias[column];
  float d_dt = 0.0F;
  float d_a = 0.0F;
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t at = row * a.columns + column;
    const float z = a.z[at] + dt;
    const float d_g = a.d_gate[at];
    float d_z = 0.0F;
    if (a.gate == KdaGate::kSoftplus) {
      d_z = -rate * d_g * sigmoid(z);
      d_a += d_g * a.g[at];
    } else {
      const float y = sigmoid(rate * z);
      d_z = d_g * a.lower_bound * y * (1.0F - y) * rate;
      d_a += d_z * z;
    }
    a.d_gate[at] = d_z;
    d_dt += d_z;
  }
  a.d_dt[std::int64_t{blockIdx.y} * a.columns + column] = d_dt;
  a.d_a[std::int64_t{blockIdx.y} * a.columns + column] = d_a;
}

// One block a value head: d_a_log += sum over slices and the head's columns of d_a (slices, HV K).
__global__ void rate_totals(const float* d_a, std::int64_t slices, std::int64_t columns,
                            std::int64_t key_width, float* d_a_log) {
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < slices * key_width; i += kColumnThreads) {
    sum += d_a[i / key_width * columns + blockIdx.x * key_width + i % key_width];
  }
  const float total = block_sum<kColumnThreads>(sum);
  if (threadIdx.x == 0) d_a_log[blockIdx.x] += total;
}

void finish_gate(OpCall& call, const KdaBackward& op, const KdaPrepared& prepared) {
  const KdaShape& shape = op.shape;
  const std::int64_t rows = shape.batch * shape.length;
  const std::int64_t columns = shape.value_heads * shape.key_width;
  const RowSlices slices = slice_rows(rows);
  auto* d_dt = call.scratch<float>(slices.slices * columns);
  auto* d_a = call.scratch<float>(slices.slices * columns);
  call.launch(gate_backward,
              Grid{.x = ceil_div(columns, kColumnThreads), .y = slices.slices, .threads = kColumnThreads},
              GateBackward{.rows = rows,
                           .columns = columns,
                           .key_width = shape.key_width,
                           .gate = shape.gate,
                           .lower_bound = shape.lower_bound,
                           .z = op.in.gate,
                           .a_log = op.in.a_log,
                           .dt_bias = op.in.dt_bias,
                           .g = prepared.g,
                           .d_gate = op.d_gate,
                           .slices = slices,
                           .d_dt = d_dt,
                           .d_a = d_a});
  add_gate_sums(call, op, {d_dt, d_a, slices.slices});
}

struct PartOf {
  const float* parts;
  std::int64_t columns;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    return parts[row * columns + column];
  }
};

}  // namespace

void add_gate_sums(OpCall& call, const KdaBackward& op, const KdaGateParts& parts) {
  const KdaShape& shape = op.shape;
  const std::int64_t columns = shape.value_heads * shape.key_width;
  if (parts.count <= 0 || columns <= 0) return;
  if (op.d_dt_bias != nullptr) {
    add_column_sums(call, PartOf{parts.d_dt, columns}, parts.count, columns, op.d_dt_bias);
  }
  if (op.d_a_log == nullptr) return;
  auto* d_a = call.scratch<float>(columns);
  call.zero(d_a, columns);
  add_column_sums(call, PartOf{parts.d_a, columns}, parts.count, columns, d_a);
  call.launch(rate_totals, Grid{.x = shape.value_heads, .threads = kColumnThreads}, d_a, std::int64_t{1},
              columns, shape.key_width, op.d_a_log);
}

KdaHeadGradients kda_head_gradients(OpCall& call, const KdaBackward& op) {
  const KdaShape& shape = op.shape;
  const bool one_to_one = shape.key_heads == shape.value_heads;
  const std::int64_t count = shape.batch * shape.length * shape.value_heads * shape.key_width;
  return {.d_q = one_to_one ? op.d_q.f32() : call.scratch<float>(count),
          .d_k = one_to_one ? op.d_k.f32() : call.scratch<float>(count),
          .d_g = op.d_gate,
          .d_beta = op.d_beta};
}

void finish_kda_gradients(OpCall& call, const KdaBackward& op, const KdaPrepared& prepared,
                          const KdaHeadGradients& gradients) {
  const KdaShape& shape = op.shape;
  const std::int64_t tokens = shape.batch * shape.length;
  const std::int64_t rows = tokens * shape.key_heads;
  const Grid grid{.x = ceil_div(rows, kRowsPerBlock), .threads = kThreads};
  NormBackward norm{.rows = rows,
                    .group = shape.value_heads / shape.key_heads,
                    .width = shape.key_width,
                    .eps = shape.l2_eps,
                    .x = op.in.q,
                    .d_y = gradients.d_q,
                    .d_x = op.d_q};
  call.launch(l2_norm_backward, grid, norm);
  norm.x = op.in.k;
  norm.d_y = gradients.d_k;
  norm.d_x = op.d_k;
  call.launch(l2_norm_backward, grid, norm);
  const std::int64_t betas = tokens * shape.value_heads;
  call.launch(beta_backward, grid_for(betas, kThreads), prepared.beta, betas, op.d_beta);
  finish_gate(call, op, prepared);
}

}  // namespace terrace::trainer::cuda
