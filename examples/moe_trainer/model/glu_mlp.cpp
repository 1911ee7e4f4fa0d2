#include "examples/moe_trainer/model/glu_mlp.hpp"

namespace terrace::trainer {

GluMlp::GluMlp(const LayerScope& scope, const Options& options)
    : activation_(scope.config.model.activation),
      width_(options.width),
      gate_(scope.matrix(options.prefix + "fc1_gate", width_, scope.config.model.hidden)),
      up_(scope.matrix(options.prefix + "fc1_up", width_, scope.config.model.hidden)),
      down_(scope.residual_matrix(options.prefix + "fc2", width_)),
      fc1_site_(scope.site(options.prefix + "fc1", SiteKind::kMatmul)),
      fc2_site_(scope.site(options.prefix + "fc2", SiteKind::kMatmul)) {}

Tensor GluMlp::forward(const Pass& pass, const Tensor& x, Saved& saved) const {
  saved.fc1 = site_output(pass, fc1_site_, Reads::kInBackward, 2 * x.rows, width_, [&](const Tensor& both) {
    linear(pass, x, gate_, gate_half(both));
    linear(pass, x, up_, up_half(both));
  });
  if (pass.phase == Phase::kRecompute) return {};
  const Tensor act = glu(pass, activation_, saved.fc1);
  drop_recomputable(pass, saved.fc1);
  return linear_site(pass, fc2_site_, Reads::kInForwardOnly, act, down_);
}

void GluMlp::backward(const Pass& pass, const Tensor& x, Saved& saved, const Tensor& d_y,
                      const Tensor& d_x) const {
  Tensor act = pass.tensor(x.rows, width_);  // its gradient, until glu_backward
  linear_input_gradient(pass, d_y, down_, act);
  const Tensor d_fc1 = glu_backward(pass, activation_, saved.fc1, act);
  linear_weight_gradient(pass, d_y, act, down_);
  drop(act);
  const Tensor d_gate = gate_half(d_fc1);
  const Tensor d_up = up_half(d_fc1);
  linear_weight_gradient(pass, d_gate, x, gate_);
  linear_weight_gradient(pass, d_up, x, up_);
  linear_input_gradient(pass, d_gate, gate_, d_x);
  linear_input_gradient(pass, d_up, up_, d_x, Accumulate::kAdd);
}

}  // namespace terrace::trainer
