// Dense attention of any widths up to 256, fp32 or bf16, in plain fp32 arithmetic.
//
// A block owns a tile of rows of one head and walks over the tiles that reach it. 256 threads as 16 x 16:
// thread (i, j) holds rows i kPatch + 0 .. kPatch - 1 of its block's tile, and of a product's columns j, j +
// 16, j + 32 ... Forward: o_i = sum_j e^(a_ij - lse_i) v_j with a running maximum. Backward, with P and dP of
// a pair of tiles:
//   queries' blocks:  dQ += dS K                 dS = P (dP - delta) scale
//   keys' blocks:     dV += P^T dO,  dK += dS^T Q
#include <cuda_bf16.h>

#include <algorithm>

#include "examples/moe_trainer/ops/cuda/attention.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 16;  // kThreads = kSide^2

__device__ float as_float(float x) { return x; }
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* to, float x) { *to = x; }
__device__ void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// Rows of one head of one batch row, from token 0 on.
template <typename T>
struct Rows {
  T* at;
  std::int64_t step;
  int width;
};
template <typename T>
__device__ Rows<T> rows_of(T* data, const RowStride& stride, std::int64_t first_token, std::int64_t head,
                           int width) {
  return {data + first_token * stride.token + head * stride.head, stride.token, width};
}
// An odd stride: neither rows nor columns collide in the banks of shared memory.
__host__ __device__ constexpr int tile_stride(int width) { return width | 1; }

template <typename T>
__device__ void load_tile(const Rows<const T>& from, int first, int count, int length, float* to) {
  const int stride = tile_stride(from.width);
  for (int e = static_cast<int>(threadIdx.x); e < count * from.width; e += kThreads) {
    const int r = e / from.width, c = e % from.width;
    to[r * stride + c] = first + r < length ? as_float(from.at[(first + r) * from.step + c]) : 0.0F;
  }
}

// s[i][j] = <row i0 + i of a, row j0 + 16 j of b>
template <int kPatch>
__device__ void dot_tile(const float* a, const float* b, int width, float (&s)[kPatch][kPatch]) {
  const int stride = tile_stride(width);
  const float* left = a + static_cast<int>(threadIdx.x) / kSide * kPatch * stride;
  const float* right = b + static_cast<int>(threadIdx.x) % kSide * stride;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) s[i][j] = 0.0F;
  }
  for (int d = 0; d < width; ++d) {
    float x[kPatch], y[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      x[i] = left[i * stride + d];
      y[i] = right[i * kSide * stride + d];
    }
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int j = 0; j < kPatch; ++j) s[i][j] += x[i] * y[j];
    }
  }
}
template <int kPatch>
__device__ void store_tile(const float (&s)[kPatch][kPatch], float* to) {
  constexpr int kStride = tile_stride(kPatch * kSide);
  const int row = static_cast<int>(threadIdx.x) / kSide * kPatch,
            column = static_cast<int>(threadIdx.x) % kSide;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) to[(row + i) * kStride + column + kSide * j] = s[i][j];
  }
}
// sum[i][j] += sum over the tile's rows r of p[i0 + i][r] b[r][j0 + 16 j]
template <int kPatch, int kColumns>
__device__ void add_product(const float* p, const float* b, int width, float (&sum)[kPatch][kColumns]) {
  constexpr int kRows = kPatch * kSide;
  const int stride = tile_stride(width);
  const float* left = p + static_cast<int>(threadIdx.x) / kSide * kPatch * tile_stride(kRows);
  const int column = static_cast<int>(threadIdx.x) % kSide;
  for (int r = 0; r < kRows; ++r) {
    float x[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) x[i] = left[i * tile_stride(kRows) + r];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int c = column + kSide * j;
      const float y = c < width ? b[r * stride + c] : 0.0F;
#pragma unroll
      for (int i = 0; i < kPatch; ++i) sum[i][j] += x[i] * y;
    }
  }
}
template <int kPatch, int kColumns, typename T>
__device__ void put_rows(const float (&sum)[kPatch][kColumns], const Rows<T>& to, int first, int length,
                         const float (&factor)[kPatch]) {
  const int row = first + static_cast<int>(threadIdx.x) / kSide * kPatch;
  const int column = static_cast<int>(threadIdx.x) % kSide;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    if (row + i >= length) continue;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int c = column + kSide * j;
      if (c < to.width) put(to.at + (row + i) * to.step + c, sum[i][j] * factor[i]);
    }
  }
}

