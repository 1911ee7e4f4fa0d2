#include "examples/moe_trainer/model/glu.hpp"

namespace terrace::trainer {

Tensor gate_half(const Tensor& both) { return both.row_range(0, both.rows / 2); }
Tensor up_half(const Tensor& both) { return both.row_range(both.rows / 2, both.rows / 2); }

Tensor glu(const Pass& pass, GluActivation activation, const Tensor& both) {
  Tensor y = pass.tensor(both.rows / 2, both.width);
  pass.ops.run(pass.stream, Glu{.rows = y.rows,
                                .width = y.width,
                                .activation = activation,
                                .g = gate_half(both),
                                .g_stride = y.width,
                                .u = up_half(both),
                                .u_stride = y.width,
                                .y = y});
  return y;
}

Tensor glu_backward(const Pass& pass, GluActivation activation, Tensor& both, const Tensor& d_y) {
  Tensor d_both = pass.tensor(both.rows, both.width);
  pass.ops.run(pass.stream, GluBackward{.rows = d_y.rows,
                                        .width = d_y.width,
                                        .activation = activation,
                                        .g = gate_half(both),
                                        .g_stride = d_y.width,
                                        .u = up_half(both),
                                        .u_stride = d_y.width,
                                        .d_y = d_y,
                                        .d_g = gate_half(d_both),
                                        .d_g_stride = d_y.width,
                                        .d_u = up_half(d_both),
                                        .d_u_stride = d_y.width,
                                        .y = d_y});
  drop(both);
  return d_both;
}

}  // namespace terrace::trainer
