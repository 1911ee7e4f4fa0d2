// The launchers, one an operator, each beside its kernels in the file of its name. They enqueue on the call's
// stream and return.
#pragma once

#include "examples/moe_trainer/ops/cuda/op_call.hpp"
#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer::cuda {

#define TERRACE_DECLARE_LAUNCHER(Op) void launch(OpCall& call, const Op& op);
TERRACE_TRAINER_OPS(TERRACE_DECLARE_LAUNCHER)
#undef TERRACE_DECLARE_LAUNCHER
void launch_grouped_forward(OpCall& call, const GroupedMatmul& op);
void launch_grouped_input_gradient(OpCall& call, const GroupedMatmul& op);

}  // namespace terrace::trainer::cuda
