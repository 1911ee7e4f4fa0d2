// The keys' gradients by blocks of keys, the queries' by blocks of queries: each sum has one owner and one
// order.
#include "examples/moe_trainer/ops/cpu/attention_block.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kRows = kAttentionRows;

struct Work {
  Work(const AttentionShape& s, ScratchCursor& cursor)
      : key(round_up_to(s.key_width, 16)),
        value(round_up_to(s.value_width, 16)),
        q(cursor.take<float>(kRows * key)),
        k(cursor.take<float>(kRows * key)),
        d_o(cursor.take<float>(kRows * value)),
        v(cursor.take<float>(kRows * value)),
        k_turned(cursor.take<float>(kRows * key)),
        v_turned(cursor.take<float>(kRows * value)),
        p(cursor.take<float>(kRows * kRows)),
        d_a(cursor.take<float>(kRows * kRows)),
        d_key(cursor.take<float>(kRows * key)),
        d_value(cursor.take<float>(kRows * value)) {}
  std::int64_t key, value;  // padded widths
  float *q, *k, *d_o, *v, *k_turned, *v_turned;
  float *p, *d_a;          // (queries, keys): probabilities, gradients of the logits
  float *d_key, *d_value;  // sums; d_key also serves the queries' pass
};
std::size_t worker_bytes(const AttentionShape& s) {
  ScratchCursor cursor(nullptr);
  const Work unused(s, cursor);
  return cursor.used().count();
}

struct Shared {
  Shared(const AttentionShape& s, ScratchCursor& cursor)
      : reach{cursor.take<std::int32_t>(s.length), cursor.take<std::int32_t>(s.length)},
        delta(cursor.take<float>(s.batch * s.length * s.heads)) {}
  Reach reach;
  float* delta;  // (B, T, H): <o, d_o>
};

struct Place {
  std::int64_t batch, head, key_head;
};

template <typename T>
void pack_queries(const AttentionBackward& op, const Place& at, std::int64_t query, const Work& work) {
  const AttentionShape& s = op.shape;
  const std::int64_t rows = std::min(kRows, s.length - query), token = at.batch * s.length + query;
  pack_block(head_rows(op.q.as<T>(), s.q_rows(), s.key_width, token, at.head), rows, 1.0F,
             {work.q, work.key});
  pack_block(head_rows(op.d_o.as<T>(), s.o_rows(), s.value_width, token, at.head), rows, 1.0F,
             {work.d_o, work.value});
}
template <typename T>
void pack_keys(const AttentionBackward& op, const Place& at, std::int64_t key, const Work& work) {
  const AttentionShape& s = op.shape;
  const std::int64_t rows = std::min(kRows, s.length - key), token = at.batch * s.length + key;
  pack_block(head_rows(op.k.as<T>(), s.k_rows(), s.key_width, token, at.key_head), rows, 1.0F,
             {work.k, work.key});
  pack_block(head_rows(op.v.as<T>(), s.v_rows(), s.value_width, token, at.key_head), rows, 1.0F,
             {work.v, work.value});
  transpose({kRows, work.key}, {work.k, work.key}, {work.k_turned, kRows});
  transpose({kRows, work.value}, {work.v, work.value}, {work.v_turned, kRows});
}

// p and d_a of a packed block of queries and one of keys; zero where a query does not reach.
void logit_gradients(const AttentionBackward& op, const Place& at, const Shared& shared, std::int64_t query,
                     std::int64_t key, const Work& work) {
  const AttentionShape& s = op.shape;
  const float scale = attention_scale(s);
  multiply<Into::kSet>({kRows, kRows, s.key_width}, {work.q, work.key, 1}, {work.k_turned, kRows},
                       {work.p, kRows});
  multiply<Into::kSet>({kRows, kRows, s.value_width}, {work.d_o, work.value, 1}, {work.v_turned, kRows},
                       {work.d_a, kRows});
  for (std::int64_t i = 0; i < kRows; ++i) {
    float* p = work.p + i * kRows;
    float* d_a = work.d_a + i * kRows;
    std::int64_t begin = kRows, end = kRows;
    if (query + i < s.length) {
      begin = std::clamp<std::int64_t>(shared.reach.first[query + i] - key, 0, kRows);
      end = std::clamp<std::int64_t>(query + i + 1 - key, begin, kRows);
      const std::int64_t row = (at.batch * s.length + query + i) * s.heads + at.head;
      const float lse = op.lse[row], delta = shared.delta[row];
      for (std::int64_t c = begin / kLanes * kLanes; c < end; c += kLanes) {
        const Vec e = exp(load(p + c) * scale - lse);
        store(p + c, e);
        store(d_a + c, e * (load(d_a + c) - delta) * scale);
      }
    }
    for (float* a : {p, d_a}) {
      std::fill(a, a + begin, 0.0F);
      std::fill(a + end, a + kRows, 0.0F);
    }
  }
}