// Over the sixteen threads that share rows.
__device__ float row_max(float x) {
#pragma unroll
  for (int offset = kSide / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}
__device__ float row_sum(float x) {
#pragma unroll
  for (int offset = kSide / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

// The running softmax of a thread's rows, the same in all threads that share them. Logarithms are to base 2.
template <int kPatch>
struct SoftmaxRows {
  float top[kPatch], total[kPatch];
  int reach[kPatch];  // the first key
};
struct Keys {
  int first;  // this thread's first key; the others are 16, 32 ... on
  int row;    // its first query
};
// Products become e^(a - top); shrink: what earlier sums are to be scaled by.
template <int kPatch>
__device__ void join_softmax(float (&p)[kPatch][kPatch], const Keys& keys, float scale_log2,
                             SoftmaxRows<kPatch>& rows, float (&shrink)[kPatch]) {
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    float largest = rows.top[i];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      const int at = keys.first + kSide * j;
      p[i][j] = at >= rows.reach[i] && at <= keys.row + i ? p[i][j] * scale_log2 : -INFINITY;
      largest = fmaxf(largest, p[i][j]);
    }
    largest = row_max(largest);
    const float base = largest == -INFINITY ? 0.0F : largest;
    shrink[i] = exp2f(rows.top[i] - base);
    float sum = 0.0F;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      p[i][j] = exp2f(p[i][j] - base);
      sum += p[i][j];
    }
    rows.total[i] = rows.total[i] * shrink[i] + row_sum(sum);
    rows.top[i] = largest;
  }
}

struct Forward {
  AttentionSizes sizes;
  const void* q;
  const void* k;
  const void* v;
  const float* sink;
  void* o;
  float* lse;
};

template <typename T, int kPatch, int kColumns>
__global__ void __launch_bounds__(kThreads) attention_forward(Forward a) {
  constexpr int kRows = kPatch * kSide;
  extern __shared__ float shared[];
  const AttentionSizes& s = a.sizes;
  float* q_tile = shared;
  float* other = q_tile + kRows * tile_stride(s.key_width);  // keys, then values
  float* p_tile = other + kRows * tile_stride(max(s.key_width, s.value_width));
  const int blocks = (s.length + kRows - 1) / kRows;
  const std::int64_t pairs = s.batch * s.heads, pair = blockIdx.x % pairs;
  const std::int64_t head = pair % s.heads, token = pair / s.heads * s.length;
  const int first =
      (blocks - 1 - static_cast<int>(blockIdx.x / pairs)) * kRows;  // the longest rows start first
  const int row = first + static_cast<int>(threadIdx.x) / kSide * kPatch;
  const int column = static_cast<int>(threadIdx.x) % kSide;
  load_tile(rows_of(static_cast<const T*>(a.q), s.q, token, head, s.key_width), first, kRows, s.length,
            q_tile);
  float o[kPatch][kColumns] = {};
  SoftmaxRows<kPatch> rows;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    rows.top[i] = a.sink != nullptr ? a.sink[head] * kLog2E : -INFINITY;
    rows.total[i] = a.sink != nullptr ? 1.0F : 0.0F;
    rows.reach[i] = s.first != nullptr ? s.first[min(row + i, s.length - 1)] : 0;
  }
  const int begin = s.first != nullptr ? s.first[first] : 0, end = min(first + kRows, s.length);
  for (int key = begin; key < end; key += kRows) {
    __syncthreads();  // the values of the round before are used
    load_tile(rows_of(static_cast<const T*>(a.k), s.k, token, head / s.group, s.key_width), key, kRows,
              s.length, other);
    __syncthreads();
    float p[kPatch][kPatch];
    dot_tile<kPatch>(q_tile, other, s.key_width, p);
    float shrink[kPatch];
    join_softmax<kPatch>(p, Keys{key + column, row}, s.scale_log2, rows, shrink);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) o[i][j] *= shrink[i];
    }
    store_tile<kPatch>(p, p_tile);
    __syncthreads();  // the keys are used
    load_tile(rows_of(static_cast<const T*>(a.v), s.v, token, head / s.group, s.value_width), key, kRows,
              s.length, other);
    __syncthreads();
    add_product<kPatch, kColumns>(p_tile, other, s.value_width, o);
  }
  float inverse[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    inverse[i] = 1.0F / rows.total[i];
    if (a.lse != nullptr && column == 0 && row + i < s.length) {
      a.lse[(token + row + i) * s.heads + head] = (rows.top[i] + log2f(rows.total[i])) / kLog2E;
    }
  }
  put_rows<kPatch, kColumns>(o, rows_of(static_cast<T*>(a.o), s.o, token, head, s.value_width), first,
                             s.length, inverse);
}

enum class Owner : int { kQueries, kKeys };

struct Backward {
  AttentionSizes sizes;
  AttentionStatistics statistics;
  const void* q;
  const void* k;
  const void* v;
  const void* d_o;
  void* d_q;
  void* d_k;
  void* d_v;
};

