// y = a(gate) * up: the gated unit inside experts and dense layers, over both halves in one block.
#pragma once

#include "examples/moe_trainer/model/pass.hpp"

namespace terrace::trainer {

// Two outputs of one shape in one block, so that both are one site: the gate's half first, then the other.
[[nodiscard]] Tensor gate_half(const Tensor& both);
[[nodiscard]] Tensor up_half(const Tensor& both);

// (rows, width) of both (2 rows, width).
[[nodiscard]] Tensor glu(const Pass& pass, GluActivation activation, const Tensor& both);
// Returns d_both, laid out as `both`, which goes. d_y makes way for y: backward makes it again, so that
// forward need not keep it nor recomputation compute it.
[[nodiscard]] Tensor glu_backward(const Pass& pass, GluActivation activation, Tensor& both,
                                  const Tensor& d_y);

}  // namespace terrace::trainer
