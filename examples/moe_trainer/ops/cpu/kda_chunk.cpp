#include "examples/moe_trainer/ops/cpu/kda_chunk.hpp"

#include <algorithm>
#include <cmath>

#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kRows = kChunkRows;

// x times 1 / sqrt(sum x^2 + eps) times `scale`; the factor without the scale goes to inverse[row].
struct Normalise {
  std::int64_t width;  // padded
  float eps, scale;
};
void normalise(const Normalise& how, float* rows, float* inverse) {
  for (std::int64_t i = 0; i < kRows; ++i) {
    float* x = rows + i * how.width;
    const float r = 1.0F / std::sqrt(dot(x, x, how.width) + how.eps);
    inverse[i] = r;
    for (std::int64_t c = 0; c < how.width; c += kLanes) store(x + c, load(x + c) * (r * how.scale));
  }
}

// g and the sigmoid inside the gate, from z + dt. Columns past the real width get g = 0 below.
void load_gate(const KdaShape& shape, const KdaSizes& sizes, const KdaHead& head, const float* z,
               KdaChunk& chunk) {
  const Tile tile{chunk.rows, shape.key_width, head.gate_stride, sizes.key};
  load_tile(tile, z, chunk.gate);
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t c = 0; c < sizes.key; c += kLanes) {
      float* g = chunk.gate + i * sizes.key + c;
      const std::int64_t real = i < chunk.rows ? std::max<std::int64_t>(0, shape.key_width - c) : 0;
      const Vec x = load(g) + load_part(head.dt_bias + std::min(c, shape.key_width), real);
      Vec slope, value;
      if (shape.gate == KdaGate::kSoftplus) {
        slope = sigmoid(x);
        value = -head.a * softplus(x);
      } else {
        slope = sigmoid(head.a * x);
        value = shape.lower_bound * slope;
      }
      if (real < kLanes) {
        for (std::int64_t lane = real; lane < kLanes; ++lane) value[lane] = 0, slope[lane] = 0;
      }
      store(g, value);
      store(chunk.slope + i * sizes.key + c, slope);
      store(chunk.decay + i * sizes.key + c, exp(value));
    }
  }
}

void running_products(const KdaSizes& sizes, KdaChunk& chunk) {
  const std::int64_t width = sizes.key;
  for (std::int64_t c = 0; c < width; c += kLanes) {
    Vec product = splat(1.0F);
    for (std::int64_t i = 0; i < kRows; ++i) {
      const std::int64_t at = i * width + c;
      product *= load(chunk.decay + at);
      store(chunk.from_start + at, product);
      store(chunk.k_start + at, load(chunk.k + at) * product);
      store(chunk.q_start + at, load(chunk.q + at) * product);
    }
    product = splat(1.0F);
    for (std::int64_t i = kRows - 1; i >= 0; --i) {
      const std::int64_t at = i * width + c;
      store(chunk.to_end + at, product);
      store(chunk.k_end + at, load(chunk.k + at) * product);
      product *= load(chunk.decay + at);
    }
  }
}

// For one column j of the chunk's two matrices: sums over Vectors * 8 channels, added to the lane sums.
template <int Vectors>
void pair_sums(const KdaChunk& chunk, std::int64_t width, std::int64_t j, std::int64_t c, Vec* with_q,
               Vec* with_k) {
  Vec decayed[Vectors];
  for (int n = 0; n < Vectors; ++n) decayed[n] = load(chunk.k + j * width + c + n * kLanes);
  for (std::int64_t i = j; i < kRows; ++i) {
    const std::int64_t at = i * width + c;
    Vec sum_q = zero(), sum_k = zero();
    for (int n = 0; n < Vectors; ++n) {
      if (i > j) decayed[n] *= load(chunk.decay + at + n * kLanes);
      sum_q += load(chunk.q + at + n * kLanes) * decayed[n];
      sum_k += load(chunk.k + at + n * kLanes) * decayed[n];
    }
    with_q[i] += sum_q;
    with_k[i] += sum_k;
  }
}

