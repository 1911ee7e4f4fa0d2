// o_t = sum_s e^(a_ts - lse_t) v_s with a = scale q k^T, bf16, on Hopper's matrix units.
//   q: (B, T, H, DK)   k: (B, T, HK, DK)   v: (B, T, HK, DV)   o: (B, T, H, DV)
//
// A block owns 128 queries of one head: two warpgroups of 64, and one that only feeds them. It walks over
// tiles of 128 keys, from the diagonal down. While the matrix units take a tile's logits and add the tile
// before to o, the other warpgroup computes exponentials. At 8192 tokens the floor is that of 4 B H T^2/2 D
// operations.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/attention_hopper.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kTileKeys = 128;
constexpr int kStages = 2;

template <int kKey, int kValue>
struct Shared {
  Tile<kBlockRows, kKey> q;
  Tile<kTileKeys, kKey> k[kStages];
  Tile<kTileKeys, kValue> v[kStages];
  hopper::Barrier q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

struct Forward {
  CUtensorMap q, k, v;
  AttentionSizes sizes;
  BlockOrder order;
  const float* sink;
  __nv_bfloat16* o;
  float* lse;
};

// A block's work: tiles [begin, end) of keys, taken from the last to the first.
struct Span {
  int query;  // the first
  int begin, end;
  std::int64_t batch, head;
};

template <int kKey, int kValue>
__device__ void feed(const Forward& a, const Span& span, Shared<kKey, kValue>& shared) {
  const int head = static_cast<int>(span.head), batch = static_cast<int>(span.batch);
  const int key_head = static_cast<int>(span.head / a.sizes.group);
  shared.q_full.arrive_expecting(sizeof(shared.q.bytes));
  shared.q.load(a.q, &shared.q_full, span.query, head, batch);
  Turn<kStages> turn;
  for (int tile = span.end - 1; tile >= span.begin; --tile, turn.next()) {
    shared.k_empty[turn.stage].wait(turn.parity ^ 1);
    shared.k_full[turn.stage].arrive_expecting(sizeof(shared.k[0].bytes));
    shared.k[turn.stage].load(a.k, &shared.k_full[turn.stage], tile * kTileKeys, key_head, batch);
    shared.v_empty[turn.stage].wait(turn.parity ^ 1);
    shared.v_full[turn.stage].arrive_expecting(sizeof(shared.v[0].bytes));
    shared.v[turn.stage].load(a.v, &shared.v_full[turn.stage], tile * kTileKeys, key_head, batch);
  }
}

// The running softmax of a thread's two rows. Logarithms are to base 2; `sum` is this thread's part of the
// row's.
struct Softmax {
  int row;       // the first of the two in its sequence; the other is row + 8
  int reach[2];  // the first key of each
  float top[2], sum[2];

  // Logits to e^(a - top), as the running maximum stands now; shrink: what earlier sums are to be scaled by.
  template <bool kMasked>
  __device__ void join(float (&s)[kTileKeys / 2], int key, float scale_log2, float (&shrink)[2]) {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int half = i / 2 % 2;
      if constexpr (kMasked) {
        const int at = key + 8 * (i / 4) + accumulator_column() + i % 2;
        if (at > row + 8 * half || at < reach[half]) s[i] = -INFINITY;
      }
      largest[half] = fmaxf(largest[half], s[i]);
    }
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffU, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffU, largest[half], 2));
      const float now = fmaxf(top[half], largest[half] * scale_log2);
      base[half] = now == -INFINITY ? 0.0F : now;
      shrink[half] = power_of_two(top[half] - base[half]);
      top[half] = now;
      sum[half] *= shrink[half];
    }
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int half = i / 2 % 2;
      s[i] = power_of_two(fmaf(s[i], scale_log2, -base[half]));
      sum[half] += s[i];
    }
  }
};

