#include <limits>
#include <stdexcept>

#include "examples/moe_trainer/ops/cpu/attention_block.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Work {
  Work(const AttentionShape& s, ScratchCursor& cursor)
      : key(round_up_to(s.key_width, 16)),
        value(round_up_to(s.value_width, 16)),
        q(cursor.take<float>(kAttentionRows * key)),
        k(cursor.take<float>(kAttentionRows * key)),
        k_turned(cursor.take<float>(kAttentionRows * key)),
        v(cursor.take<float>(kAttentionRows * value)),
        o(cursor.take<float>(kAttentionRows * value)),
        a(cursor.take<float>(kAttentionRows * kAttentionRows)),
        top(cursor.take<float>(kAttentionRows)),
        sum(cursor.take<float>(kAttentionRows)) {}
  std::int64_t key, value;  // padded widths
  float *q, *k, *k_turned, *v, *o, *a;
  float *top, *sum;  // a row's largest logit so far, and its sum of exponentials relative to that
};
std::size_t worker_bytes(const AttentionShape& s) {
  ScratchCursor cursor(nullptr);
  const Work unused(s, cursor);
  return cursor.used().count();
}

struct Block {
  std::int64_t query, queries, key;  // first query, how many, first key
};

// One block of logits joins the rows' softmax: a becomes e^(a - top), sum and o follow the new top.
void join_softmax(const Block& block, const std::int32_t* first, const Work& work) {
  for (std::int64_t i = 0; i < block.queries; ++i) {
    float* a = work.a + i * kAttentionRows;
    const std::int64_t query = block.query + i;
    const std::int64_t begin = std::clamp<std::int64_t>(first[query] - block.key, 0, kAttentionRows);
    const std::int64_t end = std::clamp<std::int64_t>(query + 1 - block.key, begin, kAttentionRows);
    std::fill(a, a + begin, kNothing);
    std::fill(a + end, a + kAttentionRows, kNothing);
    Vec largest_of = load(a);
    for (std::int64_t c = kLanes; c < kAttentionRows; c += kLanes) largest_of = max(load(a + c), largest_of);
    const float top = std::max(work.top[i], largest(largest_of));
    if (top == kNothing) {
      std::fill_n(a, kAttentionRows, 0.0F);
      continue;
    }
    Vec total = zero();
    for (std::int64_t c = 0; c < kAttentionRows; c += kLanes) {
      const Vec e = exp(load(a + c) - top);
      store(a + c, e);
      total += e;
    }
    const float shrink = std::exp(work.top[i] - top);
    work.sum[i] = work.sum[i] * shrink + sum(total);
    work.top[i] = top;
    if (shrink == 1.0F) continue;
    float* o = work.o + i * work.value;
    for (std::int64_t c = 0; c < work.value; c += kLanes) store(o + c, load(o + c) * shrink);
  }
}

template <typename T>
void attend(const Attention& op, const std::int32_t* first, std::int64_t batch, std::int64_t head,
            std::int64_t query, const Work& work) {
  const AttentionShape& s = op.shape;
  const std::int64_t queries = std::min(kAttentionRows, s.length - query), key_head = head / s.group();
  const std::int64_t token = batch * s.length;
  pack_block(head_rows(op.q.as<T>(), s.q_rows(), s.key_width, token + query, head), queries,
             attention_scale(s), {work.q, work.key});
  std::fill_n(work.o, kAttentionRows * work.value, 0.0F);
  std::fill_n(work.top, kAttentionRows, op.sink != nullptr ? op.sink[head] : kNothing);
  std::fill_n(work.sum, kAttentionRows, op.sink != nullptr ? 1.0F : 0.0F);
  for (std::int64_t key = first[query]; key < query + queries; key += kAttentionRows) {
    const std::int64_t keys = std::min(kAttentionRows, s.length - key);
    pack_block(head_rows(op.k.as<T>(), s.k_rows(), s.key_width, token + key, key_head), keys, 1.0F,
               {work.k, work.key});
    transpose({kAttentionRows, work.key}, {work.k, work.key}, {work.k_turned, kAttentionRows});
    multiply<Into::kSet>({kAttentionRows, kAttentionRows, s.key_width}, {work.q, work.key, 1},
                         {work.k_turned, kAttentionRows}, {work.a, kAttentionRows});
    join_softmax({query, queries, key}, first, work);
    pack_block(head_rows(op.v.as<T>(), s.v_rows(), s.value_width, token + key, key_head), keys, 1.0F,
               {work.v, work.value});
    multiply<Into::kAdd>({kAttentionRows, work.value, kAttentionRows}, {work.a, kAttentionRows, 1},
                         {work.v, work.value}, {work.o, work.value});
  }
  for (std::int64_t i = 0; i < queries; ++i) {
    unpack_block({work.o + i * work.value, work.value}, 1, 1.0F / work.sum[i],
                 head_rows(op.o.as<T>(), s.o_rows(), s.value_width, token + query + i, head));
    if (op.lse != nullptr) {
      op.lse[(token + query + i) * s.heads + head] = work.top[i] + std::log(work.sum[i]);
    }
  }
}

}  // namespace

void check_attention(const AttentionShape& shape, std::initializer_list<In> arrays) {
  if (const char* wrong = wrong_with(shape); wrong != nullptr) throw std::runtime_error(wrong);
  for (const In& array : arrays) {
    if (array.dtype() != arrays.begin()->dtype())
      throw std::runtime_error("attention: arrays of different types");
  }
}

void fill_reach(const AttentionShape& s, const Reach& reach) {
  const std::int64_t window = s.window > 0 ? s.window : s.length;
  const std::int64_t sequences = s.packing ? s.packing.sequences : 1;
  for (std::int64_t i = 0; i < sequences; ++i) {
    const std::int64_t start = s.packing ? s.packing.starts[i] : 0;
    const std::int64_t end = s.packing ? s.packing.starts[i + 1] : s.length;
    for (std::int64_t t = start; t < end; ++t) {
      reach.first[t] = static_cast<std::int32_t>(std::max(start, t - std::min(t, window - 1)));
      if (reach.last != nullptr) {
        reach.last[t] = static_cast<std::int32_t>(window > end - 1 - t ? end - 1 : t + window - 1);
      }
    }
  }
}

Bytes scratch_bytes(const Attention& op) {
  check_attention(op.shape, {op.q, op.k, op.v, op.o});
  ScratchCursor cursor(nullptr);
  cursor.take<std::int32_t>(op.shape.length);
  return cursor.used() + Bytes(worker_bytes(op.shape)) * static_cast<std::uint64_t>(worker_count());
}

void compute(const Attention& op, std::byte* scratch) {
  const AttentionShape& s = op.shape;
  ScratchCursor shared(scratch);
  auto* first = shared.take<std::int32_t>(s.length);
  fill_reach(s, {first, nullptr});
  std::byte* const workers = scratch + shared.used().count();
  const std::size_t stride = worker_bytes(s);
  const std::int64_t blocks = (s.length + kAttentionRows - 1) / kAttentionRows;
  parallel_for(s.batch * s.heads * blocks, [&](std::int64_t task, std::int64_t worker) {
    ScratchCursor cursor(workers + static_cast<std::size_t>(worker) * stride);
    const Work work(s, cursor);
    // The longest rows first: the threads end together.
    const std::int64_t block = blocks - 1 - task / (s.batch * s.heads), pair = task % (s.batch * s.heads);
    with_element(op.q.dtype(), [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      attend<T>(op, first, pair / s.heads, pair % s.heads, block * kAttentionRows, work);
    });
  });
}

}  // namespace terrace::trainer::cpu