// P and dS of the block's rows and one tile of the others, by this thread's places.
template <Owner kOwner, int kPatch>
__device__ void logit_gradients(const Backward& a, std::int64_t pair, int row, int column,
                                float (&p)[kPatch][kPatch], float (&d_s)[kPatch][kPatch]) {
  const AttentionSizes& s = a.sizes;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      const int other = column + kSide * j;
      const int query = kOwner == Owner::kQueries ? row + i : other;
      const int key = kOwner == Owner::kQueries ? other : row + i;
      const int read = min(query, s.length - 1);
      const int reach = s.first != nullptr ? s.first[read] : 0;
      const bool counts = query < s.length && key >= reach && key <= query;
      const float lse = a.statistics.lse_log2[pair * s.stored + read],
                  delta = a.statistics.delta[pair * s.stored + read];
      const float e = counts ? exp2f(p[i][j] * s.scale_log2 - lse) : 0.0F;
      p[i][j] = e;
      d_s[i][j] = counts ? e * (d_s[i][j] - delta) * s.scale : 0.0F;
    }
  }
}

template <typename T, int kPatch, int kColumns, Owner kOwner>
__global__ void __launch_bounds__(kThreads) attention_backward(Backward a) {
  constexpr int kRows = kPatch * kSide;
  constexpr bool kKeys = kOwner == Owner::kKeys;
  extern __shared__ float shared[];
  const AttentionSizes& s = a.sizes;
  const int wide_tile = kRows * tile_stride(s.key_width), value_tile = kRows * tile_stride(s.value_width);
  float* own_key = shared;  // of the block: keys or queries, and values or d_o
  float* own_value = own_key + wide_tile;
  float* their_key = own_value + value_tile;
  float* their_value = their_key + wide_tile;
  float* p_tile = their_value + value_tile;
  float* d_s_tile = p_tile + kRows * tile_stride(kRows);

  const int blocks = (s.length + kRows - 1) / kRows;
  const std::int64_t own_heads = kKeys ? s.key_heads : s.heads;
  const std::int64_t pairs = s.batch * own_heads, own = blockIdx.x % pairs;
  const std::int64_t batch = own / own_heads, token = batch * s.length;
  const std::int64_t key_head = kKeys ? own % own_heads : own % own_heads / s.group;
  const std::int64_t first_head = kKeys ? key_head * s.group : own % own_heads;
  const int turn = static_cast<int>(blockIdx.x / pairs);
  const int first = (kKeys ? turn : blocks - 1 - turn) * kRows;  // the longest first
  const int row = first + static_cast<int>(threadIdx.x) / kSide * kPatch;
  const int column = static_cast<int>(threadIdx.x) % kSide;
  const int last_row = min(first + kRows, s.length) - 1;
  const int begin = kKeys ? first : s.first != nullptr ? s.first[first] : 0;
  const int end = !kKeys ? last_row + 1 : s.last != nullptr ? s.last[last_row] + 1 : s.length;

  const Rows<const T> k = rows_of(static_cast<const T*>(a.k), s.k, token, key_head, s.key_width);
  const Rows<const T> v = rows_of(static_cast<const T*>(a.v), s.v, token, key_head, s.value_width);
  float d_key[kPatch][kColumns] = {};
  float d_value[kPatch][kColumns] = {};
  for (std::int64_t head = first_head; head < first_head + (kKeys ? s.group : 1); ++head) {
    const Rows<const T> q = rows_of(static_cast<const T*>(a.q), s.q, token, head, s.key_width);
    const Rows<const T> d_o = rows_of(static_cast<const T*>(a.d_o), s.o, token, head, s.value_width);
    if (head == first_head) {
      load_tile(kKeys ? k : q, first, kRows, s.length, own_key);
      load_tile(kKeys ? v : d_o, first, kRows, s.length, own_value);
    }
    for (int other = begin; other < end; other += kRows) {
      __syncthreads();  // the round before is done with its tiles
      load_tile(kKeys ? q : k, other, kRows, s.length, their_key);
      load_tile(kKeys ? d_o : v, other, kRows, s.length, their_value);
      __syncthreads();
      float p[kPatch][kPatch], d_s[kPatch][kPatch];
      dot_tile<kPatch>(own_key, their_key, s.key_width, p);
      dot_tile<kPatch>(own_value, their_value, s.value_width, d_s);
      logit_gradients<kOwner, kPatch>(a, batch * s.heads + head, row, other + column, p, d_s);
      store_tile<kPatch>(d_s, d_s_tile);
      if constexpr (kKeys) store_tile<kPatch>(p, p_tile);
      __syncthreads();
      add_product<kPatch, kColumns>(d_s_tile, their_key, s.key_width, d_key);
      if constexpr (kKeys) add_product<kPatch, kColumns>(p_tile, their_value, s.value_width, d_value);
    }
  }
  float one[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) one[i] = 1.0F;
  if constexpr (kKeys) {
    put_rows<kPatch, kColumns>(d_key, rows_of(static_cast<T*>(a.d_k), s.k, token, key_head, s.key_width),
                               first, s.length, one);
    put_rows<kPatch, kColumns>(d_value, rows_of(static_cast<T*>(a.d_v), s.v, token, key_head, s.value_width),
                               first, s.length, one);
  } else {
    put_rows<kPatch, kColumns>(d_key, rows_of(static_cast<T*>(a.d_q), s.q, token, first_head, s.key_width),
                               first, s.length, one);
  }
}

