// Sparse attention, backward. Tokens go in blocks. First every token of a block, on its own: dq, dgate and
// the block's da and P. Then every range of keys, on its own, adds what the block's tokens say of it, in the
// order of the tokens: positions are ascending, so a token's slots inside a range lie together. No atomics,
// and the sum over tokens has one order whatever the block's size.
#include <algorithm>
#include <bit>

#include "examples/moe_trainer/ops/cpu/dsa_index.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kBlockFloats = 1 << 20;
constexpr std::int64_t kMaxBlockTokens = 256;

// What one token leaves for the reduction over keys.
struct TokenRecord {
  TokenRecord(const DsaSizes& sizes, ScratchCursor& cursor)
      : p(cursor.take<float>(sizes.heads * sizes.slots)),
        d_a(cursor.take<float>(sizes.heads * sizes.slots)),
        d_o(cursor.take<float>(sizes.heads * sizes.value)),
        d_products(cursor.take<float>(sizes.index_heads * sizes.slots)),
        p_sink(cursor.take<float>(sizes.heads)),
        loss(cursor.take<float>(1)) {}
  float *p, *d_a, *d_o;  // d_o (H, padded DV), before the gate
  float* d_products;
  float* p_sink;  // then -p_sink delta
  float* loss;
};

struct Layout {
  explicit Layout(const DsaShape& shape) : sizes(shape) {
    ScratchCursor record(nullptr);
    const TokenRecord unused_record(sizes, record);
    record_bytes = record.used().count();
    block = std::clamp<std::int64_t>(kBlockFloats * 4 / static_cast<std::int64_t>(record_bytes), 16,
                                     kMaxBlockTokens);
    block = std::min(block, shape.batch * shape.length);
    ScratchCursor worker(nullptr);
    const TokenScratch unused_token(sizes, worker);
    const IndexScratch unused_index(sizes, worker);
    worker_bytes = worker.used().count();
  }
  DsaSizes sizes;
  std::int64_t block;
  std::size_t record_bytes, worker_bytes;
};

TokenRecord record_at(const Layout& layout, std::byte* records, std::int64_t index) {
  ScratchCursor cursor(records + static_cast<std::size_t>(index) * layout.record_bytes);
  return {layout.sizes, cursor};
}

// d_o = dy sigmoid(gate), d_gate, and delta_h = <d_o, o>; returns nothing else. o (H, DV) is given.
void through_output_gate(const DsaBackward& op, const DsaSizes& sizes, std::int64_t token, const float* o,
                         float* d_o, float* delta) {
  const DsaShape& shape = op.shape;
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    const std::int64_t at = (token * shape.heads + h) * shape.value_width;
    Vec total = zero();
    for (std::int64_t i = 0; i < shape.value_width; i += kLanes) {
      const std::int64_t n = shape.value_width - i;
      const Vec value = load_part(o + h * shape.value_width + i, n);
      Vec d = load_part(op.d_y + at + i, n);
      if (op.in.gate) {
        const Vec open = sigmoid(load_part(op.in.gate + at + i, n));
        if (op.d_gate) store_part(op.d_gate + at + i, d * value * open * (1.0F - open), n);
        d *= open;
      }
      store_part(d_o + h * sizes.value + i, d, n);
      total += d * value;
    }
    delta[h] = sum(total);
  }
}

