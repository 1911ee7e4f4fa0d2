// Lists of all causal positions, a turn of tokens at a time, where an operator is given none; and lists
// turned round, from keys to slots.
#include "examples/moe_trainer/ops/cuda/dsa_backward_hopper.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/packing.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kWordKeys = 32;

struct CausalLists {
  std::int64_t length, slots;
  DsaTurn turn;
  Packing packing;
  std::int32_t* out;  // (turn, slots)
};

// A thread a slot.
__global__ void causal_lists(const CausalLists a) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.turn.count * a.slots) return;
  const std::int64_t t = (a.turn.first + i / a.slots) % a.length;
  const std::int64_t position = sequence_start(a.packing, t) + i % a.slots;
  a.out[i] = position <= t ? static_cast<std::int32_t>(position) : -1;
}

// A thread a word: which of its keys the token chose, and how many keys it chose before them.
__global__ void mark_keys(const KeyBlocks a, std::int64_t first_key, std::int64_t words) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.turn.count * words) return;
  const std::int64_t token = a.turn.first + i / words;
  // The word's first key as a position of the token's batch row, and the end.
  const std::int64_t position = first_key + i % words * kWordKeys - token / a.sizes.length * a.sizes.length;
  const std::int64_t end = position + kWordKeys;
  const std::int32_t* positions = a.selected + token * a.sizes.slots;
  const int slots = static_cast<int>(a.sizes.slots);
  KeyWord word{};
  if (end > 0 && position < a.sizes.length) {
    word.before = slot_of(positions, slots, static_cast<std::int32_t>(position > 0 ? position : 0));
    for (int slot = word.before; slot < slots; ++slot) {
      const std::int32_t at = __ldg(positions + slot);
      if (at < 0 || at >= end) break;
      word.bits |= 1U << static_cast<unsigned>(at - position);
    }
  }
  a.words[i] = word;
}

}  // namespace

DsaLists::DsaLists(OpCall& call, const DsaShape& shape, const DsaSizes& sizes, const std::int32_t* selected,
                   std::int64_t per_turn)
    : sizes_(sizes), packing_(shape.packing), selected_(selected) {
  if (selected != nullptr) return;
  call.require(sizes.slots == sizes.length, "without lists top_k is at least the length");
  made_ = call.scratch<std::int32_t>(per_turn * sizes.slots);
}

const std::int32_t* DsaLists::of(OpCall& call, const DsaTurn& turn) const {
  if (selected_ != nullptr) return selected_;
  call.launch(
      causal_lists, grid_for(turn.count * sizes_.slots),
      CausalLists{
          .length = sizes_.length, .slots = sizes_.slots, .turn = turn, .packing = packing_, .out = made_});
  return made_ - turn.first * sizes_.slots;
}

void launch_mark_keys(OpCall& call, const KeyBlocks& a) {
  call.launch(mark_keys, grid_for(a.turn.count * a.token_words), a, first_key_of(a.sizes, a.turn),
              a.token_words);
}

void launch(OpCall& call, const MapKeys& op) {
  const DsaSizes sizes = dsa_sizes(call, op.shape);
  for (std::int64_t row = 0; row < sizes.batch; ++row) {
    KeyBlocks a{};
    a.sizes = sizes;
    a.turn = {row * sizes.length, sizes.length};
    a.selected = op.selected;
    a.token_words = key_map_words(sizes.length);
    a.words = op.words + row * sizes.length * a.token_words;
    launch_mark_keys(call, a);
  }
}

}  // namespace terrace::trainer::cuda
