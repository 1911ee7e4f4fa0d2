// The backward pass of dense attention, bf16, on Hopper's matrix units. With P = e^(a - lse) and
// dS = P (dO V^T - delta):
//   queries' blocks:  dQ = scale sum over keys of dS K
//   keys' blocks:     dV = sum over queries of P^T dO,   dK = scale sum over queries of dS^T Q
// Seven products instead of the five of a single pass: each sum has one owner, which needs neither atomics
// nor partial sums in memory.
//
// A block owns 128 rows of one head, two warpgroups of 64, and walks over tiles of 64 rows of the other kind.
// All products with the tile's rows as k take their left operand, P or dS, from the registers where it arose:
// for the keys' blocks everything is computed transposed. A group's query heads follow one another in the
// keys' blocks.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/attention_hopper.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kTileRows = 64;
constexpr int kLogits = kTileRows / 2;  // a thread, of 64 x kTileRows

enum class Owner : int { kQueries, kKeys };

// What the keys' blocks need to know of a tile's queries.
struct alignas(128) QueryRows {
  float lse_log2[kTileRows];
  float delta[kTileRows];
  std::int32_t first[kTileRows];
};

template <Owner kOwner, int kKey, int kValue>
struct Shared {
  static constexpr int kStages = 3;
  Tile<kBlockRows, kKey> own_key;      // keys or queries
  Tile<kBlockRows, kValue> own_value;  // values or d_o
  Tile<kTileRows, kKey> key[kStages];
  Tile<kTileRows, kValue> value[kStages];
  QueryRows rows[kStages];
  hopper::Barrier own_full, full[kStages], empty[kStages];
};

struct Backward {
  CUtensorMap own_key, own_value, key, value;
  AttentionSizes sizes;
  AttentionStatistics statistics;
  BlockOrder order;
  __nv_bfloat16* d_key;    // d_k or d_q
  __nv_bfloat16* d_value;  // d_v, of the keys' blocks
};

struct Span {
  int row;         // the block's first
  int begin, end;  // tiles of the other rows, of each head
  std::int64_t batch, own_head, first_head;
  int heads;  // of the other rows, or 1
};

template <Owner kOwner>
__device__ Span span_of(const Backward& a) {
  constexpr bool kKeys = kOwner == Owner::kKeys;
  const AttentionSizes& sizes = a.sizes;
  const BlockPlace place = place_of(a.order, blockIdx.x);
  const std::int64_t own_heads = kKeys ? sizes.key_heads : sizes.heads;
  Span span{};
  span.row = (kKeys ? place.turn : a.order.blocks - 1 - place.turn) * kBlockRows;  // the longest way first
  span.batch = place.pair / own_heads;
  span.own_head = place.pair % own_heads;
  span.first_head = kKeys ? span.own_head * sizes.group : span.own_head / sizes.group;
  span.heads = kKeys ? static_cast<int>(sizes.group) : 1;
  const int last_row = min(span.row + kBlockRows, sizes.length) - 1;
  if constexpr (kKeys) {
    span.begin = span.row / kTileRows;
    span.end = (sizes.last != nullptr ? sizes.last[last_row] : sizes.length - 1) / kTileRows + 1;
  } else {
    span.begin = (sizes.first != nullptr ? sizes.first[span.row] : 0) / kTileRows;
    span.end = last_row / kTileRows + 1;
  }
  return span;
}

template <Owner kOwner, int kKey, int kValue>
__device__ void feed(const Backward& a, const Span& span, Shared<kOwner, kKey, kValue>& shared) {
  using All = Shared<kOwner, kKey, kValue>;
  constexpr std::uint32_t kRun = kTileRows * sizeof(float);
  const AttentionSizes& sizes = a.sizes;
  const int batch = static_cast<int>(span.batch);
  shared.own_full.arrive_expecting(sizeof(shared.own_key.bytes) + sizeof(shared.own_value.bytes));
  shared.own_key.load(a.own_key, &shared.own_full, span.row, static_cast<int>(span.own_head), batch);
  shared.own_value.load(a.own_value, &shared.own_full, span.row, static_cast<int>(span.own_head), batch);
  std::uint32_t bytes = sizeof(shared.key[0].bytes) + sizeof(shared.value[0].bytes);
  if (kOwner == Owner::kKeys) bytes += (sizes.first != nullptr ? 3 : 2) * kRun;
  Turn<All::kStages> turn;
  for (int member = 0; member < span.heads; ++member) {
    const int head = static_cast<int>(span.first_head) + member;
    const std::int64_t statistics = (span.batch * sizes.heads + head) * sizes.stored;
    for (int tile = span.begin; tile < span.end; ++tile, turn.next()) {
      hopper::Barrier* full = &shared.full[turn.stage];
      shared.empty[turn.stage].wait(turn.parity ^ 1);
      full->arrive_expecting(bytes);
      const int row = tile * kTileRows;
      shared.key[turn.stage].load(a.key, full, row, head, batch);
      shared.value[turn.stage].load(a.value, full, row, head, batch);
      if constexpr (kOwner == Owner::kKeys) {
        QueryRows& rows = shared.rows[turn.stage];
        hopper::load_bytes(rows.lse_log2, a.statistics.lse_log2 + statistics + row, kRun, full);
        hopper::load_bytes(rows.delta, a.statistics.delta + statistics + row, kRun, full);
        if (sizes.first != nullptr) hopper::load_bytes(rows.first, sizes.first + row, kRun, full);
      }
    }
  }
}

