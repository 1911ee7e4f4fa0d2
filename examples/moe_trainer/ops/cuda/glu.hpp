// The activation over rows of which only those of some group count.
#pragma once

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

// Rows offsets[0] .. offsets[groups) of Glu alone, offsets on the device.
struct GroupRows {
  std::int64_t groups;
  const std::int32_t* offsets;
};
void launch_glu_of_groups(OpCall& call, const Glu& op, const GroupRows& of);

}  // namespace terrace::trainer::cuda
