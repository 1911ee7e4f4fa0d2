#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "examples/moe_trainer/ops/cpu/dsa_token.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

// panel (padded, 16) = the rows at sixteen slots from `first` on, transposed; missing slots are zero columns.
void gather_panel(const Rows& rows, std::int64_t padded, const Selected& chosen, std::int64_t first,
                  float* panel) {
  for (std::int64_t half = 0; half < kPanel; half += kLanes) {
    const float* row[kLanes];
    for (std::int64_t i = 0; i < kLanes; ++i) {
      const std::int64_t slot = first + half + i;
      row[i] = slot < chosen.count ? rows.at + chosen.position[slot] * rows.stride : nullptr;
    }
    for (std::int64_t c = 0; c < padded; c += kLanes) {
      Vec v[kLanes];
      for (int i = 0; i < kLanes; ++i)
        v[i] = row[i] == nullptr ? zero() : load_part(row[i] + c, rows.width - c);
      transpose_lanes(v);
      for (int i = 0; i < kLanes; ++i) store(panel + (c + i) * kPanel + half, v[i]);
    }
  }
}

// Four heads, sixteen columns from c on, of which `n` exist.
void sum_block(const GatherSum& how, const float* left, const Rows& rows, const Selected& chosen,
               std::int64_t c, std::int64_t head, float* out) {
  Vec acc[4][2] = {};
  const std::int64_t n = rows.width - c;
  for (std::int64_t s = 0; s < chosen.count; ++s) {
    const float* row = rows.at + chosen.position[s] * rows.stride + c;
    const Vec v0 = load_part(row, n), v1 = n > kLanes ? load_part(row + kLanes, n - kLanes) : zero();
    for (int i = 0; i < 4; ++i) {
      const Vec x = splat(left[(head + i) * how.slots + s]);
      acc[i][0] += x * v0;
      acc[i][1] += x * v1;
    }
  }
  for (std::int64_t i = 0; i < std::min<std::int64_t>(4, how.real - head); ++i) {
    float* to = out + (head + i) * rows.width + c;
    store_part(to, acc[i][0], n);
    if (n > kLanes) store_part(to + kLanes, acc[i][1], n - kLanes);
  }
}

struct Normalised {
  float p_sink, lse;
};
// Turns scores into probabilities in place.
Normalised softmax_with_sink(float* a, std::int64_t count, const float* sink) {
  Vec top = splat(-std::numeric_limits<float>::infinity());
  std::int64_t s = 0;
  for (; s + kLanes <= count; s += kLanes) top = max(load(a + s), top);
  float m = largest(top);
  for (; s < count; ++s) m = std::max(m, a[s]);
  if (sink != nullptr) m = std::max(m, *sink);
  Vec total = zero();
  for (s = 0; s < count; s += kLanes) {
    Vec e = exp(load_part(a + s, count - s) - m);
    for (std::int64_t lane = std::max<std::int64_t>(0, count - s); lane < kLanes; ++lane) e[lane] = 0;
    total += e;
    store_part(a + s, e, count - s);
  }
  const float at_sink = sink != nullptr ? std::exp(*sink - m) : 0.0F;
  const float all = sum(total) + at_sink, factor = 1.0F / all;
  for (s = 0; s < count; s += kLanes) store_part(a + s, load_part(a + s, count - s) * factor, count - s);
  return {at_sink * factor, m + std::log(all)};
}

std::size_t worker_bytes(const DsaSizes& sizes) {
  ScratchCursor cursor(nullptr);
  const TokenScratch unused(sizes, cursor);
  cursor.take<float>(sizes.heads * sizes.slots);
  return cursor.used().count();
}

}  // namespace

DsaSizes::DsaSizes(const DsaShape& shape)
    : heads(round_up_to(shape.heads, 4)),
      index_heads(round_up_to(shape.index_heads, 4)),
      key(round_up_to(shape.key_width, 8)),
      value(round_up_to(shape.value_width, 16)),
      index(round_up_to(shape.index_width, 8)),
      slots(round_up_to(shape.slots(), kPanel)),
      scale(shape.scale != 0 ? shape.scale : 1.0F / std::sqrt(static_cast<float>(shape.key_width))),
      index_scale(1.0F / std::sqrt(static_cast<float>(shape.index_heads * shape.index_width))) {}

TokenScratch::TokenScratch(const DsaSizes& sizes, ScratchCursor& cursor)
    : q(cursor.take<float>(sizes.heads * sizes.key)),
      panel(cursor.take<float>(std::max({sizes.key, sizes.value, sizes.index}) * kPanel)),
      o(cursor.take<float>(sizes.heads * sizes.value)) {}

ChosenLists::ChosenLists(const DsaShape& shape, const std::int32_t* selected, ScratchCursor& cursor)
    : shape_(shape), selected_(selected) {
  if (selected != nullptr) return;
  every_ = cursor.take<std::int32_t>(shape.length);
  if (every_ != nullptr) std::iota(every_, every_ + shape.length, 0);
}

