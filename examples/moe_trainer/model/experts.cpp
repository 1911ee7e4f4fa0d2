#include "examples/moe_trainer/model/experts.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "examples/moe_trainer/expert_gradients.hpp"
#include "examples/moe_trainer/model/expert_walk.hpp"

namespace terrace::trainer {

namespace {

Parameter& expert_matrix(const LayerScope& scope, const char* name, std::int64_t out, std::int64_t in) {
  return scope.adapted(
      name, scope.parameters.declare({.name = scope.parameter(name),
                                      .shape = {scope.config.moe.experts, out, in},
                                      .init = Init::normal(1.0 / std::sqrt(static_cast<double>(in))),
                                      .holder = Holder::kExperts}));
}

// Of matrices in blocks so many are widened at a time: scratch is theirs, however many there are.
constexpr std::int64_t kWidenedTogether = 16;

// run(op) for the product with each piece of a stack, or with all of it; `op` lacks what comes from w.
template <typename Run>
void in_pieces(const Pass& pass, const Routing& routing, const Parameter& w, GroupedMatmul op,
               const Run& run) {
  const std::int64_t most = w.in_blocks() ? kWidenedTogether : w.shape[0];
  op.n = w.shape[1];
  op.k = w.shape[2];
  for (std::int64_t first = 0; first < w.shape[0]; first += most) {
    op.groups = std::min(most, w.shape[0] - first);
    const Operand numbers(pass, w, {.first = first, .count = op.groups});
    op.w = numbers;
    op.offsets = routing.offsets + first;
    run(op);
  }
}

GroupedMatmul grouped(const Tensor& a, const Tensor& c, Accumulate into) {
  return {.groups = 0,
          .rows = a.rows,
          .n = 0,
          .k = 0,
          .offsets = nullptr,
          .a = a,
          .w = nullptr,
          .c = c,
          .into = into};
}

void product(const Pass& pass, const Routing& routing, const Tensor& x, const Parameter& w, const Tensor& out,
             Accumulate into) {
  in_pieces(pass, routing, w, grouped(x, out, into),
            [&](const GroupedMatmul& op) { pass.ops.grouped_forward(pass.stream, op); });
}

Tensor narrow(const Pass& pass, const Routing& routing, const Tensor& x, const Parameter& w) {
  Tensor low = pass.tensor(x.rows, w.down->shape[1]);
  product(pass, routing, x, *w.down, low, Accumulate::kOverwrite);
  return low;
}

// What a product reads: rows, and the same in 8 bits where products are of those.
struct Rows {
  Tensor x;
  QuantisedRows q = {};

