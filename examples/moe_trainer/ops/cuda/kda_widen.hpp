// bf16 arrays for kernels that take fp32: every array of the operator is widened into scratch, the kernels
// run, and the results are rounded to nearest into the operator's own arrays.
#pragma once

#include <utility>
#include <vector>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

struct WidenedResult {
  Out narrow;
  const float* wide;
  std::int64_t count;
};
// An fp32 array of the same numbers: the array itself where it is fp32 already.
[[nodiscard]] In widened(OpCall& call, In array, std::int64_t count);
// An fp32 array to write in its place; noted in `results` where it is not the array itself.
[[nodiscard]] Out widened(OpCall& call, Out array, std::int64_t count, std::vector<WidenedResult>& results);
void narrow(OpCall& call, const WidenedResult& result);

// run(call, op) with every activation in fp32.
template <typename Op>
void run_widened(OpCall& call, Op op, void (*run)(OpCall&, const Op&)) {
  std::vector<WidenedResult> results;
  visit_arrays(op, [&](auto& array, std::int64_t count) {
    if constexpr (std::is_same_v<std::remove_reference_t<decltype(array)>, Out>) {
      array = widened(call, array, count, results);
    } else {
      array = widened(call, array, count);
    }
  });
  run(call, op);
  for (const WidenedResult& result : results) narrow(call, result);
}

}  // namespace terrace::trainer::cuda