Selected ChosenLists::of(std::int64_t token) const {
  if (selected_ == nullptr) {
    const std::int64_t t = token % shape_.length, start = sequence_start(shape_.packing, t);
    return {every_ + start, t + 1 - start};
  }
  const std::int32_t* list = selected_ + token * shape_.slots();
  std::int64_t count = 0;
  while (count < shape_.slots() && list[count] >= 0) ++count;
  return {list, count};
}

Rows value_rows(const DsaShape& shape, const DsaInputs& in, std::int64_t token) {
  if (!in.v) return {in.k.f32() + token * shape.key_width, shape.value_width, shape.key_width};
  return {in.v.f32() + token * shape.value_width, shape.value_width, shape.value_width};
}

void pad_heads(const PadHeads& how, const float* from, float* to) {
  std::fill_n(to, how.heads * how.padded, 0.0F);
  for (std::int64_t h = 0; h < how.real; ++h)
    std::copy_n(from + h * how.width, how.width, to + h * how.padded);
}

void gather_dot(const GatherDot& how, const float* left, const Rows& rows, const Selected& chosen,
                float* panel, float* out) {
  for (std::int64_t first = 0; first < how.slots; first += kPanel) {
    if (first >= chosen.count) {
      for (std::int64_t h = 0; h < how.heads; ++h) std::fill_n(out + h * how.slots + first, kPanel, 0.0F);
      continue;
    }
    gather_panel(rows, how.padded, chosen, first, panel);
    multiply<Into::kSet>({how.heads, kPanel, how.padded}, {left, how.padded, 1}, {panel, kPanel},
                         {out + first, how.slots});
  }
}

void gather_sum(const GatherSum& how, const float* left, const Rows& rows, const Selected& chosen,
                float* out) {
  for (std::int64_t c = 0; c < rows.width; c += 16) {
    for (std::int64_t h = 0; h < how.real; h += 4) sum_block(how, left, rows, chosen, c, h, out);
  }
}

void probabilities(const DsaShape& shape, const DsaSizes& sizes, const DsaInputs& in, std::int64_t token,
                   const Selected& chosen, const TokenScratch& scratch, float* p, float* p_sink, float* lse) {
  const std::int64_t sequence = token / shape.length * shape.length;
  pad_heads({shape.heads, sizes.heads, shape.key_width, sizes.key},
            in.q + token * shape.heads * shape.key_width, scratch.q);
  gather_dot({sizes.heads, sizes.key, sizes.slots}, scratch.q,
             {in.k + sequence * shape.key_width, shape.key_width, shape.key_width}, chosen, scratch.panel, p);
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    float* row = p + h * sizes.slots;
    for (std::int64_t s = 0; s < chosen.count; s += kLanes) store(row + s, load(row + s) * sizes.scale);
    const float* sink = in.sink == nullptr ? nullptr : in.sink + h;
    Normalised result{0.0F, sink == nullptr ? -std::numeric_limits<float>::infinity() : *sink};
    if (chosen.count > 0) result = softmax_with_sink(row, chosen.count, sink);
    if (p_sink != nullptr) p_sink[h] = result.p_sink;
    if (lse != nullptr) lse[h] = result.lse;
  }
}

Bytes scratch_bytes(const Dsa& op) {
  ScratchCursor cursor(nullptr);
  const ChosenLists unused(op.shape, op.selected, cursor);
  return cursor.used() + Bytes(worker_bytes(DsaSizes(op.shape))) * static_cast<std::uint64_t>(worker_count());
}

void compute(const Dsa& op, std::byte* scratch) {
  const DsaShape& shape = op.shape;
  const DsaSizes sizes(shape);
  const std::size_t stride = worker_bytes(sizes);
  ScratchCursor whole(scratch);
  const ChosenLists lists(shape, op.selected, whole);
  std::byte* workers = scratch + whole.used().count();
  const std::int64_t row = shape.heads * shape.value_width;
  constexpr std::int64_t kTokens = 8;  // of a task
  const std::int64_t tokens = shape.batch * shape.length;
  parallel_for((tokens + kTokens - 1) / kTokens, [&](std::int64_t task, std::int64_t worker) {
    ScratchCursor cursor(workers + static_cast<std::size_t>(worker) * stride);
    const TokenScratch work(sizes, cursor);
    auto* p = cursor.take<float>(sizes.heads * sizes.slots);
    for (std::int64_t token = task * kTokens; token < std::min(tokens, (task + 1) * kTokens); ++token) {
      const Selected chosen = lists.of(token);
      probabilities(shape, sizes, op.in, token, chosen, work, p, nullptr,
                    op.lse == nullptr ? nullptr : op.lse + token * shape.heads);
      float* y = op.y + token * row;
      const std::int64_t sequence = token / shape.length * shape.length;
      gather_sum({shape.heads, sizes.slots}, p, value_rows(shape, op.in, sequence), chosen, y);
      if (op.attention) std::copy_n(y, row, op.attention.f32() + token * row);
      if (!op.in.gate) continue;
      for (std::int64_t i = 0; i < row; i += kLanes) {
        store_part(y + i,
                   load_part(y + i, row - i) * sigmoid(load_part(op.in.gate + token * row + i, row - i)),
                   row - i);
      }
    }
  });
}

}  // namespace terrace::trainer::cpu
