// The indexer's gradients of a token by wgmma: one block a token, its index heads (64 rows) against tiles of
// 64 chosen keys, which pass twice. X = qI kI^T (64 x 64, k 128).
//   first:  I = c sum_h w_h relu(x_h), kept in shared memory; then KL and dI = weight (softmax(I) - share /
//   sum share) second: dx_h = c w_h dI [x_h > 0] into blocks for the keys, dw_h = c sum dI relu(x_h), dqI +=
//   dx kI
#include "examples/moe_trainer/ops/cuda/dsa_backward_hopper.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"

namespace terrace::trainer::cuda {
namespace {

using hopper::Major;
using hopper::Start;

constexpr int kThreads = hopper::kWarpgroup;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTileRows = kBlockSlots;
constexpr int kBoxes = kIndexWidth / kBoxColumns;
constexpr int kBoxBytes = kDsaHeads * 128;
constexpr int kTileBytes = kBoxes * kBoxBytes;
constexpr int kStages = 2;
constexpr int kStage = kTileBytes;  // after qI
constexpr int kGradient = kStage + kStages * kTileBytes;
constexpr int kPartial = kGradient + kBoxBytes;  // (warps, 64)
constexpr int kScores = kPartial + kWarps * kTileRows * 4;

constexpr int shared_bytes(std::int64_t blocks) {
  return kScores + static_cast<int>(blocks) * kTileRows * 4 + 1024;
}

// What a thread is in the accumulator.
struct Place {
  int row, quad;
};
__device__ inline Place place() {
  const int thread = static_cast<int>(threadIdx.x);
  return {thread / kWarp * 16 + thread % kWarp / 4, thread % 4};
}

__device__ inline void copy_keys(const IndexGradients& a, std::int64_t token, int tile, int count,
                                 unsigned char* shared) {
  const Bf16* sequence = a.k + token / a.sizes.length * a.sizes.length * kIndexWidth;
  const auto positions = tile_positions<kTileRows>(a.selected + token * a.sizes.slots, tile, count);
  copy_tile<kTileRows, kBoxes>(hopper::shared_address(shared + kStage + tile % kStages * kTileBytes),
                               gathered_rows<kTileRows>(positions, sequence, kIndexWidth), a.k);
}

// X of a tile that is in its stage when this returns; the next tile is on its way.
__device__ inline void tile_products(const IndexGradients& a, std::int64_t token, int tile, int count,
                                     unsigned char* shared, float (&x)[32]) {
  if ((tile + 1) * kTileRows < count) copy_keys(a, token, tile + 1, count, shared);
  commit_copies();
  wait_copies<1>();
  hopper::fence_shared_for_async();
  __syncthreads();
  const hopper::Operand q = hopper::k_major(shared);
  const hopper::Operand k = hopper::k_major(shared + kStage + tile % kStages * kTileBytes);
#pragma unroll
  for (float& value : x) value = 0.0F;
  hopper::keep_registers(x);
  hopper::fence_wgmma();
#pragma unroll
  for (int step = 0; step < kIndexWidth / 16; ++step) {
    const int at = step / 4 * kBoxBytes + step % 4 * hopper::kKMajorStepBytes;
    hopper::wgmma_bf16<kTileRows, Major::kK, Major::kK>(x, q.advanced(at), k.advanced(at),
                                                        step == 0 ? Start::kZero : Start::kAccumulate);
  }
  hopper::commit_wgmma();
  hopper::keep_registers(x);
  hopper::wait_wgmma<0>();
  hopper::keep_registers(x);
}

// The tile's scores, from x and the weights of this thread's two heads (with c).
__device__ inline void tile_scores(const float (&x)[32], const float (&w)[2], float* partial, float* scores) {
  const Place at = place();
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = w[0] * fmaxf(x[i + j], 0.0F) + w[1] * fmaxf(x[i + 2 + j], 0.0F);
#pragma unroll
      for (int lane = 4; lane < kWarp; lane *= 2) sum += __shfl_xor_sync(kFullWarp, sum, lane);
      if (at.row % 8 == 0) partial[threadIdx.x / kWarp * kTileRows + i * 2 + at.quad * 2 + j] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x < kTileRows) {
    float sum = 0.0F;
    for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp * kTileRows + threadIdx.x];
    scores[threadIdx.x] = sum;
  }
}

