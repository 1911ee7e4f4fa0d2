// Gated delta rule, backward. A task is one key head of one sequence with all value heads that share it, so
// dq and dk are summed without crossing threads. Each head runs forward once to save the state at every
// chunk's start, then walks the chunks in reverse, deriving the rest again from the inputs.
#include <algorithm>

#include "examples/moe_trainer/ops/cpu/kda_chunk.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kRows = kChunkRows;

struct Workspace {
  Workspace(const KdaSizes& sizes, ScratchCursor& cursor) : chunk(sizes, cursor) {
    const std::int64_t state = sizes.key * sizes.value;
    saved = cursor.take<float>(sizes.chunks * state);
    for (float** at : {&d_state, &transposed, &d_transposed}) *at = cursor.take<float>(state);
    for (float** at : {&vn, &d_o, &d_vn, &d_vb}) *at = cursor.take<float>(kRows * sizes.value);
    for (float** at : {&d_q, &d_q_start, &d_k, &d_k_end, &d_kb, &d_k2, &d_gate}) {
      *at = cursor.take<float>(kRows * sizes.key);
    }
    for (float** at : {&d_aqk, &d_l}) *at = cursor.take<float>(kRows * kRows);
    columns = cursor.take<float>(kRows * std::max(sizes.key, sizes.value));
    through = cursor.take<float>(sizes.key);
  }
  KdaChunk chunk;
  float* saved;                                                   // the state at the start of each chunk
  float *d_state, *transposed, *d_transposed;                     // dS', S^T, dS'^T
  float *vn, *d_o, *d_vn, *d_vb;                                  // rows of V
  float *d_q, *d_q_start, *d_k, *d_k_end, *d_kb, *d_k2, *d_gate;  // rows of K
  float *d_aqk, *d_l;                                             // (16, 16)
  float* columns;                                                 // a tile transposed
  float* through;                                                 // rowsum(S dS')
};

// Sums over tokens that belong to the head, for the task's partial results.
struct HeadSums {
  float* d_dt;  // (K)
  double d_a = 0;
};

std::size_t workspace_bytes(const KdaSizes& sizes) {
  ScratchCursor cursor(nullptr);
  const Workspace unused(sizes, cursor);
  return cursor.used().count();
}

// (m, n) += or = rows times rows transposed: both tiles have `width` columns.
template <Into Mode>
void outer(std::int64_t width, const float* a, const float* b, Workspace& work, float* out) {
  transpose({kRows, width}, {b, width}, {work.columns, kRows});
  multiply<Mode>({kRows, kRows, width}, {a, width, 1}, {work.columns, kRows}, {out, kRows});
}

// x = (I + L)^-T x, last row first.
void solve_transposed(const float* l, std::int64_t width, float* x) {
  for (std::int64_t c = 0; c < width; c += 16) {
    for (std::int64_t i = kRows - 2; i >= 0; --i) {
      float* row = x + i * width + c;
      Vec s0 = load(row), s1 = load(row + 8);
      for (std::int64_t j = i + 1; j < kRows; ++j) {
        s0 -= l[j * kRows + i] * load(x + j * width + c);
        s1 -= l[j * kRows + i] * load(x + j * width + c + 8);
      }
      store(row, s0);
      store(row + 8, s1);
    }
  }
}

void save_states(const KdaBackward& op, const KdaSizes& sizes, const KdaHead& head, Workspace& work) {
  const std::int64_t size = sizes.key * sizes.value;
  const float* initial = op.in.initial_state;
  load_state(op.shape, sizes, initial == nullptr ? nullptr : initial + head.state_at, work.saved);
  for (std::int64_t n = 0; n + 1 < head.chunks; ++n) {
    float* next = work.saved + (n + 1) * size;
    load_chunk(op.shape, sizes, op.in, head, n * kRows, work.chunk);
    residual(sizes, work.chunk, work.saved + n * size, work.vn);
    std::copy_n(work.saved + n * size, size, next);
    advance_state(sizes, work.chunk, work.vn, next);
  }
}

