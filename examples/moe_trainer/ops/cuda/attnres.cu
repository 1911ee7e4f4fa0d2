// logit_l = r_l <w q, v_l>,  r_l = (mean v_l^2 + eps)^-1/2,  p = softmax(logit),  h = sum p_l v_l
//   v_l, h: (rows, width)   w, q: (width)
// Backward, g_l = <v_l, d_h>:  a_l = p_l (g_l - sum p g) r_l,  b_l = -a_l r_l logit_l / width,
//   d_v_l = p_l d_h + a_l w q + b_l v_l,  d(w q) = sum over rows and l of a_l v_l,  d_q = d(w q) w,  d_w =
//   d(w q) q
// Here: any width and type, one block a row, which reads a row of each source again for the mix. The fast
// form is in attnres_ring.cu.
#include "examples/moe_trainer/ops/cuda/attnres.hpp"
#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSources = static_cast<int>(kMaxAttnResSources);
constexpr std::int64_t kBackwardBlocks = 264;

struct RowMix {
  float p[kSources], a[kSources], b[kSources];
};

struct SourceSums {
  float squares, along_wq, along_d_h;
};

// Sums of one source's row over the block; d_h null: without the last.
template <typename T>
__device__ SourceSums source_sums(const T* v, const T* d_h, const float* w, const float* q,
                                  std::int64_t width) {
  SourceSums sums{};
  for (std::int64_t c = threadIdx.x; c < width; c += kThreads) {
    const float x = load_float(v + c);
    sums.squares += x * x;
    sums.along_wq += x * (w[c] * q[c]);
    if (d_h != nullptr) sums.along_d_h += x * load_float(d_h + c);
  }
  sums.squares = block_sum<kThreads>(sums.squares);
  sums.along_wq = block_sum<kThreads>(sums.along_wq);
  if (d_h != nullptr) sums.along_d_h = block_sum<kThreads>(sums.along_d_h);
  return sums;
}

// The row's weights in `mix`, visible to the block.
template <typename T, typename Op>
__device__ void weigh(const Op& op, std::int64_t row, const T* d_h, RowMix* mix) {
  __shared__ float logit[kSources], inverse[kSources], along[kSources];
  for (int l = 0; l < op.sources; ++l) {
    const T* v = op.v[l].template as<T>() + row * op.width;
    const SourceSums sums = source_sums(v, d_h, op.w, op.q, op.width);
    if (threadIdx.x == 0) {
      inverse[l] = 1.0F / sqrtf(sums.squares / static_cast<float>(op.width) + op.eps);
      logit[l] = inverse[l] * sums.along_wq;
      along[l] = sums.along_d_h;
    }
  }
  if (threadIdx.x == 0) {
    float top = logit[0], total = 0.0F, mean = 0.0F;
    for (int l = 1; l < op.sources; ++l) top = fmaxf(top, logit[l]);
    for (int l = 0; l < op.sources; ++l) total += mix->p[l] = expf(logit[l] - top);
    for (int l = 0; l < op.sources; ++l) mean += along[l] * (mix->p[l] /= total);
    for (int l = 0; l < op.sources; ++l) {
      mix->a[l] = mix->p[l] * (along[l] - mean) * inverse[l];
      mix->b[l] = -mix->a[l] * inverse[l] * logit[l] / static_cast<float>(op.width);
    }
  }
  __syncthreads();
}

template <typename T>
__global__ void attnres_forward(const __grid_constant__ AttnRes op) {
  __shared__ RowMix mix;
  const std::int64_t row = blockIdx.x;
  weigh<T>(op, row, static_cast<const T*>(nullptr), &mix);
  for (std::int64_t c = threadIdx.x; c < op.width; c += kThreads) {
    float sum = 0.0F;
    for (int l = 0; l < op.sources; ++l) sum += mix.p[l] * load_float(op.v[l].as<T>() + row * op.width + c);
    store_float(op.h.as<T>() + row * op.width + c, sum);
  }
  if (op.probability != nullptr && threadIdx.x < op.sources) {
    op.probability[row * op.sources + threadIdx.x] = mix.p[threadIdx.x];
  }
}

// partial: (blocks, width), zero on entry; a block adds to its own row.
template <typename T>
__global__ void attnres_backward(const __grid_constant__ AttnResBackward op, float* partial) {
  __shared__ RowMix mix;
  float* d_wq = partial + std::int64_t{blockIdx.x} * op.width;
  for (std::int64_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
    const T* d_h = op.d_h.as<T>() + row * op.width;
    weigh<T>(op, row, d_h, &mix);
    for (std::int64_t c = threadIdx.x; c < op.width; c += kThreads) {
      const float dh = load_float(d_h + c), wq = op.w[c] * op.q[c];
      float sum = 0.0F;
      for (int l = 0; l < op.sources; ++l) {
        const float v = load_float(op.v[l].as<T>() + row * op.width + c);
        sum += mix.a[l] * v;
        if (op.d_v[l].at() == nullptr) continue;
        T* d_v = op.d_v[l].as<T>() + row * op.width + c;
        const float before = op.into_d_v[l] == Accumulate::kAdd ? load_float(d_v) : 0.0F;
        store_float(d_v, before + mix.p[l] * dh + mix.a[l] * wq + mix.b[l] * v);
      }
      d_wq[c] += sum;
    }
    __syncthreads();  // before the next row's weights
  }
}

struct WeightGradients {
  const float* w;
  const float* q;
  float* d_w;
  float* d_q;
  __device__ void operator()(std::int64_t column, float total) const {
    if (d_q != nullptr) d_q[column] += total * w[column];
    if (d_w != nullptr) d_w[column] += total * q[column];
  }
};

template <typename Op>
void check_sources(OpCall& call, const Op& op, Dtype dtype) {
  call.require(op.sources >= 1 && op.sources <= kMaxAttnResSources, "sources must be 1 to 16");
  for (std::size_t l = 0; l < static_cast<std::size_t>(op.sources); ++l) {
    call.require(op.v[l].dtype() == dtype, "all arrays must have one type");
  }
}

}  // namespace

void launch(OpCall& call, const AttnRes& op) {
  call.set_shape({op.rows, op.width, op.sources});
  check_sources(call, op, op.h.dtype());
  if (op.rows <= 0 || op.width <= 0) return;
  if (launch_attnres_ring(call, op)) return;
  with_element(op.h.dtype(), [&](auto element) {
    call.launch(attnres_forward<decltype(element)>, Grid{.x = op.rows, .threads = kThreads}, op);
  });
}

void launch(OpCall& call, const AttnResBackward& op) {
  call.set_shape({op.rows, op.width, op.sources});
  check_sources(call, op, op.d_h.dtype());
  for (std::size_t l = 0; l < static_cast<std::size_t>(op.sources); ++l) {
    call.require(!op.d_v[l] || op.d_v[l].dtype() == op.d_h.dtype(), "all arrays must have one type");
  }
  if (op.rows <= 0 || op.width <= 0) return;
  AttnResParts parts;
  if (!launch_attnres_ring(call, op, &parts)) {
    parts.slices = std::min(op.rows, kBackwardBlocks);
    parts.partial = call.scratch<float>(parts.slices * op.width);
    call.zero(parts.partial, parts.slices * op.width);
    with_element(op.d_h.dtype(), [&](auto element) {
      call.launch(attnres_backward<decltype(element)>, Grid{.x = parts.slices, .threads = kThreads}, op,
                  parts.partial);
    });
  }
  finish_slices(call, parts.partial, parts.slices, op.width, WeightGradients{op.w, op.q, op.d_w, op.d_q});
}

}  // namespace terrace::trainer::cuda