// I becomes dI, zero from the count to the end of its block; returns the token's KL.
__device__ inline float score_gradients(const IndexGradients& a, std::int64_t token, int count,
                                        float* scores) {
  const float* share = a.share + (token - a.turn.first) * a.sizes.slots;
  const int thread = static_cast<int>(threadIdx.x);
  float largest = -INFINITY;
  float mass = 0.0F;
  for (int slot = thread; slot < count; slot += kThreads) {
    largest = fmaxf(largest, scores[slot]);
    mass += share[slot];
  }
  const float top = block_max<kThreads>(largest);
  const float all_mass = block_sum<kThreads>(mass);
  float sum = 0.0F;
  for (int slot = thread; slot < count; slot += kThreads) sum += expf(scores[slot] - top);
  const float log_sum = logf(block_sum<kThreads>(sum));
  const float inverse = all_mass > 0.0F ? 1.0F / all_mass : all_mass;
  const float whole = all_mass > 0.0F ? 1.0F : all_mass;  // what the target sums to
  float loss = 0.0F;
  const int end = (count + kTileRows - 1) / kTileRows * kTileRows;
  for (int slot = thread; slot < end; slot += kThreads) {
    if (slot >= count) {
      scores[slot] = 0.0F;
      continue;
    }
    const float target = share[slot] * inverse;
    const float log_softmax = scores[slot] - top - log_sum;
    if (target > 0.0F) loss += target * (logf(target) - log_softmax);
    scores[slot] = a.weight * (expf(log_softmax) * whole - target);
  }
  return block_sum<kThreads>(loss);  // dI is visible to the block from here on
}

// x becomes dx, rounded into shared memory as an operand; adds to this thread's part of sum dI relu(x).
__device__ inline void product_gradients(float (&x)[32], const float (&w)[2], const float* d_score,
                                         unsigned char* gradient, float (&d_w)[2]) {
  const Place at = place();
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int half = i / 2 % 2;
    const float d = d_score[i / 4 * 8 + at.quad * 2 + i % 2];
    d_w[half] += d * fmaxf(x[i], 0.0F);
    x[i] = x[i] > 0.0F ? w[half] * d : 0.0F;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int r = at.row + 8 * half;
      *reinterpret_cast<std::uint32_t*>(gradient + r * 128 + (j ^ (r % 8)) * 16 + at.quad * 4) =
          as_pair(x[j * 4 + half * 2], x[j * 4 + half * 2 + 1]);
    }
  }
  hopper::fence_shared_for_async();
  __syncthreads();
}

__device__ inline void add_query_gradient(float (&d_q)[64], const unsigned char* gradient,
                                          const unsigned char* keys) {
  const hopper::Operand left = hopper::k_major(gradient);
  const hopper::Operand right = hopper::mn_major(keys, kBoxBytes);
  hopper::keep_registers(d_q);
  hopper::fence_wgmma();
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
    hopper::wgmma_bf16<kIndexWidth, Major::kK, Major::kMN>(
        d_q, left.advanced(step * hopper::kKMajorStepBytes), right.advanced(step * hopper::kMnMajorStepBytes),
        Start::kAccumulate);
  }
  hopper::commit_wgmma();
  hopper::keep_registers(d_q);
  hopper::wait_wgmma<0>();
  hopper::keep_registers(d_q);
}

