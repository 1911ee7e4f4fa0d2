// The backward pass of sparse attention on Hopper: turns of tokens, each through
//   do = dy sigmoid(gate), dgate, delta = <do, o>     here
//   P, dA, dQ                                         dsa_token_gradients.cu
//   dK, dV: by blocks of keys                         dsa_key_blocks.cu
//       or, where tokens choose few of their keys,
//       part by part by rows of slots                 dsa_key_gradients.cu
//   the indexer, where it learns                      dsa_index_hopper.cu, else dsa_backward.cu
// What a turn keeps is bounded: at 2048 slots and the MLA form 512 tokens, 268 MB of P and dA and 78 MB of
// sums for blocks of keys, 151 MB of rows where there are turns that go by rows. Beside it there are the fp32
// sums of dK and dV, of the whole batch.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/dsa_backward_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/dsa_forward_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/dsa_hopper.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr std::int64_t kBlockBytesOfTurn = 256LL << 20;
constexpr std::int64_t kRowBytesOfPart = 160LL << 20;
constexpr int kThreads = 256;
// Up to so many keys a slot the zeros in blocks of keys cost less than rows of slots do: 0.2 ns a key and 1
// ns a slot of each token on an H200.
constexpr std::int64_t kBlockKeysPerSlot = 5;

bool goes_by_blocks(const DsaSizes& sizes, const DsaTurn& turn) {
  const std::int64_t keys = turn.first + turn.count - first_key_of(sizes, turn);
  return std::min(keys, sizes.length) <= kBlockKeysPerSlot * sizes.slots;
}

// The turn that starts with a token. Where a batch row is no shorter than a turn, none reaches into the next
// row: positions then count from where a map of keys begins.
DsaTurn turn_from(const DsaSizes& sizes, std::int64_t first, std::int64_t per_turn) {
  std::int64_t count = std::min(per_turn, sizes.tokens() - first);
  if (sizes.length >= per_turn) count = std::min(count, sizes.length - first % sizes.length);
  return {first, count};
}

struct OutputGate {
  DsaSizes sizes;
  DsaTurn turn;
  const Bf16* d_y;
  const Bf16* gate;   // null: none
  const Bf16* o;      // (turn, H, DV)
  const float* lse;   // (turn, H)
  const float* sink;  // null: its gradient is not wanted
  Bf16* d_gate;       // null: not wanted
  Bf16* d_o;          // (turn, H, DV)
  float* delta;       // (turn, H)
  float* sink_terms;  // (B T, H)
};

__device__ inline float2 pair_at(const Bf16* numbers) {
  const std::uint32_t pair = *reinterpret_cast<const std::uint32_t*>(numbers);
  return make_float2(low_half(pair), high_half(pair));
}
__device__ inline void put_pair(Bf16* numbers, std::uint32_t pair) {
  *reinterpret_cast<std::uint32_t*>(numbers) = pair;
}

// A warp a token and head.
__global__ void __launch_bounds__(kThreads) output_gate(const OutputGate a) {
  const std::int64_t in_turn = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (in_turn >= a.turn.count * a.sizes.heads) return;
  const std::int64_t row = a.turn.first * a.sizes.heads + in_turn, width = a.sizes.value_width;
  float delta = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp * 2; c < width; c += 2 * kWarp) {
    const float2 d_y = pair_at(a.d_y + row * width + c), o = pair_at(a.o + in_turn * width + c);
    float2 open = make_float2(1.0F, 1.0F);
    if (a.gate != nullptr) {
      const float2 gate = pair_at(a.gate + row * width + c);
      open = make_float2(sigmoid(gate.x), sigmoid(gate.y));
      if (a.d_gate != nullptr) {
        put_pair(a.d_gate + row * width + c,
                 as_pair(d_y.x * o.x * open.x * (1.0F - open.x), d_y.y * o.y * open.y * (1.0F - open.y)));
      }
    }
    const std::uint32_t d_o = as_pair(d_y.x * open.x, d_y.y * open.y);
    put_pair(a.d_o + in_turn * width + c, d_o);
    // Of the rounded numbers, which the products see: the gradients of a row of logits then cancel.
    delta += low_half(d_o) * o.x + high_half(d_o) * o.y;
  }
  delta = warp_sum(delta);
  if (threadIdx.x % kWarp != 0) return;
  a.delta[in_turn] = delta;
  if (a.sink != nullptr) {
    a.sink_terms[row] = -expf(a.sink[in_turn % a.sizes.heads] - a.lse[in_turn]) * delta;
  }
}

