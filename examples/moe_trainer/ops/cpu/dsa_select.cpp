// The indexer's scores and the causal top-k: I_ts = c sum_h w_th relu(<q_th, k_s>), c = (HI DI)^-1/2.
#include <algorithm>
#include <bit>
#include <limits>

#include "examples/moe_trainer/ops/cpu/dsa_token.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

// An integer that orders as the score does; every NaN comes out below every number.
std::int32_t order_of(float score) {
  if (score != score) return std::numeric_limits<std::int32_t>::min();
  const auto bits = std::bit_cast<std::int32_t>(score + 0.0F);  // -0 becomes +0: they tie
  return bits >= 0 ? bits : static_cast<std::int32_t>(0x80000000U - static_cast<std::uint32_t>(bits));
}

struct Workspace {
  Workspace(const DsaSizes& sizes, std::int64_t positions, ScratchCursor& cursor)
      : q(cursor.take<float>(sizes.index_heads * sizes.index)),
        products(cursor.take<float>(sizes.index_heads * kPanel)),
        scores(cursor.take<float>(positions)),
        order(cursor.take<std::int32_t>(positions)) {}
  float *q, *products, *scores;
  std::int32_t* order;
};

std::int64_t panels_of(const DsaShape& shape) { return (shape.length + kPanel - 1) / kPanel; }

std::size_t workspace_bytes(const DsaShape& shape, const DsaSizes& sizes) {
  ScratchCursor cursor(nullptr);
  const Workspace unused(sizes, panels_of(shape) * kPanel, cursor);
  return cursor.used().count();
}

// The keys of every sequence as panels (DI, 16), so that sixteen positions are scored at once.
void make_panels(const DsaSelect& op, const DsaSizes& sizes, float* panels) {
  const DsaShape& shape = op.shape;
  const std::int64_t each = panels_of(shape);
  const float* keys = op.in.index_k;
  parallel_for(shape.batch * each, [&](std::int64_t index, std::int64_t) {
    float* panel = panels + index * sizes.index * kPanel;
    std::fill_n(panel, sizes.index * kPanel, 0.0F);
    const std::int64_t first = index % each * kPanel;
    for (std::int64_t i = 0; i < std::min(kPanel, shape.length - first); ++i) {
      const float* key = keys + (index / each * shape.length + first + i) * shape.index_width;
      for (std::int64_t d = 0; d < shape.index_width; ++d) panel[d * kPanel + i] = key[d];
    }
  });
}

// Positions from `from`, rounded down to a panel, to t.
void score_positions(const DsaSelect& op, const DsaSizes& sizes, const float* panels, std::int64_t token,
                     std::int64_t from, const Workspace& work) {
  const DsaShape& shape = op.shape;
  const std::int64_t t = token % shape.length;
  const float* index_q = op.in.index_q;
  const float* weight = op.in.index_w + token * shape.index_heads;
  pad_heads({shape.index_heads, sizes.index_heads, shape.index_width, sizes.index},
            index_q + token * shape.index_heads * shape.index_width, work.q);
  for (std::int64_t first = from / kPanel * kPanel; first <= t; first += kPanel) {
    const float* panel =
        panels + (token / shape.length * panels_of(shape) + first / kPanel) * sizes.index * kPanel;
    multiply<Into::kSet>({sizes.index_heads, kPanel, sizes.index}, {work.q, sizes.index, 1}, {panel, kPanel},
                         {work.products, kPanel});
    for (std::int64_t half = 0; half < kPanel; half += kLanes) {
      Vec total = zero();
      for (std::int64_t h = 0; h < shape.index_heads; ++h) {
        total += max(load(work.products + h * kPanel + half), zero()) * weight[h];
      }
      store(work.scores + first + half, total * sizes.index_scale);
    }
  }
}

// Positions begin .. end.
struct Candidates {
  std::int64_t begin, end;
};

// The k best candidates, ascending: all above the k-th best score, then the first that equal it.
void choose(const Candidates& among, std::int64_t k, const Workspace& work, std::int32_t* out) {
  const std::int64_t count = among.end - among.begin;
  for (std::int64_t i = 0; i < count; ++i) work.order[i] = order_of(work.scores[among.begin + i]);
  std::nth_element(work.order, work.order + (k - 1), work.order + count, std::greater<>());
  const std::int32_t bar = work.order[k - 1];
  std::int64_t above = 0;
  for (std::int64_t s = among.begin; s < among.end; ++s) above += order_of(work.scores[s]) > bar ? 1 : 0;
  std::int64_t ties = k - above;
  for (std::int64_t s = among.begin; s < among.end; ++s) {
    const std::int32_t order = order_of(work.scores[s]);
    if (order > bar || (order == bar && ties-- > 0)) *out++ = static_cast<std::int32_t>(s);
  }
}

void select_token(const DsaSelect& op, const DsaSizes& sizes, const float* panels, std::int64_t token,
                  const Workspace& work) {
  const std::int64_t length = op.shape.length, t = token % length, slots = op.shape.slots();
  const std::int64_t from = sequence_start(op.shape.packing, t), count = t + 1 - from;
  std::int32_t* out = op.selected + token * slots;
  const bool all = count <= slots;
  if (!all || op.scores != nullptr) score_positions(op, sizes, panels, token, from, work);
  if (op.scores != nullptr) {
    float* row = op.scores + token * length;
    std::fill_n(row, length, -std::numeric_limits<float>::infinity());
    std::copy_n(work.scores + from, count, row + from);
  }
  if (all) {
    for (std::int64_t s = 0; s < slots; ++s) out[s] = s < count ? static_cast<std::int32_t>(from + s) : -1;
  } else {
    choose({from, t + 1}, slots, work, out);
  }
}

}  // namespace

std::int64_t sequence_start(const Packing& packing, std::int64_t t) {
  if (!packing) return 0;
  const std::int32_t* end = packing.starts + packing.sequences + 1;
  return *(std::upper_bound(packing.starts, end, static_cast<std::int32_t>(t)) - 1);
}

Bytes scratch_bytes(const DsaSelect& op) {
  const DsaSizes sizes(op.shape);
  ScratchCursor cursor(nullptr);
  cursor.take<float>(op.shape.batch * panels_of(op.shape) * sizes.index * kPanel);
  return cursor.used() + Bytes(workspace_bytes(op.shape, sizes)) * static_cast<std::uint64_t>(worker_count());
}

void compute(const DsaSelect& op, std::byte* scratch) {
  const DsaShape& shape = op.shape;
  const DsaSizes sizes(shape);
  ScratchCursor shared(scratch);
  auto* panels = shared.take<float>(shape.batch * panels_of(shape) * sizes.index * kPanel);
  std::byte* workspaces = scratch + shared.used().count();
  const std::size_t stride = workspace_bytes(shape, sizes);
  make_panels(op, sizes, panels);
  constexpr std::int64_t kTokens = 8;
  const std::int64_t tokens = shape.batch * shape.length;
  parallel_for((tokens + kTokens - 1) / kTokens, [&](std::int64_t task, std::int64_t worker) {
    ScratchCursor cursor(workspaces + static_cast<std::size_t>(worker) * stride);
    const Workspace work(sizes, panels_of(shape) * kPanel, cursor);
    for (std::int64_t token = task * kTokens; token < std::min(tokens, (task + 1) * kTokens); ++token) {
      select_token(op, sizes, panels, token, work);
    }
  });
}

}  // namespace terrace::trainer::cpu