template <typename T>
void key_gradients(const AttentionBackward& op, const Shared& shared, Place at, std::int64_t key,
                   const Work& work) {
  const AttentionShape& s = op.shape;
  const std::int64_t rows = std::min(kRows, s.length - key), token = at.batch * s.length + key;
  pack_keys<T>(op, at, key, work);
  std::fill_n(work.d_key, kRows * work.key, 0.0F);
  std::fill_n(work.d_value, kRows * work.value, 0.0F);
  for (std::int64_t member = 0; member < s.group(); ++member) {
    at.head = at.key_head * s.group() + member;
    for (std::int64_t query = key; query <= shared.reach.last[key + rows - 1]; query += kRows) {
      pack_queries<T>(op, at, query, work);
      logit_gradients(op, at, shared, query, key, work);
      multiply<Into::kAdd>({kRows, work.value, kRows}, {work.p, 1, kRows}, {work.d_o, work.value},
                           {work.d_value, work.value});
      multiply<Into::kAdd>({kRows, work.key, kRows}, {work.d_a, 1, kRows}, {work.q, work.key},
                           {work.d_key, work.key});
    }
  }
  unpack_block({work.d_key, work.key}, rows, 1.0F,
               head_rows(op.d_k.as<T>(), s.k_rows(), s.key_width, token, at.key_head));
  unpack_block({work.d_value, work.value}, rows, 1.0F,
               head_rows(op.d_v.as<T>(), s.v_rows(), s.value_width, token, at.key_head));
}

template <typename T>
void query_gradients(const AttentionBackward& op, const Shared& shared, const Place& at, std::int64_t query,
                     const Work& work) {
  const AttentionShape& s = op.shape;
  const std::int64_t rows = std::min(kRows, s.length - query);
  pack_queries<T>(op, at, query, work);
  std::fill_n(work.d_key, kRows * work.key, 0.0F);
  for (std::int64_t key = shared.reach.first[query]; key < query + rows; key += kRows) {
    pack_keys<T>(op, at, key, work);
    logit_gradients(op, at, shared, query, key, work);
    multiply<Into::kAdd>({kRows, work.key, kRows}, {work.d_a, kRows, 1}, {work.k, work.key},
                         {work.d_key, work.key});
  }
  unpack_block({work.d_key, work.key}, rows, 1.0F,
               head_rows(op.d_q.as<T>(), s.q_rows(), s.key_width, at.batch * s.length + query, at.head));
}

template <typename T>
void fill_delta(const AttentionBackward& op, const Shared& shared) {
  const std::int64_t width = op.shape.value_width;
  parallel_ranges(op.shape.batch * op.shape.length * op.shape.heads, 256,
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t row = begin; row < end; ++row) {
                      const T* o = op.o.as<T>() + row * width;
                      const T* d_o = op.d_o.as<T>() + row * width;
                      Vec total = zero();
                      for (std::int64_t c = 0; c < width; c += kLanes) {
                        total += load_floats(o + c, width - c) * load_floats(d_o + c, width - c);
                      }
                      shared.delta[row] = sum(total);
                    }
                  });
}

void add_sink_gradient(const AttentionBackward& op, const Shared& shared) {
  const AttentionShape& s = op.shape;
  parallel_for(s.heads, [&](std::int64_t head, std::int64_t) {
    double total = 0;
    for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
      const std::int64_t row = token * s.heads + head;
      total +=
          std::exp(static_cast<double>(op.sink[head] - op.lse[row])) * static_cast<double>(shared.delta[row]);
    }
    op.d_sink[head] -= static_cast<float>(total);
  });
}

template <typename T>
void backward(const AttentionBackward& op, const Shared& shared, std::byte* workers) {
  const AttentionShape& s = op.shape;
  const std::size_t stride = worker_bytes(s);
  const std::int64_t blocks = (s.length + kRows - 1) / kRows;
  fill_delta<T>(op, shared);
  parallel_for(s.batch * s.key_heads * blocks, [&](std::int64_t task, std::int64_t worker) {
    ScratchCursor cursor(workers + static_cast<std::size_t>(worker) * stride);
    const Work work(s, cursor);
    const std::int64_t pairs = s.batch * s.key_heads, pair = task % pairs;
    key_gradients<T>(op, shared, {pair / s.key_heads, 0, pair % s.key_heads}, task / pairs * kRows, work);
  });
  parallel_for(s.batch * s.heads * blocks, [&](std::int64_t task, std::int64_t worker) {
    ScratchCursor cursor(workers + static_cast<std::size_t>(worker) * stride);
    const Work work(s, cursor);
    const std::int64_t pairs = s.batch * s.heads, pair = task % pairs, head = pair % s.heads;
    query_gradients<T>(op, shared, {pair / s.heads, head, head / s.group()},
                       (blocks - 1 - task / pairs) * kRows, work);
  });
}

}  // namespace

Bytes scratch_bytes(const AttentionBackward& op) {
  check_attention(op.shape, {op.q, op.k, op.v, op.o, op.d_o, op.d_q, op.d_k, op.d_v});
  ScratchCursor cursor(nullptr);
  const Shared unused(op.shape, cursor);
  return cursor.used() + Bytes(worker_bytes(op.shape)) * static_cast<std::uint64_t>(worker_count());
}

void compute(const AttentionBackward& op, std::byte* scratch) {
  ScratchCursor cursor(scratch);
  const Shared shared(op.shape, cursor);
  fill_reach(op.shape, shared.reach);
  std::byte* const workers = scratch + cursor.used().count();
  with_element(op.q.dtype(), [&](auto* element) {
    backward<std::remove_pointer_t<decltype(element)>>(op, shared, workers);
  });
  if (op.sink != nullptr && op.d_sink != nullptr) add_sink_gradient(op, shared);
}

}  // namespace terrace::trainer::cpu
