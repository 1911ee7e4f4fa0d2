// The grouped products of Hopper, in bf16. Each says whether it took the call: false where the device, the
// type or the alignment is another (n and k are multiples of 8, arrays lie at multiples of 16 bytes), and
// then nothing was enqueued.
#pragma once

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

[[nodiscard]] bool grouped_forward_on_hopper(OpCall& call, const GroupedMatmul& op);
[[nodiscard]] bool grouped_input_gradient_on_hopper(OpCall& call, const GroupedMatmul& op);
[[nodiscard]] bool grouped_weights_on_hopper(OpCall& call, const GroupedWeightGradient& op);
[[nodiscard]] bool grouped_glu_on_hopper(OpCall& call, const GroupedGlu& op);

}  // namespace terrace::trainer::cuda
