// loss_sum += sum over counted t of (lse_t - z_t[label_t]),  z = hidden weight^T
//   hidden: (T, D)   weight: (V, D)   labels: (T), -100: not counted
// d_z = (softmax(z) - onehot(label)) scale;  d_hidden = d_z weight;  d_weight += d_z^T hidden
// In chunks of rows, so that z never takes more than 64 MiB (or one row); d_z takes its place.
// Also the sum of squares of gradient clipping: out += sum x^2.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kLogitsBytes = 64LL << 20;
constexpr std::int32_t kIgnored = -100;
constexpr std::int64_t kMaxPartials = 1024;

enum class Want : std::uint8_t { kLoss, kLossAndGradient };

// One block a row of z (V); a label outside the vocabulary makes the loss NaN.
__global__ void row_loss(float* logits, const std::int32_t* labels, std::int64_t vocabulary, float scale,
                         Want want, float* loss) {
  float* z = logits + std::int64_t{blockIdx.x} * vocabulary;
  const std::int32_t label = labels[blockIdx.x];
  if (label == kIgnored) {
    for (std::int64_t v = threadIdx.x; v < vocabulary; v += kThreads) z[v] = 0.0F;
    if (threadIdx.x == 0) loss[blockIdx.x] = 0.0F;
    return;
  }
  float largest = -INFINITY;
  for (std::int64_t v = threadIdx.x; v < vocabulary; v += kThreads) largest = fmaxf(largest, z[v]);
  const float top = block_max<kThreads>(largest);
  float sum = 0.0F;
  for (std::int64_t v = threadIdx.x; v < vocabulary; v += kThreads) sum += expf(z[v] - top);
  const float total = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) {
    const bool known = label >= 0 && label < vocabulary;
    loss[blockIdx.x] = known ? logf(total) - (z[label] - top) : NAN;
  }
  if (want == Want::kLoss) return;
  __syncthreads();  // the label's logit has been read
  for (std::int64_t v = threadIdx.x; v < vocabulary; v += kThreads) {
    z[v] = (expf(z[v] - top) / total - (v == label ? 1.0F : 0.0F)) * scale;
  }
}

// out += sum of x, by one block.
__global__ void add_sum(const float* x, std::int64_t count, float* out) {
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum += x[i];
  const float total = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) *out += total;
}

__global__ void square_partials(const float* x, std::int64_t count, float* partial) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  float sum = 0.0F;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride)
    sum += x[i] * x[i];
  const float total = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

struct Chunk {
  std::int64_t row, rows;
};

void backward_chunk(OpCall& call, const LinearCrossEntropy& op, const Chunk& chunk, const float* d_z) {
  const std::int64_t d = op.width;
  const std::int64_t v = op.vocabulary;
  if (op.d_hidden != nullptr) {
    launch(call, Matmul{.m = chunk.rows,
                        .n = d,
                        .k = v,
                        .a = d_z,
                        .ta = Transpose::kNo,
                        .b = op.weight,
                        .tb = Transpose::kNo,
                        .c = op.d_hidden + chunk.row * d});
  }
  if (op.d_weight != nullptr) {
    launch(call, Matmul{.m = v,
                        .n = d,
                        .k = chunk.rows,
                        .a = d_z,
                        .ta = Transpose::kYes,
                        .b = op.hidden + chunk.row * d,
                        .tb = Transpose::kNo,
                        .c = op.d_weight,
                        .into = Accumulate::kAdd});
  }
}

}  // namespace

void launch(OpCall& call, const LinearCrossEntropy& op) {
  call.set_shape({op.tokens, op.width, op.vocabulary});
  if (op.tokens <= 0) return;
  const std::int64_t row_bytes = op.vocabulary * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t rows = std::clamp<std::int64_t>(kLogitsBytes / row_bytes, 1, op.tokens);
  const Want want = op.d_hidden != nullptr || op.d_weight != nullptr ? Want::kLossAndGradient : Want::kLoss;
  auto* logits = call.scratch<float>(rows * op.vocabulary);
  auto* losses = call.scratch<float>(op.tokens);
  for (std::int64_t row = 0; row < op.tokens; row += rows) {
    const Chunk chunk{row, std::min(rows, op.tokens - row)};
    launch(call, Matmul{.m = chunk.rows,
                        .n = op.vocabulary,
                        .k = op.width,
                        .a = op.hidden + row * op.width,
                        .ta = Transpose::kNo,
                        .b = op.weight,
                        .tb = Transpose::kYes,
                        .c = logits});
    call.set_shape({op.tokens, op.width, op.vocabulary});
    call.launch(row_loss, Grid{.x = chunk.rows, .threads = kThreads}, logits, op.labels + row, op.vocabulary,
                op.gradient_scale, want, losses + row);
    if (want == Want::kLossAndGradient) backward_chunk(call, op, chunk, logits);
  }
  call.launch(add_sum, Grid{.threads = kThreads}, losses, op.tokens, op.loss_sum);
}

void launch(OpCall& call, const SumOfSquares& op) {
  call.set_shape({op.count});
  const std::int64_t blocks = std::min(ceil_div(op.count, std::int64_t{kThreads} * 16), kMaxPartials);
  if (blocks <= 0) return;
  auto* partial = call.scratch<float>(blocks);
  call.launch(square_partials, Grid{.x = blocks, .threads = kThreads}, op.x, op.count, partial);
  call.launch(add_sum, Grid{.threads = kThreads}, partial, blocks, op.out);
}

}  // namespace terrace::trainer::cuda
