// The grouped product of 8-bit numbers on Hopper. Says whether it took the call: false where the device is
// another, C is fp32, or the alignment is another (n a multiple of 8, k of 16, arrays at multiples of 16
// bytes), and then nothing was enqueued.
#pragma once

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

[[nodiscard]] bool grouped_fp8_on_hopper(OpCall& call, const GroupedMatmulFp8& op);

}  // namespace terrace::trainer::cuda
