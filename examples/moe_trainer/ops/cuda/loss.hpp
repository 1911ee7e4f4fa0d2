// LinearCrossEntropy with a limit of its own for scratch; launch() takes kLossScratchBytes. Results differ
// between limits only by the order of sums.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

void launch_loss(OpCall& call, const LinearCrossEntropy& op, std::int64_t limit_bytes);

}  // namespace terrace::trainer::cuda
