#include "examples/moe_trainer/model/experts.hpp"

#include <cmath>
#include <utility>

namespace terrace::trainer {

namespace {

Parameter& expert_matrix(const LayerScope& scope, const char* name, std::int64_t out, std::int64_t in) {
  return scope.adapted(
      name, scope.parameters.declare({.name = scope.parameter(name),
                                      .shape = {scope.config.moe.experts, out, in},
                                      .init = Init::normal(1.0 / std::sqrt(static_cast<double>(in)))}));
}

GroupedMatmul grouped(const Routing& routing, std::int64_t rows, const Parameter& w) {
  return {.groups = w.shape[0],
          .rows = rows,
          .n = w.shape[1],
          .k = w.shape[2],
          .offsets = routing.offsets,
          .a = nullptr,
          .w = w.operand(),
          .c = nullptr};
}

void product(const Pass& pass, const Routing& routing, const Tensor& x, const Parameter& w, const Tensor& out,
             Accumulate into) {
  GroupedMatmul op = grouped(routing, x.rows, w);
  op.a = x;
  op.c = out;
  op.into = into;
  pass.ops.grouped_forward(pass.stream, op);
}

Tensor narrow(const Pass& pass, const Routing& routing, const Tensor& x, const Parameter& w) {
  Tensor low = pass.tensor(x.rows, w.down->shape[1]);
  product(pass, routing, x, *w.down, low, Accumulate::kOverwrite);
  return low;
}

void grouped_forward(const Pass& pass, const Routing& routing, const Tensor& x, const Parameter& w,
                     const Tensor& out) {
  product(pass, routing, x, w, out, Accumulate::kOverwrite);
  if (w.down != nullptr) {
    product(pass, routing, narrow(pass, routing, x, w), *w.up, out, Accumulate::kAdd);
  }
}

void grouped_input_gradient(const Pass& pass, const Routing& routing, const Tensor& d_y, const Parameter& w,
                            const Tensor& d_x, Accumulate into) {
  GroupedMatmul op = grouped(routing, d_y.rows, w);
  op.a = d_y;
  op.c = d_x;
  op.into = into;
  pass.ops.grouped_input_gradient(pass.stream, op);
  if (w.down == nullptr) return;
  const Tensor d_low = pass.tensor(d_y.rows, w.down->shape[1]);
  grouped_input_gradient(pass, routing, d_y, *w.up, d_low, Accumulate::kOverwrite);
  grouped_input_gradient(pass, routing, d_low, *w.down, d_x, Accumulate::kAdd);
}

void grouped_weight_gradient(const Pass& pass, const Routing& routing, const Tensor& d_y, const Tensor& x,
                             const Parameter& w) {
  if (w.down != nullptr) {
    grouped_weight_gradient(pass, routing, d_y, narrow(pass, routing, x, w), *w.up);
    const Tensor d_low = pass.tensor(d_y.rows, w.down->shape[1]);
    grouped_input_gradient(pass, routing, d_y, *w.up, d_low, Accumulate::kOverwrite);
    grouped_weight_gradient(pass, routing, d_low, x, *w.down);
  }
  if (w.gradient == nullptr) return;  // frozen
  pass.ops.run(pass.stream, GroupedWeightGradient{.groups = w.shape[0],
                                                  .rows = x.rows,
                                                  .n = w.shape[1],
                                                  .k = w.shape[2],
                                                  .offsets = routing.offsets,
                                                  .d_c = d_y,
                                                  .a = x,
                                                  .d_w = w.gradient,
                                                  .into = Accumulate::kAdd});
}

}  // namespace

Experts::Experts(const LayerScope& scope, std::int64_t width)
    : config_(scope.config),
      width_(width),
      fc1_gate_(expert_matrix(scope, "moe.fc1_gate", config_.moe.expert_width, width)),
      fc1_up_(expert_matrix(scope, "moe.fc1_up", config_.moe.expert_width, width)),
      fc2_(expert_matrix(scope, "moe.fc2", width, config_.moe.expert_width)),
      fc1_site_(scope.site("moe.fc1", SiteKind::kGmm)),
      fc2_site_(scope.site("moe.fc2", SiteKind::kGmm)) {}

void Experts::forward(const Pass& pass, const Routing& routing, Tensor z, Saved& saved) const {
  saved.gathered = pass.tensor(rows(), width_);
  pass.ops.run(pass.stream, GatherRows{.rows = rows(),
                                       .width = width_,
                                       .top_k = config_.moe.top_k,
                                       .source = routing.source,
                                       .x = z,
                                       .out = saved.gathered});
  drop(z);
  saved.fc1 = site_output(pass, fc1_site_, Reads::kInBackward, 2 * rows(), config_.moe.expert_width,
                          [&](const Tensor& both) {
                            grouped_forward(pass, routing, saved.gathered, fc1_gate_, gate_half(both));
                            grouped_forward(pass, routing, saved.gathered, fc1_up_, up_half(both));
                          });
  drop_recomputable(pass, saved.gathered);
  // The activation is part of the site: only this product reads it in forward.
  saved.fc2 = site_output(pass, fc2_site_, Reads::kInBackward, rows(), width_, [&](const Tensor& out) {
    grouped_forward(pass, routing, glu(pass, config_.model.activation, saved.fc1), fc2_, out);
  });
  drop_recomputable(pass, saved.fc1);
}

Tensor Experts::combine(const Pass& pass, const Routing& routing, Saved& saved) const {
  Tensor combined = pass.tensor(config_.tokens(), width_);
  pass.ops.run(pass.stream, SumRows{.tokens = combined.rows,
                                    .width = width_,
                                    .top_k = config_.moe.top_k,
                                    .row = routing.row,
                                    .weight = routing.weight,
                                    .x = saved.fc2,
                                    .out = combined});
  drop_recomputable(pass, saved.fc2);
  return combined;
}

Tensor Experts::backward(const Pass& pass, const Routing& routing, Saved& saved, const Tensor& d_combined,
                         const Tensor& d_weight) const {
  Tensor d_fc2 = pass.tensor(rows(), width_);
  pass.ops.run(pass.stream, SumRowsBackward{.tokens = d_combined.rows,
                                            .width = width_,
                                            .top_k = config_.moe.top_k,
                                            .row = routing.row,
                                            .weight = routing.weight,
                                            .x = saved.fc2,
                                            .d_out = d_combined,
                                            .d_x = d_fc2,
                                            .d_weight = d_weight.f32()});
  drop(saved.fc2);
  const Tensor d_gathered = rows_backward(pass, routing, saved, std::move(d_fc2));
  Tensor d_z = pass.tensor(d_combined.rows, width_);
  pass.ops.run(pass.stream, SumRows{.tokens = d_z.rows,
                                    .width = width_,
                                    .top_k = config_.moe.top_k,
                                    .row = routing.row,
                                    .weight = nullptr,
                                    .x = d_gathered,
                                    .out = d_z});
  return d_z;
}

// Through the gated units; returns the gradient of the gathered rows.
Tensor Experts::rows_backward(const Pass& pass, const Routing& routing, Saved& saved, Tensor d_fc2) const {
  Tensor act = pass.tensor(rows(), config_.moe.expert_width);  // its gradient, until glu_backward
  grouped_input_gradient(pass, routing, d_fc2, fc2_, act, Accumulate::kOverwrite);
  const Tensor d_fc1 = glu_backward(pass, config_.model.activation, saved.fc1, act);
  grouped_weight_gradient(pass, routing, d_fc2, act, fc2_);
  drop(act, d_fc2);
  const Tensor d_gate = gate_half(d_fc1);
  const Tensor d_up = up_half(d_fc1);
  grouped_weight_gradient(pass, routing, d_gate, saved.gathered, fc1_gate_);
  grouped_weight_gradient(pass, routing, d_up, saved.gathered, fc1_up_);
  drop(saved.gathered);
  Tensor d_gathered = pass.tensor(rows(), width_);
  grouped_input_gradient(pass, routing, d_gate, fc1_gate_, d_gathered, Accumulate::kOverwrite);
  grouped_input_gradient(pass, routing, d_up, fc1_up_, d_gathered, Accumulate::kAdd);
  return d_gathered;
}

}  // namespace terrace::trainer