void token_backward(const DsaBackward& op, const DsaSizes& sizes, std::int64_t token, const Selected& chosen,
                    const TokenScratch& work, const TokenRecord& record) {
  const DsaShape& shape = op.shape;
  const std::int64_t sequence = token / shape.length * shape.length;
  const Rows keys{op.in.k + sequence * shape.key_width, shape.key_width, shape.key_width};
  const Rows values = value_rows(shape, op.in, sequence);
  probabilities(shape, sizes, op.in, token, chosen, work, record.p, record.p_sink, nullptr);
  if (!op.d_y) return;
  gather_sum({shape.heads, sizes.slots}, record.p, values, chosen, work.o);
  std::fill_n(record.d_o, sizes.heads * sizes.value, 0.0F);
  float* delta = work.q;  // the query is not needed any more
  through_output_gate(op, sizes, token, work.o, record.d_o, delta);
  gather_dot({sizes.heads, sizes.value, sizes.slots}, record.d_o, values, chosen, work.panel, record.d_a);
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    float* d_a = record.d_a + h * sizes.slots;
    const float* p = record.p + h * sizes.slots;
    for (std::int64_t s = 0; s < chosen.count; s += kLanes) {
      store(d_a + s, load(p + s) * (load(d_a + s) - delta[h]) * sizes.scale);
    }
    record.p_sink[h] *= -delta[h];
  }
  gather_sum({shape.heads, sizes.slots}, record.d_a, keys, chosen,
             op.d_q + token * shape.heads * shape.key_width);
}

// out (width) += sum over heads of factor[h * slots] * rows[h].
struct HeadSum {
  std::int64_t heads, slots, width, stride;
};
void add_heads(const HeadSum& how, const float* factor, const float* rows, float* out) {
  for (std::int64_t c = 0; c < how.width; c += 2 * kLanes) {
    const std::int64_t n = how.width - c;
    Vec s0 = load_part(out + c, n), s1 = n > kLanes ? load_part(out + c + kLanes, n - kLanes) : zero();
    for (std::int64_t h = 0; h < how.heads; ++h) {
      const Vec x = splat(factor[h * how.slots]);
      const float* row = rows + h * how.stride + c;
      s0 += x * load_part(row, n);
      if (n > kLanes) s1 += x * load_part(row + kLanes, n - kLanes);
    }
    store_part(out + c, s0, n);
    if (n > kLanes) store_part(out + c + kLanes, s1, n - kLanes);
  }
}

struct KeyRange {
  std::int64_t sequence, begin, end;  // positions inside the sequence
};

bool wants_index(const DsaBackward& op) { return op.d_index_q && op.d_index_k && op.d_index_w; }

// The token's first slot at or behind a position.
std::int64_t slot_from(const DsaBackward& op, std::int64_t token, const Selected& chosen,
                       std::int64_t position) {
  if (op.key_map == nullptr) {
    return std::lower_bound(chosen.position, chosen.position + chosen.count,
                            static_cast<std::int32_t>(position)) -
           chosen.position;
  }
  const KeyWord word = op.key_map[token * key_map_words(op.shape.length) + position / 32];
  return word.before + std::popcount(word.bits & ((1U << (position % 32)) - 1U));
}

// Adds what one token says of the keys in a range.
void add_to_keys(const DsaBackward& op, const DsaSizes& sizes, std::int64_t token, const Selected& chosen,
                 const KeyRange& range, const TokenRecord& record) {
  const DsaShape& shape = op.shape;
  const std::int32_t* end = chosen.position + chosen.count;
  const std::int32_t* at = chosen.position + slot_from(op, token, chosen, range.begin);
  const std::int64_t index_row = shape.index_heads * shape.index_width;
  for (; at != end && *at < range.end; ++at) {
    const std::int64_t slot = at - chosen.position, key = range.sequence * shape.length + *at;
    if (op.d_y) {
      add_heads({shape.heads, sizes.slots, shape.key_width, shape.key_width}, record.d_a + slot,
                op.in.q + token * shape.heads * shape.key_width, op.d_k + key * shape.key_width);
      add_heads({shape.heads, sizes.slots, shape.value_width, sizes.value}, record.p + slot, record.d_o,
                op.d_v ? op.d_v + key * shape.value_width : op.d_k + key * shape.key_width);
    }
    if (!wants_index(op)) continue;
    add_heads({shape.index_heads, sizes.slots, shape.index_width, shape.index_width},
              record.d_products + slot, op.in.index_q + token * index_row,
              op.d_index_k + key * shape.index_width);
  }
}