// The statistics of a thread's two rows, for the queries' blocks.
struct OwnQueries {
  float lse_log2[2], delta[2];
  int first[2];
};

// Keys' blocks: P of the products x (64 keys, 64 queries).
template <bool kMasked>
__device__ void keys_probabilities(const float (&x)[kLogits], const QueryRows& rows, bool has_first, int key,
                                   int query, float scale_log2, float (&p)[kLogits]) {
#pragma unroll
  for (int i = 0; i < kLogits; i += 4) {
    const int column = 2 * i + accumulator_column();
    const float2 lse = *reinterpret_cast<const float2*>(rows.lse_log2 + column);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float e = power_of_two(fmaf(x[i + j], scale_log2, j % 2 == 0 ? -lse.x : -lse.y));
      if constexpr (kMasked) {
        const int own = key + 8 * (j / 2), other = column + j % 2;
        if (own > query + other || (has_first && own < rows.first[other])) e = 0.0F;
      }
      p[i + j] = e;
    }
  }
}
// Keys' blocks: dS = P (dP - delta), of P as it was rounded.
[[maybe_unused]] __device__ inline void keys_logit_gradients(const std::uint32_t (&p)[kTileRows / 16][4],
                                                             const float (&d_p)[kLogits],
                                                             const QueryRows& rows,
                                                             std::uint32_t (&d_s)[kTileRows / 16][4]) {
#pragma unroll
  for (int i = 0; i < kLogits; i += 4) {
    const float2 delta = *reinterpret_cast<const float2*>(rows.delta + 2 * i + accumulator_column());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t pair = p[i / 8][i / 2 % 4 + half];
      d_s[i / 8][i / 2 % 4 + half] = pack_pair(unpack(pair, 0) * (d_p[i + 2 * half] - delta.x),
                                               unpack(pair, 1) * (d_p[i + 2 * half + 1] - delta.y));
    }
  }
}
// Queries' blocks: P of the products x (64 queries, 64 keys).
template <bool kMasked>
__device__ void queries_probabilities(const float (&x)[kLogits], const OwnQueries& own, int query, int key,
                                      float scale_log2, float (&p)[kLogits]) {
#pragma unroll
  for (int i = 0; i < kLogits; ++i) {
    const int half = i / 2 % 2;
    float e = power_of_two(fmaf(x[i], scale_log2, -own.lse_log2[half]));
    if constexpr (kMasked) {
      const int at = key + 8 * (i / 4) + accumulator_column() + i % 2;
      if (at > query + 8 * half || at < own.first[half]) e = 0.0F;
    }
    p[i] = e;
  }
}

template <int kCount>
__device__ void set_zero(float (&sum)[kCount]) {
#pragma unroll
  for (float& each : sum) each = 0.0F;
}