// What crosses the chunk's border: from do and dS' to the gradients of w, u, aqk, and dS for the chunk
// before.
void between_chunks(const KdaSizes& sizes, const float* state, Workspace& work) {
  const KdaChunk& chunk = work.chunk;
  const std::int64_t K = sizes.key, V = sizes.value;
  transpose({K, V}, {state, V}, {work.transposed, K});
  transpose({K, V}, {work.d_state, V}, {work.d_transposed, K});
  outer<Into::kSet>(V, work.d_o, work.vn, work, work.d_aqk);
  multiply<Into::kSet>({kRows, V, kRows}, {chunk.aqk, 1, kRows}, {work.d_o, V}, {work.d_vn, V});
  multiply<Into::kAdd>({kRows, V, K}, {chunk.k_end, K, 1}, {work.d_state, V}, {work.d_vn, V});
  multiply<Into::kSet>({kRows, K, V}, {work.d_o, V, 1}, {work.transposed, K}, {work.d_q_start, K});
  multiply<Into::kSet>({kRows, K, V}, {work.vn, V, 1}, {work.d_transposed, K}, {work.d_k_end, K});
  std::fill_n(work.d_kb, kRows * K, 0.0F);
  multiply<Into::kSubtract>({kRows, K, V}, {work.d_vn, V, 1}, {work.transposed, K}, {work.d_kb, K});

  const float* decay = chunk.from_start + (kRows - 1) * K;
  for (std::int64_t d = 0; d < K; ++d) {
    float* row = work.d_state + d * V;
    work.through[d] = decay[d] * dot(state + d * V, row, V);
    for (std::int64_t c = 0; c < V; c += kLanes) store(row + c, load(row + c) * decay[d]);
  }
  multiply<Into::kAdd>({K, V, kRows}, {chunk.q_start, 1, K}, {work.d_o, V}, {work.d_state, V});
  multiply<Into::kSubtract>({K, V, kRows}, {chunk.w, 1, K}, {work.d_vn, V}, {work.d_state, V});
}

// Through the triangular solve: d_vb and d_kb are gradients of b v and b k_start, d_l of L.
void through_solve(const KdaSizes& sizes, Workspace& work) {
  std::copy_n(work.d_vn, kRows * sizes.value, work.d_vb);
  solve_transposed(work.chunk.l, sizes.value, work.d_vb);
  solve_transposed(work.chunk.l, sizes.key, work.d_kb);
  std::fill_n(work.d_l, kRows * kRows, 0.0F);
  outer<Into::kSubtract>(sizes.value, work.d_vb, work.chunk.u, work, work.d_l);
  outer<Into::kSubtract>(sizes.key, work.d_kb, work.chunk.w, work, work.d_l);
}

// Pairs inside the chunk: d_q, d_k2 and d_k collect what aqk and L say of q_i, k_i and k_j. d_gate collects,
// for each row t, the pairs that span its decay, i >= t > j: as sums of those pairs alone, since a difference
// of two larger sums would lose digits where the gate's gradient is small.
void inside_chunk(const KdaSizes& sizes, Workspace& work) {
  const KdaChunk& chunk = work.chunk;
  for (float* rows : {work.d_q, work.d_k2, work.d_gate}) std::fill_n(rows, kRows * sizes.key, 0.0F);
  for (std::int64_t j = 0; j < kRows; ++j) {
    for (std::int64_t c = 0; c < sizes.key; c += 16) {
      const std::int64_t base = j * sizes.key + c;
      Vec product[2] = {splat(1.0F), splat(1.0F)}, d_j[2] = {}, terms[kRows][2];
      const Vec k_j[2] = {load(chunk.k + base), load(chunk.k + base + 8)};
      for (std::int64_t i = j; i < kRows; ++i) {
        const float d_a = work.d_aqk[i * kRows + j];
        const float d_l = i > j ? work.d_l[i * kRows + j] : 0.0F;
        const float d_lb = d_l * chunk.beta[i];
        for (int h = 0; h < 2; ++h) {
          const std::int64_t at = i * sizes.key + c + h * kLanes;
          if (i > j) product[h] *= load(chunk.decay + at);
          const Vec decayed = k_j[h] * product[h];
          store(work.d_q + at, load(work.d_q + at) + d_a * decayed);
          store(work.d_k2 + at, load(work.d_k2 + at) + d_l * decayed);
          const Vec term = product[h] * (d_a * load(chunk.q + at) + d_lb * load(chunk.k + at));
          d_j[h] += term;
          terms[i][h] = term;
        }
      }
      Vec later[2] = {};
      for (std::int64_t t = kRows - 1; t > j; --t) {
        for (int h = 0; h < 2; ++h) {
          float* d_g = work.d_gate + t * sizes.key + c + h * kLanes;
          later[h] += terms[t][h];
          store(d_g, load(d_g) + k_j[h] * later[h]);
        }
      }
      store(work.d_k + base, d_j[0]);
      store(work.d_k + base + 8, d_j[1]);
    }
  }
}

