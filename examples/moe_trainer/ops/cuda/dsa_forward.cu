// a = scale Q_t K[S_t]^T;  lse = log(sum e^a + e^sink);  y = (e^(a - lse) V[S_t]) sigmoid(gate)
//   q: (B, T, H, DK)   k: (B, T, DK)   v: (B, T, DV)   gate, y: (B, T, H, DV)   S_t: (B, T, slots)
// The general form: one block a token and head. dsa_forward_hopper.cu has the fast one.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/dsa.hpp"
#include "examples/moe_trainer/ops/cuda/dsa_attention.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

template <typename T>
struct Forward {
  DsaAttention<T> attention;
  DsaRows<T> v;
  const T* gate;
  DsaTurn turn;
  float* p;  // (turn.count, H, slots)
  T* y;
  float* lse;
  T* o;
};

template <typename T>
__global__ void __launch_bounds__(kDsaThreads) dsa_forward(Forward<T> a) {
  const DsaSizes& sizes = a.attention.sizes;
  const std::int64_t token = a.turn.first + blockIdx.x / sizes.heads;
  const std::int64_t head = blockIdx.x % sizes.heads;
  const DsaChosen chosen = dsa_chosen(sizes, a.attention.selected, token);
  float* p = a.p + std::int64_t{blockIdx.x} * sizes.slots;
  const DsaNormalised result = dsa_probabilities(a.attention, chosen, token, head, p);
  if (a.lse != nullptr && threadIdx.x == 0) a.lse[token * sizes.heads + head] = result.lse;
  const std::int64_t row = (token * sizes.heads + head) * sizes.value_width;
  for (std::int64_t c = threadIdx.x; c < sizes.value_width; c += kDsaThreads) {
    const float o = dsa_weighted(sizes, chosen, p, a.v, c);
    if (a.o != nullptr) store_float(a.o + row + c, o);
    store_float(a.y + row + c, a.gate == nullptr ? o : o * sigmoid(load_float(a.gate + row + c)));
  }
}

template <typename T>
void launch_general(OpCall& call, const Dsa& op, const DsaSizes& sizes) {
  const std::int64_t tokens = sizes.tokens();
  const std::int64_t per_turn = dsa_tokens_per_turn(sizes, sizes.heads * sizes.slots);
  auto* p = call.scratch<float>(per_turn * sizes.heads * sizes.slots);
  DsaAttention<T> attention{.sizes = sizes,
                            .q = op.in.q.as<T>(),
                            .k = dsa_key_rows<T>(sizes, op.in),
                            .sink = op.in.sink,
                            .selected = nullptr};
  const DsaLists lists(call, op.shape, sizes, op.selected, per_turn);
  for (std::int64_t first = 0; first < tokens; first += per_turn) {
    const DsaTurn turn{first, std::min(per_turn, tokens - first)};
    attention.selected = lists.of(call, turn);
    call.launch(dsa_forward<T>, Grid{.x = turn.count * sizes.heads, .threads = kDsaThreads},
                Forward<T>{.attention = attention,
                           .v = dsa_value_rows<T>(sizes, op.in),
                           .gate = op.in.gate.as<T>(),
                           .turn = turn,
                           .p = p,
                           .y = op.y.as<T>(),
                           .lse = op.lse,
                           .o = op.attention.as<T>()});
  }
}

}  // namespace

void check_attention(const OpCall& call, const DsaShape& shape, const DsaInputs& in) {
  const Dtype type = in.q.dtype();
  call.require(
      in.k.dtype() == type && (!in.v || in.v.dtype() == type) && (!in.gate || in.gate.dtype() == type),
      "q, k, v and gate are of one type");
  call.require(in.v || shape.value_width <= shape.key_width, "the value is a part of the key row");
}

bool attention_fits_hopper(OpCall& call, const DsaShape& shape, const DsaInputs& in) {
  const bool form = in.v ? shape.key_width == 128 && shape.value_width == 128
                         : shape.key_width == 576 && shape.value_width == 512;
  return in.q.dtype() == Dtype::kBf16 && form && shape.heads >= 1 && shape.heads <= 64 && fits_pieces(in.q) &&
         fits_pieces(in.k) && fits_pieces(in.v) && fits_pieces(in.gate) && hopper::device_traits(call).hopper;
}

void launch(OpCall& call, const Dsa& op) {
  const DsaSizes sizes = dsa_sizes(call, op.shape);
  check_attention(call, op.shape, op.in);
  call.require(op.y.dtype() == op.in.q.dtype() && (!op.attention || op.attention.dtype() == op.in.q.dtype()),
               "y and attention are of the type of q");
  if (sizes.tokens() <= 0) return;
  const bool aligned = fits_pieces(op.y) && fits_pieces(op.attention);
  if (aligned && attention_fits_hopper(call, op.shape, op.in)) return launch_hopper_forward(call, op, sizes);
  if (op.in.q.dtype() == Dtype::kF32) return launch_general<float>(call, op, sizes);
  launch_general<Bf16>(call, op, sizes);
}

}  // namespace terrace::trainer::cuda
