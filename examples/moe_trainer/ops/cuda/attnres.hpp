// Attention residuals on Hopper: bf16 sources come by bulk copies through a ring in shared memory, each is
// read from device memory once, and a row of all sources is held in registers between its logits and its mix.
//
// Both return false, having done nothing, where the shape, the types, the addresses or the device do not
// allow it; attnres.cu then runs the general kernels.
#pragma once

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

[[nodiscard]] bool launch_attnres_ring(OpCall& call, const AttnRes& op);
// partial gets (*slices, width) parts of the gradient of w * q; it lives as long as the call.
struct AttnResParts {
  float* partial = nullptr;
  std::int64_t slices = 0;
};
[[nodiscard]] bool launch_attnres_ring(OpCall& call, const AttnResBackward& op, AttnResParts* parts);

}  // namespace terrace::trainer::cuda