[[maybe_unused]] __device__ inline Softmax start_softmax(const Forward& a, const Span& span, int row) {
  Softmax softmax{.row = row};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    softmax.reach[half] = a.sizes.first != nullptr ? a.sizes.first[softmax.row + 8 * half] : 0;
    softmax.top[half] = a.sink != nullptr ? a.sink[span.head] * kLog2E : -INFINITY;
    softmax.sum[half] = a.sink != nullptr && threadIdx.x % 4 == 0 ? 1.0F : 0.0F;
  }
  return softmax;
}

// The rows' outputs and logarithms.
template <int kCount>
__device__ void finish(const Forward& a, const Span& span, const Softmax& softmax, const float (&o)[kCount]) {
  const AttentionSizes& sizes = a.sizes;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = softmax.sum[half];
    sum += __shfl_xor_sync(0xffffffffU, sum, 1);
    sum += __shfl_xor_sync(0xffffffffU, sum, 2);
    inverse[half] = 1.0F / sum;
    const int row = softmax.row + 8 * half;
    if (a.lse != nullptr && threadIdx.x % 4 == 0 && row < sizes.length) {
      a.lse[(span.batch * sizes.length + row) * sizes.heads + span.head] =
          (softmax.top[half] + log2f(sum)) / kLog2E;
    }
  }
  put_accumulators(o, inverse, a.o + span.batch * sizes.length * sizes.o.token + span.head * sizes.o.head,
                   sizes.o.token, softmax.row, sizes.length);
}

template <int kKey, int kValue>
__device__ void attend(const Forward& a, const Span& span, Shared<kKey, kValue>& shared, int group) {
  const AttentionSizes& sizes = a.sizes;
  const int group_row = span.query + group * kGroupRows;  // the warpgroup's first query
  Softmax softmax = start_softmax(a, span, group_row + accumulator_row());
  const int farthest = sizes.first != nullptr ? sizes.first[group_row + kGroupRows - 1] : 0;
  const auto join = [&](float(&s)[kTileKeys / 2], int key, float(&shrink)[2]) {
    if (key + kTileKeys - 1 > group_row || key < farthest) {
      softmax.join<true>(s, key, sizes.scale_log2, shrink);
    } else {
      softmax.join<false>(s, key, sizes.scale_log2, shrink);
    }
  };

  float o[kValue / 2];
#pragma unroll
  for (float& each : o) each = 0.0F;
  float s[kTileKeys / 2];
  std::uint32_t p[kTileKeys / 16][4];
  float shrink[2];
  Turn<kStages> key_turn, value_turn;

  shared.q_full.wait(0);
  shared.k_full[0].wait(0);
  hopper::fence_wgmma();
  dot_rows(shared.q, group * kGroupRows, shared.k[0], s);
  hopper::commit_wgmma();
  hopper::wait_wgmma<0>();
  hopper::keep_registers(s);
  shared.k_empty[0].arrive_as_warp();
  key_turn.next();
  join(s, (span.end - 1) * kTileKeys, shrink);
  pack_left<kTileKeys>(s, p);

  for (int tile = span.end - 2; tile >= span.begin; --tile) {
    shared.k_full[key_turn.stage].wait(key_turn.parity);
    hopper::keep_registers(s);
    hopper::keep_registers(o);
    hopper::fence_wgmma();
    dot_rows(shared.q, group * kGroupRows, shared.k[key_turn.stage], s);
    hopper::commit_wgmma();
    shared.v_full[value_turn.stage].wait(value_turn.parity);
    add_rows<kTileKeys, kValue>(p, shared.v[value_turn.stage], o);
    hopper::commit_wgmma();
    hopper::wait_wgmma<1>();
    hopper::keep_registers(s);
    shared.k_empty[key_turn.stage].arrive_as_warp();
    key_turn.next();
    join(s, tile * kTileKeys, shrink);
    hopper::wait_wgmma<0>();
    hopper::keep_registers(o);
    shared.v_empty[value_turn.stage].arrive_as_warp();
    value_turn.next();
#pragma unroll
    for (int i = 0; i < kValue / 2; ++i) o[i] *= shrink[i / 2 % 2];
    pack_left<kTileKeys>(s, p);
  }
  shared.v_full[value_turn.stage].wait(value_turn.parity);
  hopper::keep_registers(o);
  hopper::fence_wgmma();
  add_rows<kTileKeys, kValue>(p, shared.v[value_turn.stage], o);
  hopper::commit_wgmma();
  hopper::wait_wgmma<0>();
  hopper::keep_registers(o);

  finish(a, span, softmax, o);
}