// aqk_ij = <q_i, k_j e^(G_i - G_j)> for i >= j; l_ij = b_i <k_i, k_j e^(G_i - G_j)> for i > j.
void pair_matrices(const KdaSizes& sizes, KdaChunk& chunk) {
  for (std::int64_t j = 0; j < kRows; ++j) {
    Vec with_q[kRows] = {}, with_k[kRows] = {};
    std::int64_t c = 0;
    for (; c + 32 <= sizes.key; c += 32) pair_sums<4>(chunk, sizes.key, j, c, with_q, with_k);
    for (; c < sizes.key; c += 16) pair_sums<2>(chunk, sizes.key, j, c, with_q, with_k);
    for (std::int64_t i = 0; i < kRows; i += kLanes) {
      const Vec q = lane_sums(with_q + i), k = lane_sums(with_k + i);
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        const std::int64_t row = i + lane;
        chunk.aqk[row * kRows + j] = row >= j ? q[lane] : 0.0F;
        chunk.l[row * kRows + j] = row > j ? chunk.beta[row] * k[lane] : 0.0F;
      }
    }
  }
}

// Solves (I + L) X = b * rhs in place, row after row.
void solve_rows(const float* l, const float* beta, std::int64_t width, float* x) {
  for (std::int64_t c = 0; c < width; c += 16) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      float* row = x + i * width + c;
      Vec s0 = load(row) * beta[i], s1 = load(row + 8) * beta[i];
      for (std::int64_t j = 0; j < i; ++j) {
        s0 -= l[i * kRows + j] * load(x + j * width + c);
        s1 -= l[i * kRows + j] * load(x + j * width + c + 8);
      }
      store(row, s0);
      store(row + 8, s1);
    }
  }
}

}  // namespace

KdaSizes::KdaSizes(const KdaShape& shape)
    : chunks((shape.length + kRows - 1) / kRows),
      key(round_up_to(shape.key_width, 16)),
      value(round_up_to(shape.value_width, 16)),
      scale(shape.scale != 0 ? shape.scale : 1.0F / std::sqrt(static_cast<float>(shape.key_width))) {}

KdaHead::KdaHead(const KdaShape& shape, const KdaInputs& in, const KdaTask& task)
    : value_head(task.value_head),
      first_token(shape.packing ? shape.packing.starts[task.sequence] : task.sequence * shape.length),
      length(shape.packing ? shape.packing.starts[task.sequence + 1] - first_token : shape.length),
      chunks((length + kRows - 1) / kRows),
      key_stride(shape.key_heads * shape.key_width),
      value_stride(shape.value_heads * shape.value_width),
      gate_stride(shape.value_heads * shape.key_width),
      beta_stride(shape.value_heads),
      key_at(first_token * key_stride + value_head / (shape.value_heads / shape.key_heads) * shape.key_width),
      value_at(first_token * value_stride + value_head * shape.value_width),
      gate_at(first_token * gate_stride + value_head * shape.key_width),
      beta_at(first_token * beta_stride + value_head),
      state_at((task.sequence * shape.value_heads + value_head) * shape.key_width * shape.value_width),
      a(std::exp(in.a_log[value_head])),
      dt_bias(in.dt_bias + value_head * shape.key_width) {}

KdaChunk::KdaChunk(const KdaSizes& sizes, ScratchCursor& cursor) {
  for (float** at : {&q, &k, &gate, &slope, &decay, &from_start, &to_end, &k_start, &k_end, &q_start, &w}) {
    *at = cursor.take<float>(kRows * sizes.key);
  }
  for (float** at : {&v, &u}) *at = cursor.take<float>(kRows * sizes.value);
  for (float** at : {&inverse_q, &inverse_k, &beta}) *at = cursor.take<float>(kRows);
  for (float** at : {&aqk, &l}) *at = cursor.take<float>(kRows * kRows);
}