// Joins the parts: d_q and d_k become whole (of the normalised, scaled q and the normalised k), d_gate
// becomes the gradient of g. Returns the gradient of each row's beta in d_beta.
void join(const KdaSizes& sizes, Workspace& work, float* d_beta) {
  const KdaChunk& chunk = work.chunk;
  const std::int64_t K = sizes.key;
  for (std::int64_t i = 0; i < kRows; ++i) {
    d_beta[i] = dot(work.d_vb + i * sizes.value, chunk.v + i * sizes.value, sizes.value) +
                dot(work.d_kb + i * K, chunk.k_start + i * K, K) + dot(work.d_k2 + i * K, chunk.k + i * K, K);
  }
  for (std::int64_t c = 0; c < K; c += kLanes) {
    Vec before = load(work.through + c);  // what earlier rows, and the state before, send past row t
    for (std::int64_t t = 0; t < kRows; ++t) {
      const std::int64_t at = t * K + c;
      store(work.d_gate + at, load(work.d_gate + at) + before);
      before += load(work.d_k_end + at) * load(chunk.k_end + at);
    }
    Vec after = zero();  // what row t and later rows take from the state before
    for (std::int64_t t = kRows - 1; t >= 0; --t) {
      const std::int64_t at = t * K + c;
      const Vec from_start = load(chunk.from_start + at);
      const Vec d_q_start = load(work.d_q_start + at), d_kb = load(work.d_kb + at) * chunk.beta[t];
      after += load(chunk.q_start + at) * d_q_start + load(chunk.k_start + at) * d_kb;
      store(work.d_gate + at, load(work.d_gate + at) + after);
      store(work.d_q + at, load(work.d_q + at) + d_q_start * from_start);
      store(work.d_k + at, load(work.d_k + at) + d_kb * from_start + chunk.beta[t] * load(work.d_k2 + at) +
                               load(work.d_k_end + at) * load(chunk.to_end + at));
    }
  }
}

// Through the gate: d_gate becomes the gradient of z.
void through_gate(const KdaShape& shape, const KdaSizes& sizes, const KdaHead& head, const float* z,
                  Workspace& work, HeadSums& sums) {
  const KdaChunk& chunk = work.chunk;
  Vec d_a = zero();
  for (std::int64_t i = 0; i < chunk.rows; ++i) {
    for (std::int64_t c = 0; c < shape.key_width; c += kLanes) {
      const std::int64_t at = i * sizes.key + c, n = shape.key_width - c;
      const Vec slope = load(chunk.slope + at);
      Vec d_z = load(work.d_gate + at);
      if (shape.gate == KdaGate::kSoftplus) {
        d_a += load_part(work.d_gate + at, n) * load(chunk.gate + at);
        d_z *= -head.a * slope;
      } else {
        d_z *= shape.lower_bound * head.a * slope * (1.0F - slope);
        const Vec x = load_part(z + i * head.gate_stride + c, n) + load_part(head.dt_bias + c, n);
        d_a += d_z * x;
      }
      store(work.d_gate + at, d_z);
      store_part(sums.d_dt + c, load_part(sums.d_dt + c, n) + d_z, n);
    }
  }
  sums.d_a += static_cast<double>(sum(d_a));
}

// dx = r (dn - n <n, dn>) for n = x r; rows hold n and dn, both possibly scaled so that n dn is not.
struct UnNormalise {
  std::int64_t width, padded, stride;
  float scale;  // n = rows / scale, dn = d_rows * scale
  Accumulate into;
};
void un_normalise(const UnNormalise& how, std::int64_t rows, const float* n, const float* d_n,
                  const float* inverse, float* out) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* unit = n + i * how.padded;
    const float* d_unit = d_n + i * how.padded;
    const float along = dot(unit, d_unit, how.padded) / how.scale;
    float* to = out + i * how.stride;
    for (std::int64_t c = 0; c < how.width; c += kLanes) {
      const std::int64_t count = how.width - c;
      Vec d_x = inverse[i] * (load(d_unit + c) * how.scale - load(unit + c) * along);
      if (how.into == Accumulate::kAdd) d_x += load_part(to + c, count);
      store_part(to + c, d_x, count);
    }
  }
}

