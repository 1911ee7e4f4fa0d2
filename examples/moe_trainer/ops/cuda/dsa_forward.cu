// a = scale Q_t K[S_t]^T;  lse = log(sum e^a + e^sink);  y = (e^(a - lse) V[S_t]) sigmoid(gate)
//   q: (B, T, H, DK)   k: (B, T, DK)   v: (B, T, DV)   gate, y: (B, T, H, DV)   S_t: (B, T, slots)
// One block a token and head.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/dsa.hpp"
#include "examples/moe_trainer/ops/cuda/dsa_attention.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

struct Forward {
  DsaAttention attention;
  const float* v;
  const float* gate;
  DsaTurn turn;
  float* p;  // (turn.count, H, slots)
  float* y;
};

__global__ void __launch_bounds__(kDsaThreads) dsa_forward(Forward a) {
  const DsaSizes& sizes = a.attention.sizes;
  const std::int64_t token = a.turn.first + blockIdx.x / sizes.heads;
  const std::int64_t head = blockIdx.x % sizes.heads;
  const DsaChosen chosen = dsa_chosen(sizes, a.attention.selected, token);
  float* p = a.p + std::int64_t{blockIdx.x} * sizes.slots;
  (void)dsa_probabilities(a.attention, chosen, token, head, p);
  const std::int64_t row = (token * sizes.heads + head) * sizes.value_width;
  for (std::int64_t c = threadIdx.x; c < sizes.value_width; c += kDsaThreads) {
    const float o = dsa_weighted(sizes, chosen, p, a.v, sizes.value_width, c);
    a.y[row + c] = a.gate == nullptr ? o : o * sigmoid(a.gate[row + c]);
  }
}

}  // namespace

void launch(OpCall& call, const Dsa& op) {
  const DsaSizes sizes = dsa_sizes(call, op.shape);
  const std::int64_t tokens = sizes.batch * sizes.length;
  const std::int64_t per_turn = dsa_tokens_per_turn(sizes, sizes.heads * sizes.slots);
  auto* p = call.scratch<float>(per_turn * sizes.heads * sizes.slots);
  const DsaAttention attention{
      .sizes = sizes, .q = op.in.q, .k = op.in.k, .sink = op.in.sink, .selected = op.selected};
  for (std::int64_t first = 0; first < tokens; first += per_turn) {
    const DsaTurn turn{first, std::min(per_turn, tokens - first)};
    call.launch(
        dsa_forward, Grid{.x = turn.count * sizes.heads, .threads = kDsaThreads},
        Forward{.attention = attention, .v = op.in.v, .gate = op.in.gate, .turn = turn, .p = p, .y = op.y});
  }
}

}  // namespace terrace::trainer::cuda