void load_tile(const Tile& tile, const float* from, float* to) {
  for (std::int64_t i = 0; i < kRows; ++i) {
    float* row = to + i * tile.padded;
    if (i >= tile.rows) {
      std::fill_n(row, tile.padded, 0.0F);
      continue;
    }
    std::copy_n(from + i * tile.stride, tile.width, row);
    std::fill_n(row + tile.width, tile.padded - tile.width, 0.0F);
  }
}

void load_chunk(const KdaShape& shape, const KdaSizes& sizes, const KdaInputs& in, const KdaHead& head,
                std::int64_t first, KdaChunk& chunk) {
  chunk.rows = std::min(kRows, head.length - first);
  const Tile keys{chunk.rows, shape.key_width, head.key_stride, sizes.key};
  load_tile(keys, in.q + head.key_at + first * head.key_stride, chunk.q);
  load_tile(keys, in.k + head.key_at + first * head.key_stride, chunk.k);
  load_tile({chunk.rows, shape.value_width, head.value_stride, sizes.value},
            in.v + head.value_at + first * head.value_stride, chunk.v);
  load_tile({chunk.rows, 1, head.beta_stride, 1}, in.beta + head.beta_at + first * head.beta_stride,
            chunk.beta);
  for (std::int64_t i = 0; i < kRows; i += kLanes) {
    store(chunk.beta + i, sigmoid(load(chunk.beta + i)));
  }
  for (std::int64_t i = chunk.rows; i < kRows; ++i) chunk.beta[i] = 0;
  normalise({sizes.key, shape.l2_eps, sizes.scale}, chunk.q, chunk.inverse_q);
  normalise({sizes.key, shape.l2_eps, 1.0F}, chunk.k, chunk.inverse_k);
  load_gate(shape, sizes, head, in.gate + head.gate_at + first * head.gate_stride, chunk);
  running_products(sizes, chunk);
  pair_matrices(sizes, chunk);
  std::copy_n(chunk.k_start, kRows * sizes.key, chunk.w);
  std::copy_n(chunk.v, kRows * sizes.value, chunk.u);
  solve_rows(chunk.l, chunk.beta, sizes.key, chunk.w);
  solve_rows(chunk.l, chunk.beta, sizes.value, chunk.u);
}

void residual(const KdaSizes& sizes, const KdaChunk& chunk, const float* state, float* vn) {
  std::copy_n(chunk.u, kRows * sizes.value, vn);
  multiply<Into::kSubtract>({kRows, sizes.value, sizes.key}, {chunk.w, sizes.key, 1}, {state, sizes.value},
                            {vn, sizes.value});
}

void advance_state(const KdaSizes& sizes, const KdaChunk& chunk, const float* vn, float* state) {
  const float* through = chunk.from_start + (kRows - 1) * sizes.key;
  for (std::int64_t d = 0; d < sizes.key; ++d) {
    float* row = state + d * sizes.value;
    for (std::int64_t c = 0; c < sizes.value; c += kLanes) store(row + c, load(row + c) * through[d]);
  }
  multiply<Into::kAdd>({sizes.key, sizes.value, kRows}, {chunk.k_end, 1, sizes.key}, {vn, sizes.value},
                       {state, sizes.value});
}

void load_state(const KdaShape& shape, const KdaSizes& sizes, const float* from, float* state) {
  std::fill_n(state, sizes.key * sizes.value, 0.0F);
  if (from == nullptr) return;
  for (std::int64_t d = 0; d < shape.key_width; ++d) {
    std::copy_n(from + d * shape.value_width, shape.value_width, state + d * sizes.value);
  }
}

void store_state(const KdaShape& shape, const KdaSizes& sizes, const float* state, float* to) {
  if (to == nullptr) return;
  for (std::int64_t d = 0; d < shape.key_width; ++d) {
    std::copy_n(state + d * sizes.value, shape.value_width, to + d * shape.value_width);
  }
}

}  // namespace terrace::trainer::cpu