  [[nodiscard]] Rows range(std::int64_t first, std::int64_t count) const {
    return {x.row_range(first, count), q ? q.row_range(first, count) : QuantisedRows{}};
  }
};
Rows rows_for(const Pass& pass, const ExpertMatrix& w, const Tensor& x) {
  return {x, w.quantised ? quantised(pass, x) : QuantisedRows{}};
}

void grouped_forward(const Pass& pass, const Routing& routing, const Rows& rows, const ExpertMatrix& matrix,
                     const Tensor& out) {
  const Parameter& w = matrix.base;
  if (matrix.quantised) {
    matrix.quantised.forward(pass, routing.offsets, rows.q, out);
  } else {
    product(pass, routing, rows.x, w, out, Accumulate::kOverwrite);
  }
  if (w.down != nullptr) {
    product(pass, routing, narrow(pass, routing, rows.x, w), *w.up, out, Accumulate::kAdd);
  }
}

// Of one matrix, without its adapter.
void input_gradient(const Pass& pass, const Routing& routing, const Tensor& d_y, const Parameter& w,
                    const Tensor& d_x, Accumulate into) {
  in_pieces(pass, routing, w, grouped(d_y, d_x, into),
            [&](const GroupedMatmul& op) { pass.ops.grouped_input_gradient(pass.stream, op); });
}

Tensor narrow_gradient(const Pass& pass, const Routing& routing, const Tensor& d_y, const Parameter& w) {
  Tensor d_low = pass.tensor(d_y.rows, w.down->shape[1]);
  input_gradient(pass, routing, d_y, *w.up, d_low, Accumulate::kOverwrite);
  return d_low;
}

void grouped_input_gradient(const Pass& pass, const Routing& routing, const Rows& d_y,
                            const ExpertMatrix& matrix, const Tensor& d_x, Accumulate into) {
  const Parameter& w = matrix.base;
  if (matrix.quantised) {
    matrix.quantised.input_gradient(pass, routing.offsets, d_y.q, d_x, into);
  } else {
    input_gradient(pass, routing, d_y.x, w, d_x, into);
  }
  if (w.down == nullptr) return;
  input_gradient(pass, routing, narrow_gradient(pass, routing, d_y.x, w), *w.down, d_x, Accumulate::kAdd);
}

void grouped_weight_gradient(const Pass& pass, const Routing& routing, const Tensor& d_y, const Tensor& x,
                             const Parameter& w) {
  if (w.down != nullptr) {
    grouped_weight_gradient(pass, routing, d_y, narrow(pass, routing, x, w), *w.up);
    grouped_weight_gradient(pass, routing, narrow_gradient(pass, routing, d_y, w), x, *w.down);
  }
  if (w.training == Training::kNo) return;
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
      group_(scope.parameters),
      width_(width),
      fc1_gate_{expert_matrix(scope, "moe.fc1_gate", config_.moe.expert_width, width)},
      fc1_up_{expert_matrix(scope, "moe.fc1_up", config_.moe.expert_width, width)},
      fc2_{expert_matrix(scope, "moe.fc2", width, config_.moe.expert_width)},
      fc1_site_(scope.site("moe.fc1", SiteKind::kGmm)),
      fc2_site_(scope.site("moe.fc2", SiteKind::kGmm)) {}

void Experts::allocate(Memory& memory) {
  if (config_.moe.compute != ExpertCompute::kFp8) return;
  for (ExpertMatrix* each : {&fc1_gate_, &fc1_up_, &fc2_}) each->quantised.allocate(memory, each->base);
}

void Experts::forward(const Pass& pass, const Routing& routing, Tensor z, Saved& saved) {
  const ExpertUse use(group_, expert_walk(pass));
  for (ExpertMatrix* each : {&fc1_gate_, &fc1_up_, &fc2_}) {
    if (each->quantised) each->quantised.refresh(pass, each->base);
  }
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
                            const Rows gathered = rows_for(pass, fc1_gate_, saved.gathered);
                            grouped_forward(pass, routing, gathered, fc1_gate_, gate_half(both));
                            grouped_forward(pass, routing, gathered, fc1_up_, up_half(both));
                          });
  drop_unless_trained(saved.gathered, fc1_gate_.base, fc1_up_.base);
  drop_recomputable(pass, saved.gathered);
  // The activation is part of the site: only this product reads it in forward.
  saved.fc2 = site_output(pass, fc2_site_, Reads::kInBackward, rows(), width_, [&](const Tensor& out) {
    grouped_forward(pass, routing, rows_for(pass, fc2_, glu(pass, config_.model.activation, saved.fc1)), fc2_,
                    out);
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
  const ExpertUse use(group_, expert_walk(pass));
  const ExpertGradientUse gradients(group_, ExpertGradients::For::kAdding);
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
  grouped_input_gradient(pass, routing, rows_for(pass, fc2_, d_fc2), fc2_, act, Accumulate::kOverwrite);
  const Tensor d_fc1 = glu_backward(pass, config_.model.activation, saved.fc1, act);
  grouped_weight_gradient(pass, routing, d_fc2, act, fc2_.base);
  drop(act, d_fc2);
  grouped_weight_gradient(pass, routing, gate_half(d_fc1), saved.gathered, fc1_gate_.base);
  grouped_weight_gradient(pass, routing, up_half(d_fc1), saved.gathered, fc1_up_.base);
  drop(saved.gathered);
  Tensor d_gathered = pass.tensor(rows(), width_);
  const Rows both = rows_for(pass, fc1_gate_, d_fc1);
  grouped_input_gradient(pass, routing, both.range(0, rows()), fc1_gate_, d_gathered, Accumulate::kOverwrite);
  grouped_input_gradient(pass, routing, both.range(rows(), rows()), fc1_up_, d_gathered, Accumulate::kAdd);
  return d_gathered;
}

}  // namespace terrace::trainer