void store_rows(const KdaBackward& op, const KdaSizes& sizes, const KdaHead& head, std::int64_t first,
                Accumulate into, Workspace& work, const float* d_beta) {
  const KdaShape& shape = op.shape;
  const KdaChunk& chunk = work.chunk;
  const std::int64_t key = head.key_at + first * head.key_stride;
  un_normalise({shape.key_width, sizes.key, head.key_stride, sizes.scale, into}, chunk.rows, chunk.q,
               work.d_q, chunk.inverse_q, op.d_q + key);
  un_normalise({shape.key_width, sizes.key, head.key_stride, 1.0F, into}, chunk.rows, chunk.k, work.d_k,
               chunk.inverse_k, op.d_k + key);
  for (std::int64_t i = 0; i < chunk.rows; ++i) {
    const float b = chunk.beta[i];
    op.d_beta[head.beta_at + (first + i) * head.beta_stride] = d_beta[i] * b * (1.0F - b);
    std::copy_n(work.d_gate + i * sizes.key, shape.key_width,
                op.d_gate + head.gate_at + (first + i) * head.gate_stride);
    float* d_v = op.d_v + head.value_at + (first + i) * head.value_stride;
    for (std::int64_t c = 0; c < shape.value_width; c += kLanes) {
      store_part(d_v + c, load(work.d_vb + i * sizes.value + c) * b, shape.value_width - c);
    }
  }
}

void head_backward(const KdaBackward& op, const KdaSizes& sizes, const KdaHead& head, Accumulate into,
                   Workspace& work, HeadSums& sums) {
  const KdaShape& shape = op.shape;
  save_states(op, sizes, head, work);
  load_state(shape, sizes, op.d_final_state == nullptr ? nullptr : op.d_final_state + head.state_at,
             work.d_state);
  for (std::int64_t n = head.chunks - 1; n >= 0; --n) {
    const std::int64_t first = n * kRows;
    const float* state = work.saved + n * sizes.key * sizes.value;
    load_chunk(shape, sizes, op.in, head, first, work.chunk);
    residual(sizes, work.chunk, state, work.vn);
    load_tile({work.chunk.rows, shape.value_width, head.value_stride, sizes.value},
              op.d_o + head.value_at + first * head.value_stride, work.d_o);
    between_chunks(sizes, state, work);
    through_solve(sizes, work);
    inside_chunk(sizes, work);
    float d_beta[kRows];
    join(sizes, work, d_beta);
    through_gate(shape, sizes, head, op.in.gate + head.gate_at + first * head.gate_stride, work, sums);
    store_rows(op, sizes, head, first, into, work, d_beta);
  }
  store_state(shape, sizes, work.d_state,
              op.d_initial_state == nullptr ? nullptr : op.d_initial_state + head.state_at);
}

// Per value head of each sequence: d_dt (K), then d_a.
struct Partials {
  float* d_dt;
  double* d_a;
};
Partials take_partials(const KdaShape& shape, ScratchCursor& cursor) {
  const std::int64_t heads = shape.sequences() * shape.value_heads;
  return {cursor.take<float>(heads * shape.key_width), cursor.take<double>(heads)};
}

}  // namespace

Bytes scratch_bytes(const KdaBackward& op) {
  ScratchCursor cursor(nullptr);
  take_partials(op.shape, cursor);
  return cursor.used() +
         Bytes(workspace_bytes(KdaSizes(op.shape))) * static_cast<std::uint64_t>(worker_count());
}

void compute(const KdaBackward& op, std::byte* scratch) {
  const KdaShape& shape = op.shape;
  const KdaSizes sizes(shape);
  const std::size_t stride = workspace_bytes(sizes);
  ScratchCursor partials_cursor(scratch);
  const Partials partials = take_partials(shape, partials_cursor);
  std::byte* workspaces = scratch + partials_cursor.used().count();
  const std::int64_t group = shape.value_heads / shape.key_heads;
  std::fill_n(partials.d_dt, shape.sequences() * shape.value_heads * shape.key_width, 0.0F);

  parallel_for(shape.sequences() * shape.key_heads, [&](std::int64_t task, std::int64_t worker) {
    ScratchCursor cursor(workspaces + static_cast<std::size_t>(worker) * stride);
    Workspace work(sizes, cursor);
    const std::int64_t sequence = task / shape.key_heads;
    for (std::int64_t member = 0; member < group; ++member) {
      const KdaHead head(shape, op.in, {sequence, task % shape.key_heads * group + member});
      const std::int64_t slot = sequence * shape.value_heads + head.value_head;
      HeadSums sums{.d_dt = partials.d_dt + slot * shape.key_width};
      head_backward(op, sizes, head, member == 0 ? Accumulate::kOverwrite : Accumulate::kAdd, work, sums);
      partials.d_a[slot] = sums.d_a;
    }
  });

  for (std::int64_t slot = 0; slot < shape.sequences() * shape.value_heads; ++slot) {
    const std::int64_t head = slot % shape.value_heads;
    axpy(1.0F, partials.d_dt + slot * shape.key_width, op.d_dt_bias + head * shape.key_width,
         shape.key_width);
    op.d_a_log[head] += static_cast<float>(partials.d_a[slot]);
  }
}

}  // namespace terrace::trainer::cpu