std::size_t shared_limit(OpCall& call) {
  int device = 0, bytes = 0;
  call.check(cudaGetDevice(&device), "cudaGetDevice");
  call.check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return static_cast<std::size_t>(bytes);
}

std::size_t forward_bytes(const AttentionSizes& s, int patch) {
  const int rows = patch * kSide;
  return sizeof(float) * static_cast<std::size_t>(rows) *
         static_cast<std::size_t>(tile_stride(s.key_width) +
                                  tile_stride(std::max(s.key_width, s.value_width)) + tile_stride(rows));
}
std::size_t backward_bytes(const AttentionSizes& s, int patch) {
  const int rows = patch * kSide;
  return sizeof(float) * 2 * static_cast<std::size_t>(rows) *
         static_cast<std::size_t>(tile_stride(s.key_width) + tile_stride(s.value_width) + tile_stride(rows));
}

template <typename T, int kPatch, int kColumns>
void launch_forward(OpCall& call, const Forward& a) {
  const AttentionSizes& s = a.sizes;
  call.launch(attention_forward<T, kPatch, kColumns>,
              Grid{.x = ceil_div(s.length, kPatch * kSide) * s.batch * s.heads,
                   .threads = kThreads,
                   .shared_bytes = forward_bytes(s, kPatch)},
              a);
}
template <typename T, int kPatch, int kColumns>
void launch_backward(OpCall& call, const Backward& a) {
  const AttentionSizes& s = a.sizes;
  const std::int64_t blocks = ceil_div(s.length, kPatch * kSide) * s.batch;
  const std::size_t bytes = backward_bytes(s, kPatch);
  call.launch(attention_backward<T, kPatch, kColumns, Owner::kKeys>,
              Grid{.x = blocks * s.key_heads, .threads = kThreads, .shared_bytes = bytes}, a);
  call.launch(attention_backward<T, kPatch, kColumns, Owner::kQueries>,
              Grid{.x = blocks * s.heads, .threads = kThreads, .shared_bytes = bytes}, a);
}

constexpr int kNarrow = 8 * kSide;  // the width up to which eight columns a thread will do

template <typename T>
void choose_forward(OpCall& call, const Forward& a, std::size_t limit) {
  const bool narrow = std::max(a.sizes.key_width, a.sizes.value_width) <= kNarrow;
  if (narrow && forward_bytes(a.sizes, 4) <= limit) return launch_forward<T, 4, 8>(call, a);
  launch_forward<T, 2, 16>(call, a);
}
template <typename T>
void choose_backward(OpCall& call, const Backward& a, std::size_t limit) {
  const bool narrow = std::max(a.sizes.key_width, a.sizes.value_width) <= kNarrow;
  if (narrow && backward_bytes(a.sizes, 4) <= limit) return launch_backward<T, 4, 8>(call, a);
  if (backward_bytes(a.sizes, 2) <= limit) return launch_backward<T, 2, 16>(call, a);
  launch_backward<T, 1, 16>(call, a);
}

}  // namespace

void launch_general(OpCall& call, const Attention& op, const AttentionSizes& sizes) {
  const Forward a{sizes, op.q.at(), op.k.at(), op.v.at(), op.sink, op.o.at(), op.lse};
  const std::size_t limit = shared_limit(call);
  if (op.q.dtype() == Dtype::kF32) return choose_forward<float>(call, a, limit);
  choose_forward<__nv_bfloat16>(call, a, limit);
}

void launch_general(OpCall& call, const AttentionBackward& op, const AttentionSizes& sizes,
                    const AttentionStatistics& statistics) {
  const Backward a{sizes,       statistics,  op.q.at(),   op.k.at(),  op.v.at(),
                   op.d_o.at(), op.d_q.at(), op.d_k.at(), op.d_v.at()};
  const std::size_t limit = shared_limit(call);
  if (op.q.dtype() == Dtype::kF32) return choose_backward<float>(call, a, limit);
  choose_backward<__nv_bfloat16>(call, a, limit);
}

}  // namespace terrace::trainer::cuda