__device__ inline void write_token(const IndexGradients& a, std::int64_t token, const float (&d_q)[64],
                                   float (&d_w)[2]) {
  const int heads = static_cast<int>(a.sizes.index_heads);
  Bf16* rows = a.d_q + token * heads * kIndexWidth;
  for_row_pieces(d_q, [&](int row, int column, uint4 pieces) {
    if (row < heads) *reinterpret_cast<uint4*>(rows + row * kIndexWidth + column) = pieces;
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    d_w[half] += __shfl_xor_sync(kFullWarp, d_w[half], 1);
    d_w[half] += __shfl_xor_sync(kFullWarp, d_w[half], 2);
    const int head = place().row + 8 * half;
    if (place().quad == 0 && head < heads) {
      store_float(a.d_w + token * heads + head, d_w[half] * a.sizes.index_scale);
    }
  }
}

__global__ void __launch_bounds__(kThreads) index_gradients(const __grid_constant__ IndexGradients a) {
#if TERRACE_SM90A
  extern __shared__ unsigned char raw[];
  __shared__ int cell;
  unsigned char* shared = raw + ((1024U - hopper::shared_address(raw) % 1024U) % 1024U);
  auto* partial = reinterpret_cast<float*>(shared + kPartial);
  auto* scores = reinterpret_cast<float*>(shared + kScores);
  const std::int64_t token = a.turn.first + (a.turn.count - 1 - blockIdx.x);
  const int heads = static_cast<int>(a.sizes.index_heads);
  const int count = chosen_count(a.selected + token * a.sizes.slots, static_cast<int>(a.sizes.slots), &cell);
  const int tiles = (count + kTileRows - 1) / kTileRows;
  copy_tile<kDsaHeads, kBoxes>(hopper::shared_address(shared),
                               head_rows<kDsaHeads>(a.q + token * heads * kIndexWidth, heads, kIndexWidth),
                               a.k);
  float w[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = place().row + 8 * half;
    w[half] = head < heads ? a.sizes.index_scale * load_float(a.w + token * heads + head) : 0.0F;
  }
  float x[32];
  if (count > 0) copy_keys(a, token, 0, count, shared);
  commit_copies();
  for (int tile = 0; tile < tiles; ++tile) {
    tile_products(a, token, tile, count, shared, x);
    tile_scores(x, w, partial, scores + tile * kTileRows);
  }
  __syncthreads();
  const float loss = score_gradients(a, token, count, scores);
  if (threadIdx.x == 0) a.losses[token] = count > 0 ? loss : 0.0F;
  float d_q[64];
#pragma unroll
  for (float& value : d_q) value = 0.0F;
  float d_w[2] = {};
  if (count > 0) copy_keys(a, token, 0, count, shared);
  commit_copies();
  for (int tile = 0; tile < tiles; ++tile) {
    tile_products(a, token, tile, count, shared, x);
    product_gradients(x, w, scores + tile * kTileRows, shared + kGradient, d_w);
    store_slot_rows(x, a.d_x + ((token - a.turn.first) * a.blocks + tile) * kDsaHeads * kBlockSlots);
    add_query_gradient(d_q, shared + kGradient, shared + kStage + tile % kStages * kTileBytes);
    __syncthreads();  // every warp's products are done with the stage and the gradient
  }
  wait_all_copies();
  write_token(a, token, d_q, d_w);
#endif
}

}  // namespace

bool index_fits_hopper(OpCall& call, const DsaBackward& op) {
  const DsaShape& s = op.shape;
  return op.in.index_q.dtype() == Dtype::kBf16 && s.index_width == kIndexWidth && s.index_heads >= 1 &&
         s.index_heads <= kDsaHeads && s.slots() <= kMaxIndexSlots && fits_pieces(op.in.index_q) &&
         fits_pieces(op.in.index_k) && fits_pieces(op.d_index_q) && hopper::device_traits(call).hopper;
}

void launch_index_gradients(OpCall& call, const IndexGradients& a) {
  call.launch(index_gradients,
              Grid{.x = a.turn.count,
                   .threads = kThreads,
                   .shared_bytes = static_cast<std::size_t>(shared_bytes(a.blocks))},
              a);
}

}  // namespace terrace::trainer::cuda
