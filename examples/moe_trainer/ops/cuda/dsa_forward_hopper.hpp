// The forward pass of some tokens on Hopper's matrix units: the operator itself, and the backward pass's
// recomputation.
#pragma once

#include "examples/moe_trainer/ops/cuda/dsa.hpp"

namespace terrace::trainer::cuda {

struct HopperForward {
  DsaSizes sizes;
  const Bf16* q;
  const Bf16* k;
  const Bf16* v;     // null: the start of the key row
  const Bf16* gate;  // null: none
  const float* sink;
  const std::int32_t* selected;
  std::int64_t first, count;  // tokens
  std::int64_t first_out;     // the token that the outputs begin with
  Bf16* y;                    // outputs; null: not wanted
  float* lse;
  Bf16* attention;
};
void launch_hopper_forward(OpCall& call, const HopperForward& forward);

}  // namespace terrace::trainer::cuda