void reduce_over_keys(const DsaBackward& op, const Layout& layout, const ChosenLists& lists,
                      std::int64_t first, std::int64_t last, std::byte* records) {
  const std::int64_t length = op.shape.length;
  const std::int64_t grain = std::max<std::int64_t>(16, (length + 15) / 16);
  const std::int64_t ranges = (length + grain - 1) / grain, first_sequence = first / length;
  const std::int64_t sequences = (last - 1) / length - first_sequence + 1;
  parallel_for(sequences * ranges, [&](std::int64_t task, std::int64_t) {
    const std::int64_t begin = task % ranges * grain;
    const KeyRange range{first_sequence + task / ranges, begin, std::min(length, begin + grain)};
    // A token sees no key after itself.
    const std::int64_t from = std::max(first, range.sequence * length + begin);
    for (std::int64_t token = from; token < std::min(last, (range.sequence + 1) * length); ++token) {
      add_to_keys(op, layout.sizes, token, lists.of(token), range, record_at(layout, records, token - first));
    }
  });
}

void zero_key_gradients(const DsaBackward& op) {
  const std::int64_t tokens = op.shape.batch * op.shape.length;
  if (op.d_k) std::fill_n(op.d_k.f32(), tokens * op.shape.key_width, 0.0F);
  if (op.d_v) std::fill_n(op.d_v.f32(), tokens * op.shape.value_width, 0.0F);
  if (wants_index(op)) std::fill_n(op.d_index_k.f32(), tokens * op.shape.index_width, 0.0F);
}

}  // namespace

Bytes scratch_bytes(const DsaBackward& op) {
  const Layout layout(op.shape);
  ScratchCursor cursor(nullptr);
  const ChosenLists unused(op.shape, op.selected, cursor);
  return cursor.used() + Bytes(layout.record_bytes) * static_cast<std::uint64_t>(layout.block) +
         Bytes(layout.worker_bytes) * static_cast<std::uint64_t>(worker_count());
}

void compute(const DsaBackward& op, std::byte* scratch) {
  const Layout layout(op.shape);
  const std::int64_t tokens = op.shape.batch * op.shape.length, heads = op.shape.heads;
  ScratchCursor whole(scratch);
  const ChosenLists lists(op.shape, op.selected, whole);
  std::byte* records = scratch + whole.used().count();
  std::byte* workers = records + layout.record_bytes * static_cast<std::size_t>(layout.block);
  zero_key_gradients(op);
  double loss = 0;
  for (std::int64_t first = 0; first < tokens; first += layout.block) {
    const std::int64_t last = std::min(tokens, first + layout.block);
    parallel_for(last - first, [&](std::int64_t index, std::int64_t worker) {
      ScratchCursor cursor(workers + static_cast<std::size_t>(worker) * layout.worker_bytes);
      const TokenScratch work(layout.sizes, cursor);
      const IndexScratch index_work(layout.sizes, cursor);
      const TokenRecord record = record_at(layout, records, index);
      const Selected chosen = lists.of(first + index);
      token_backward(op, layout.sizes, first + index, chosen, work, record);
      if (!wants_index(op)) return;
      *record.loss = index_backward(op, layout.sizes, first + index, chosen, record.p, index_work, work.panel,
                                    record.d_products);
    });
    reduce_over_keys(op, layout, lists, first, last, records);
    for (std::int64_t token = first; token < last; ++token) {
      const TokenRecord record = record_at(layout, records, token - first);
      if (wants_index(op)) loss += static_cast<double>(*record.loss);
      if (!op.d_y || op.d_sink == nullptr || op.in.sink == nullptr) continue;
      for (std::int64_t h = 0; h < heads; ++h) op.d_sink[h] += record.p_sink[h];
    }
  }
  if (op.index_loss != nullptr) *op.index_loss = static_cast<float>(loss);
}

}  // namespace terrace::trainer::cpu