// share (turn, slots) = sum over heads of P: eight lanes a slot, eight heads each.
__global__ void __launch_bounds__(kThreads)
    sum_block_heads(const DsaSizes sizes, const DsaTurn turn, const SlotBlocks blocks,
                    const std::int32_t* selected, float* share) {
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 8;
  const bool there =
      i < turn.count * sizes.slots && selected[turn.first * sizes.slots + i] >= 0;  // else not written
  const std::int64_t token = i / sizes.slots, slot = i % sizes.slots;
  float sum = 0.0F;
  if (there) {
    float p[8];
    unpack<Bf16>(
        stream_raw(blocks.p + (token * blocks.blocks * kBlockSlots + slot) * kDsaHeads + threadIdx.x % 8 * 8),
        p);
#pragma unroll
    for (const float each : p) sum += each;
  }
#pragma unroll
  for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(kFullWarp, sum, lane);
  if (threadIdx.x % 8 == 0 && i < turn.count * sizes.slots) share[i] = sum;
}

// A turn and where the lists of all tokens would start.
struct ListedTurn : DsaTurn {
  const std::int32_t* selected;
};

// Scratch of one call.
struct Space {
  std::int64_t per_turn, per_part;
  SlotBlocks blocks;
  Bf16* d_o;
  float* delta;
  Bf16* o;         // null: the caller has it
  float* lse;      // null: the caller has it
  KeyWord* words;  // null, like the next: no turn goes by blocks of keys
  float* partial;
  Bf16* rows;  // null, like the next: none goes by rows of slots
  unsigned long long* chosen;
  float* sink_terms;
  float* d_k;
  float* d_v;
  Bf16* d_q;  // (turn, H, DK), where nobody wants it; null: the caller's
};

// Of the ways in which dK and dV are summed.
void make_key_space(OpCall& call, const DsaSizes& sizes, std::int64_t row_numbers, Space& s) {
  std::int64_t words = 0;
  std::int64_t partial = 0;
  bool by_rows = false;
  for (DsaTurn turn = turn_from(sizes, 0, s.per_turn); turn.count > 0;
       turn = turn_from(sizes, turn.first + turn.count, s.per_turn)) {
    if (!goes_by_blocks(sizes, turn)) {
      by_rows = true;
      continue;
    }
    words = std::max(words, key_words(sizes, turn));
    partial = std::max(partial, key_partial_numbers(sizes, turn));
  }
  if (words > 0) {
    s.words = call.scratch<KeyWord>(words);
    s.partial = call.scratch<float>(partial);
  }
  if (!by_rows) return;
  s.per_part = std::clamp<std::int64_t>(kRowBytesOfPart / (2 * row_numbers), 1,
                                        std::min<std::int64_t>(kPartTokens, s.per_turn));
  s.rows = call.scratch<Bf16>(s.per_part * row_numbers);
  s.chosen = call.scratch<unsigned long long>(sizes.tokens());
}

Space make_space(OpCall& call, const DsaBackward& op, const DsaSizes& sizes) {
  Space s{};
  const std::int64_t tokens = sizes.tokens(), blocks = slot_blocks(sizes.slots);
  const std::int64_t block_numbers = blocks * kDsaHeads * kBlockSlots;
  const std::int64_t row_numbers = blocks * kBlockSlots * dsa_row_width(sizes);
  s.per_turn =
      std::clamp<std::int64_t>(kBlockBytesOfTurn / (4 * block_numbers), 1, std::min(kTurnTokens, tokens));
  s.blocks = {call.scratch<Bf16>(s.per_turn * block_numbers), call.scratch<Bf16>(s.per_turn * block_numbers),
              blocks};
  const std::int64_t turn_rows = s.per_turn * sizes.heads;
  s.d_o = call.scratch<Bf16>(turn_rows * sizes.value_width);
  s.delta = call.scratch<float>(turn_rows);
  if (op.lse == nullptr || (op.d_y && !op.attention)) {
    s.o = call.scratch<Bf16>(turn_rows * sizes.value_width);
    s.lse = call.scratch<float>(turn_rows);
  }
  make_key_space(call, sizes, row_numbers, s);
  if (!op.d_y) {  // P comes from the same kernel, of an output's gradient that is zero
    s.d_q = call.scratch<Bf16>(turn_rows * sizes.key_width);
    const auto d_o_bytes = static_cast<std::size_t>(turn_rows * sizes.value_width) * sizeof(Bf16);
    call.check(cudaMemsetAsync(s.d_o, 0, d_o_bytes, call.stream()), "cudaMemsetAsync");
    call.zero(s.delta, turn_rows);
    return s;
  }
  if (op.in.sink != nullptr && op.d_sink != nullptr) s.sink_terms = call.scratch<float>(tokens * sizes.heads);
  s.d_k = call.scratch<float>(tokens * sizes.key_width);
  call.zero(s.d_k, tokens * sizes.key_width);
  if (op.in.v) {
    s.d_v = call.scratch<float>(tokens * sizes.value_width);
    call.zero(s.d_v, tokens * sizes.value_width);
  }
  return s;
}