template <int kKey, int kValue>
__device__ void keys_gradients(const Backward& a, const Span& span,
                               Shared<Owner::kKeys, kKey, kValue>& shared, int group) {
  using All = Shared<Owner::kKeys, kKey, kValue>;
  constexpr bool kWide = kKey + kValue > 256;  // the sums leave no room for both products at a time
  const AttentionSizes& sizes = a.sizes;
  const int own_row = group * kGroupRows, group_row = span.row + own_row, key = group_row + accumulator_row();
  float d_key[kKey / 2], d_value[kValue / 2];
  set_zero(d_key);
  set_zero(d_value);
  Turn<All::kStages> turn;
  shared.own_full.wait(0);
  const int tiles = span.end - span.begin;
  for (int i = 0; i < tiles * span.heads; ++i, turn.next()) {
    const int query = (span.begin + i % tiles) * kTileRows;
    const int stage = turn.stage;
    // Accumulators of a tile are new variables, only read between products: else the compiler waits for each.
    float x[kLogits], y[kLogits], e[kLogits];
    std::uint32_t p[kTileRows / 16][4], d_s[kTileRows / 16][4];
    shared.full[stage].wait(turn.parity);
    hopper::fence_wgmma();
    dot_rows(shared.own_key, own_row, shared.key[stage], x);
    hopper::commit_wgmma();
    if constexpr (kWide) hopper::wait_wgmma<0>();
    if constexpr (!kWide) {
      dot_rows(shared.own_value, own_row, shared.value[stage], y);
      hopper::commit_wgmma();
      hopper::wait_wgmma<1>();
    }
    hopper::keep_registers(x);
    const QueryRows& rows = shared.rows[stage];
    const bool has_first = sizes.first != nullptr;
    if (query < group_row + kGroupRows - 1 || (has_first && rows.first[kTileRows - 1] > group_row)) {
      keys_probabilities<true>(x, rows, has_first, key, query, sizes.scale_log2, e);
    } else {
      keys_probabilities<false>(x, rows, has_first, key, query, sizes.scale_log2, e);
    }
    pack_left<kTileRows>(e, p);
    hopper::fence_wgmma();
    if constexpr (kWide) {
      dot_rows(shared.own_value, own_row, shared.value[stage], y);
      hopper::commit_wgmma();
    }
    add_rows<kTileRows, kValue>(p, shared.value[stage], d_value);
    hopper::commit_wgmma();
    hopper::wait_wgmma<1>();
    hopper::keep_registers(y);
    keys_logit_gradients(p, y, rows, d_s);
    hopper::fence_wgmma();
    add_rows<kTileRows, kKey>(d_s, shared.key[stage], d_key);
    hopper::commit_wgmma();
    hopper::wait_wgmma<0>();
    hopper::keep_registers(d_key);
    hopper::keep_registers(d_value);
    shared.empty[stage].arrive_as_warp();
  }
  const float scale[2] = {sizes.scale, sizes.scale}, one[2] = {1.0F, 1.0F};
  const std::int64_t token = span.batch * sizes.length;
  put_accumulators(d_key, scale, a.d_key + token * sizes.k.token + span.own_head * sizes.k.head,
                   sizes.k.token, key, sizes.length);
  put_accumulators(d_value, one, a.d_value + token * sizes.v.token + span.own_head * sizes.v.head,
                   sizes.v.token, key, sizes.length);
}

template <int kKey, int kValue>
__device__ void queries_gradients(const Backward& a, const Span& span,
                                  Shared<Owner::kQueries, kKey, kValue>& shared, int group) {
  using All = Shared<Owner::kQueries, kKey, kValue>;
  const AttentionSizes& sizes = a.sizes;
  const int own_row = group * kGroupRows, group_row = span.row + own_row,
            query = group_row + accumulator_row();
  const std::int64_t statistics = (span.batch * sizes.heads + span.own_head) * sizes.stored;
  OwnQueries own{};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    own.lse_log2[half] = a.statistics.lse_log2[statistics + query + 8 * half];
    own.delta[half] = a.statistics.delta[statistics + query + 8 * half];
    own.first[half] = sizes.first != nullptr ? sizes.first[query + 8 * half] : 0;
  }
  const int farthest = sizes.first != nullptr ? sizes.first[group_row + kGroupRows - 1] : 0;
  float d_query[kKey / 2];
  set_zero(d_query);
  Turn<All::kStages> turn;
  shared.own_full.wait(0);
  for (int tile = span.begin; tile < span.end; ++tile, turn.next()) {
    const int key = tile * kTileRows, stage = turn.stage;
    float x[kLogits], y[kLogits], e[kLogits];  // new ones, as above
    std::uint32_t d_s[kTileRows / 16][4];
    shared.full[stage].wait(turn.parity);
    hopper::fence_wgmma();
    dot_rows(shared.own_key, own_row, shared.key[stage], x);
    hopper::commit_wgmma();
    dot_rows(shared.own_value, own_row, shared.value[stage], y);
    hopper::commit_wgmma();
    hopper::wait_wgmma<1>();
    hopper::keep_registers(x);
    if (key + kTileRows - 1 > group_row || key < farthest) {
      queries_probabilities<true>(x, own, query, key, sizes.scale_log2, e);
    } else {
      queries_probabilities<false>(x, own, query, key, sizes.scale_log2, e);
    }
    hopper::wait_wgmma<0>();
    hopper::keep_registers(y);
#pragma unroll
    for (int i = 0; i < kLogits; ++i) e[i] *= y[i] - own.delta[i / 2 % 2];
    pack_left<kTileRows>(e, d_s);
    hopper::fence_wgmma();
    add_rows<kTileRows, kKey>(d_s, shared.key[stage], d_query);
    hopper::commit_wgmma();
    hopper::wait_wgmma<0>();
    hopper::keep_registers(d_query);
    shared.empty[stage].arrive_as_warp();
  }
  const float scale[2] = {sizes.scale, sizes.scale};
  put_accumulators(d_query, scale,
                   a.d_key + span.batch * sizes.length * sizes.q.token + span.own_head * sizes.q.head,
                   sizes.q.token, query, sizes.length);
}