template <int kKey, int kValue>
__global__ void __launch_bounds__(kAttentionThreads, 1) attention_forward(const __grid_constant__ Forward a) {
#if TERRACE_SM90A
  extern __shared__ unsigned char raw[];
  auto& shared = aligned_shared<Shared<kKey, kValue>>(raw);
  const AttentionSizes& sizes = a.sizes;
  const BlockPlace place = place_of(a.order, blockIdx.x);
  Span span{};
  span.query = (a.order.blocks - 1 - place.turn) * kBlockRows;
  span.batch = place.pair / sizes.heads;
  span.head = place.pair % sizes.heads;
  span.begin = sizes.first != nullptr ? sizes.first[span.query] / kTileKeys : 0;
  span.end = (min(span.query + kBlockRows, sizes.length) + kTileKeys - 1) / kTileKeys;
  if (threadIdx.x == 0) {
    shared.q_full.init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.k_full[stage].init(1);
      shared.v_full[stage].init(1);
      shared.k_empty[stage].init_for_warps(kConsumerWarps);
      shared.v_empty[stage].init_for_warps(kConsumerWarps);
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
    attend(a, span, shared, warpgroup - 1);
  }
#endif
}

template <int kKey, int kValue>
void launch_widths(OpCall& call, const Forward& a) {
  call.launch(attention_forward<kKey, kValue>,
              Grid{.x = a.order.pairs * a.order.blocks,
                   .threads = kAttentionThreads,
                   .shared_bytes = kSharedBytes<Shared<kKey, kValue>>},
              a);
}

}  // namespace

bool launch_hopper(OpCall& call, const Attention& op, const AttentionSizes& s) {
  using Launcher = void (*)(OpCall&, const Forward&);
  const auto widths = [&](int key, int value) { return s.key_width == key && s.value_width == value; };
  const Launcher launcher = widths(128, 128)   ? launch_widths<128, 128>
                            : widths(64, 64)   ? launch_widths<64, 64>
                            : widths(192, 128) ? launch_widths<192, 128>
                                               : nullptr;
  // A negative scale would make the largest product the smallest logit.
  if (launcher == nullptr || op.q.dtype() != Dtype::kBf16 || !(s.scale > 0)) return false;
  if (!takes_pairs(op.o.at(), s.o) || !hopper::device_traits(call).hopper) return false;
  const auto q = tensor_view(s, {op.q.at(), s.q, s.heads, s.key_width}, kBlockRows);
  const auto k = tensor_view(s, {op.k.at(), s.k, s.key_heads, s.key_width}, kTileKeys);
  const auto v = tensor_view(s, {op.v.at(), s.v, s.key_heads, s.value_width}, kTileKeys);
  for (const auto* view : {&q, &k, &v}) {
    if (!hopper::takes_tensor_map(*view)) return false;
  }
  launcher(call, Forward{.q = hopper::make_tensor_map(call, q),
                         .k = hopper::make_tensor_map(call, k),
                         .v = hopper::make_tensor_map(call, v),
                         .sizes = s,
                         .order = block_order(s, s.batch * s.heads, kBlockRows, 1),
                         .sink = op.sink,
                         .o = static_cast<__nv_bfloat16*>(op.o.at()),
                         .lse = op.lse});
  return true;
}

}  // namespace terrace::trainer::cuda