// The map of a turn that goes by blocks of keys: a part of the caller's, or the scratch, marked here.
struct TurnWords {
  KeyWord* words;
  std::int64_t token_words;
};
TurnWords turn_words(OpCall& call, const DsaBackward& op, const DsaSizes& sizes, const Space& space,
                     const ListedTurn& turn) {
  if (!goes_by_blocks(sizes, turn)) return {};
  if (op.key_map != nullptr && (sizes.batch == 1 || sizes.length >= space.per_turn)) {
    const std::int64_t words = key_map_words(sizes.length);
    return {const_cast<KeyWord*>(op.key_map) + turn.first * words, words};
  }
  KeyBlocks a{};
  a.sizes = sizes;
  a.turn = turn;
  a.selected = turn.selected;
  a.words = space.words;
  a.token_words = key_words(sizes, turn) / turn.count;
  launch_mark_keys(call, a);
  return {a.words, a.token_words};
}

// dK and dV of a turn whose P, dA and dO are there.
void sum_keys(OpCall& call, const DsaBackward& op, const DsaSizes& sizes, const Space& space,
              const ListedTurn& turn, const TurnWords& words) {
  const auto* q = op.in.q.as<Bf16>();
  if (goes_by_blocks(sizes, turn)) {
    launch_key_blocks(call, KeyBlocks{.sizes = sizes,
                                      .turn = turn,
                                      .q = q,
                                      .d_o = space.d_o,
                                      .selected = turn.selected,
                                      .blocks = space.blocks,
                                      .words = words.words,
                                      .token_words = words.token_words,
                                      .partial = space.partial,
                                      .d_k = space.d_k,
                                      .d_v = space.d_v});
    return;
  }
  for (std::int64_t first = 0; first < turn.count; first += space.per_part) {
    launch_key_contributions(
        call, KeyContributions{.sizes = sizes,
                               .turn = turn,
                               .part = {turn.first + first, std::min(space.per_part, turn.count - first)},
                               .q = q,
                               .d_o = space.d_o,
                               .selected = turn.selected,
                               .blocks = space.blocks,
                               .rows = space.rows,
                               .chosen = space.chosen,
                               .d_k = space.d_k,
                               .d_v = space.d_v});
  }
}

// P, dA, dQ and dO of a turn.
void run_tokens(OpCall& call, const DsaBackward& op, const DsaSizes& sizes, const Space& space,
                const ListedTurn& turn) {
  const std::int64_t first_row = turn.first * sizes.heads;
  Bf16* d_q = space.d_q != nullptr ? space.d_q - first_row * sizes.key_width : op.d_q.as<Bf16>();
  const auto* q = op.in.q.as<Bf16>();
  const auto* k = op.in.k.as<Bf16>();
  const auto* v = op.in.v.as<Bf16>();
  if (space.o != nullptr) {
    launch_hopper_forward(call, HopperForward{.sizes = sizes,
                                              .q = q,
                                              .k = k,
                                              .v = v,
                                              .gate = nullptr,
                                              .sink = op.in.sink,
                                              .selected = turn.selected,
                                              .first = turn.first,
                                              .count = turn.count,
                                              .first_out = turn.first,
                                              .y = nullptr,
                                              .lse = space.lse,
                                              .attention = space.o});
  }
  const float* lse = space.o != nullptr ? space.lse : op.lse + first_row;
  const Bf16* o = space.o != nullptr ? space.o : op.attention.as<Bf16>() + first_row * sizes.value_width;
  if (op.d_y) {
    call.launch(output_gate, grid_for(turn.count * sizes.heads * kWarp, kThreads),
                OutputGate{.sizes = sizes,
                           .turn = turn,
                           .d_y = op.d_y.as<Bf16>(),
                           .gate = op.in.gate.as<Bf16>(),
                           .o = o,
                           .lse = lse,
                           .sink = space.sink_terms != nullptr ? op.in.sink : nullptr,
                           .d_gate = op.d_gate.as<Bf16>(),
                           .d_o = space.d_o,
                           .delta = space.delta,
                           .sink_terms = space.sink_terms});
  }
  launch_token_gradients(call, TokenGradients{.sizes = sizes,
                                              .turn = turn,
                                              .q = q,
                                              .k = k,
                                              .v = v,
                                              .selected = turn.selected,
                                              .lse = lse,
                                              .delta = space.delta,
                                              .d_o = space.d_o,
                                              .out = space.blocks,
                                              .d_q = d_q});
}