template <Owner kOwner, int kKey, int kValue>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_backward(const __grid_constant__ Backward a) {
#if TERRACE_SM90A
  using All = Shared<kOwner, kKey, kValue>;
  extern __shared__ unsigned char raw[];
  All& shared = aligned_shared<All>(raw);
  const Span span = span_of<kOwner>(a);
  if (threadIdx.x == 0) {
    shared.own_full.init(1);
    for (int stage = 0; stage < All::kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init_for_warps(kConsumerWarps);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (warpgroup == 0) {
    hopper::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) feed(a, span, shared);
  } else {
    hopper::take_registers<kConsumerRegisters>();
    if constexpr (kOwner == Owner::kKeys) {
      keys_gradients<kKey, kValue>(a, span, shared, warpgroup - 1);
    } else {
      queries_gradients<kKey, kValue>(a, span, shared, warpgroup - 1);
    }
  }
#endif
}

template <Owner kOwner, int kKey, int kValue>
void launch_owner(OpCall& call, const Backward& a) {
  call.launch(attention_backward<kOwner, kKey, kValue>,
              Grid{.x = a.order.pairs * a.order.blocks,
                   .threads = kAttentionThreads,
                   .shared_bytes = kSharedBytes<Shared<kOwner, kKey, kValue>>},
              a);
}
template <int kKey, int kValue>
void launch_widths(OpCall& call, const Backward& keys, const Backward& queries) {
  launch_owner<Owner::kKeys, kKey, kValue>(call, keys);
  launch_owner<Owner::kQueries, kKey, kValue>(call, queries);
}

}  // namespace

bool launch_hopper(OpCall& call, const AttentionBackward& op, const AttentionSizes& s,
                   const AttentionStatistics& statistics) {
  using Launcher = void (*)(OpCall&, const Backward&, const Backward&);
  const auto widths = [&](int key, int value) { return s.key_width == key && s.value_width == value; };
  const Launcher launcher = widths(128, 128)   ? launch_widths<128, 128>
                            : widths(64, 64)   ? launch_widths<64, 64>
                            : widths(192, 128) ? launch_widths<192, 128>
                                               : nullptr;
  if (launcher == nullptr || op.q.dtype() != Dtype::kBf16) return false;
  if (!takes_pairs(op.d_q.at(), s.q) || !takes_pairs(op.d_k.at(), s.k) || !takes_pairs(op.d_v.at(), s.v))
    return false;
  if (!hopper::device_traits(call).hopper) return false;
  const HeadsView q{op.q.at(), s.q, s.heads, s.key_width}, k{op.k.at(), s.k, s.key_heads, s.key_width};
  const HeadsView v{op.v.at(), s.v, s.key_heads, s.value_width},
      d_o{op.d_o.at(), s.o, s.heads, s.value_width};
  for (const HeadsView* view : {&q, &k, &v, &d_o}) {
    if (!hopper::takes_tensor_map(tensor_view(s, *view, kTileRows))) return false;
  }
  const auto map = [&](const HeadsView& view, int rows) {
    return hopper::make_tensor_map(call, tensor_view(s, view, rows));
  };
  const Backward keys{.own_key = map(k, kBlockRows),
                      .own_value = map(v, kBlockRows),
                      .key = map(q, kTileRows),
                      .value = map(d_o, kTileRows),
                      .sizes = s,
                      .statistics = statistics,
                      .order = block_order(s, s.batch * s.key_heads, kBlockRows, s.group),
                      .d_key = static_cast<__nv_bfloat16*>(op.d_k.at()),
                      .d_value = static_cast<__nv_bfloat16*>(op.d_v.at())};
  const Backward queries{.own_key = map(q, kBlockRows),
                         .own_value = map(d_o, kBlockRows),
                         .key = map(k, kTileRows),
                         .value = map(v, kTileRows),
                         .sizes = s,
                         .statistics = statistics,
                         .order = block_order(s, s.batch * s.heads, kBlockRows, 1),
                         .d_key = static_cast<__nv_bfloat16*>(op.d_q.at()),
                         .d_value = nullptr};
  launcher(call, keys, queries);
  return true;
}

}  // namespace terrace::trainer::cuda