// The indexer's turn, in the attention's scratch.
void run_index_turn(OpCall& call, const DsaBackward& op, const DsaSizes& sizes, const Space& space,
                    const IndexLearner& indexer, const ListedTurn& turn, const TurnWords& words) {
  const auto* index_q = op.in.index_q.as<Bf16>();
  launch_index_gradients(call, IndexGradients{.sizes = sizes,
                                              .turn = turn,
                                              .q = index_q,
                                              .k = op.in.index_k.as<Bf16>(),
                                              .w = op.in.index_w.as<Bf16>(),
                                              .selected = turn.selected,
                                              .share = indexer.share(),
                                              .weight = op.index_loss_weight,
                                              .blocks = space.blocks.blocks,
                                              .d_x = space.blocks.d_logit,
                                              .d_q = op.d_index_q.as<Bf16>(),
                                              .d_w = op.d_index_w.as<Bf16>(),
                                              .losses = indexer.losses()});
  DsaSizes of_index = sizes;
  of_index.heads = sizes.index_heads;
  of_index.key_width = sizes.index_width;
  of_index.value_width = 0;
  if (goes_by_blocks(sizes, turn)) {
    launch_index_key_blocks(call, KeyBlocks{.sizes = of_index,
                                            .turn = turn,
                                            .q = index_q,
                                            .d_o = nullptr,
                                            .selected = turn.selected,
                                            .blocks = {nullptr, space.blocks.d_logit, space.blocks.blocks},
                                            .words = words.words,  // the attention's
                                            .token_words = words.token_words,
                                            .partial = space.partial,
                                            .d_k = indexer.d_index_k(),
                                            .d_v = nullptr});
    return;
  }
  for (std::int64_t first = 0; first < turn.count; first += space.per_part) {
    launch_index_key_contributions(
        call, KeyContributions{.sizes = of_index,
                               .turn = turn,
                               .part = {turn.first + first, std::min(space.per_part, turn.count - first)},
                               .q = index_q,
                               .d_o = nullptr,
                               .selected = turn.selected,
                               .blocks = {nullptr, space.blocks.d_logit, space.blocks.blocks},
                               .rows = space.rows,
                               .chosen = space.chosen,
                               .d_k = indexer.d_index_k(),
                               .d_v = nullptr});
  }
}

}  // namespace

void launch_hopper_backward(OpCall& call, const DsaBackward& op, const DsaSizes& sizes) {
  const std::int64_t tokens = sizes.tokens();
  const Space space = make_space(call, op, sizes);
  const bool fast = index_fits_hopper(call, op);
  const IndexLearner indexer(call, op, sizes, space.per_turn,
                             fast ? IndexWork::kHopper : IndexWork::kGeneral);
  const DsaLists lists(call, op.shape, sizes, op.selected, space.per_turn);
  for (DsaTurn next = turn_from(sizes, 0, space.per_turn); next.count > 0;
       next = turn_from(sizes, next.first + next.count, space.per_turn)) {
    const ListedTurn turn{next, lists.of(call, next)};
    const TurnWords words = turn_words(call, op, sizes, space, turn);
    run_tokens(call, op, sizes, space, turn);
    if (op.d_y) sum_keys(call, op, sizes, space, turn, words);
    if (indexer.share() == nullptr) continue;
    call.launch(sum_block_heads, grid_for(turn.count * sizes.slots * 8, kThreads), sizes, next, space.blocks,
                turn.selected, indexer.share());
    if (fast) {
      run_index_turn(call, op, sizes, space, indexer, turn, words);
    } else {
      indexer.run(call, turn, turn.selected);
    }
  }
  indexer.finish(call);
  if (!op.d_y) return;
  store_dsa_sums(call, space.d_k, tokens * sizes.key_width, op.d_k.as<Bf16>());
  if (op.in.v) store_dsa_sums(call, space.d_v, tokens * sizes.value_width, op.d_v.as<Bf16>());
  if (space.sink_terms != nullptr) add_dsa_sink(call, space.sink_terms, sizes, op.d_sink);
}

}  // namespace terrace::trainer::cuda
