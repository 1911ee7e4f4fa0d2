#include "examples/moe_trainer/model/latent_moe.hpp"

#include <cmath>
#include <utility>

#include "examples/moe_trainer/model/decision.hpp"

namespace terrace::trainer {

namespace {

Parameter& expert_matrix(const LayerScope& scope, const char* name, std::int64_t out, std::int64_t in) {
  return scope.parameters.declare({.name = scope.parameter(name),
                                   .shape = {scope.config.moe.experts, out, in},
                                   .init = Init::normal(1.0 / std::sqrt(static_cast<double>(in)))});
}

Parameter& plain_matrix(const LayerScope& scope, const char* name, std::int64_t out, std::int64_t in) {
  return scope.parameters.declare(matrix(scope.parameter(name), out, in));
}

Parameter& last_matrix(const LayerScope& scope, const char* name, std::int64_t in) {
  return scope.parameters.declare(
      residual_matrix(scope.parameter(name), scope.config.model.hidden, in, scope.config.model.layers));
}

// Two outputs of one shape in one block, so that both are one site: the gate's half first.
Tensor half_of(const Tensor& both, int which) {
  Tensor half = both;
  half.rows = both.rows / 2;
  half.data += which * half.count();
  return half;
}

Tensor glu(const Pass& pass, const Tensor& both) {
  Tensor y = pass.memory.tensor(both.rows / 2, both.width);
  pass.ops.run(pass.stream,
               SituGlu{.count = y.count(), .g = both.data, .u = both.data + y.count(), .y = y.data});
  return y;
}

// Returns d_both, laid out as `both`, which goes. d_y makes way for y: backward makes it again, so that
// forward need not keep it nor recomputation compute it.
Tensor glu_backward(const Pass& pass, Tensor& both, const Tensor& d_y) {
  Tensor d_both = pass.memory.tensor(both.rows, both.width);
  const std::int64_t count = d_y.count();
  pass.ops.run(pass.stream, SituGluBackward{.count = count,
                                            .g = both.data,
                                            .u = both.data + count,
                                            .d_y = d_y.data,
                                            .d_g = d_both.data,
                                            .d_u = d_both.data + count,
                                            .y = d_y.data});
  drop(both);
  return d_both;
}

GroupedMatmul grouped(const Routing& routing, std::int64_t rows, const Parameter& w) {
  return {.groups = w.shape[0],
          .rows = rows,
          .n = w.shape[1],
          .k = w.shape[2],
          .offsets = routing.offsets,
          .a = nullptr,
          .w = w.value,
          .c = nullptr};
}

void grouped_forward(const Pass& pass, const Routing& routing, const Tensor& x, const Parameter& w,
                     const Tensor& out) {
  GroupedMatmul op = grouped(routing, x.rows, w);
  op.a = x.data;
  op.c = out.data;
  pass.ops.grouped_forward(pass.stream, op);
}

void grouped_weight_gradient(const Pass& pass, const Routing& routing, const Tensor& d_y, const Tensor& x,
                             const Parameter& w) {
  pass.ops.run(pass.stream, GroupedWeightGradient{.groups = w.shape[0],
                                                  .rows = x.rows,
                                                  .n = w.shape[1],
                                                  .k = w.shape[2],
                                                  .offsets = routing.offsets,
                                                  .d_c = d_y.data,
                                                  .a = x.data,
                                                  .d_w = w.gradient,
                                                  .into = Accumulate::kAdd});
}

void grouped_input_gradient(const Pass& pass, const Routing& routing, const Tensor& d_y, const Parameter& w,
                            const Tensor& d_x, Accumulate into) {
  GroupedMatmul op = grouped(routing, d_y.rows, w);
  op.a = d_y.data;
  op.c = d_x.data;
  op.into = into;
  pass.ops.grouped_input_gradient(pass.stream, op);
}

}  // namespace

LatentMoe::LatentMoe(const LayerScope& scope)
    : config_(scope.config),
      layer_(scope.layer),
      router_(plain_matrix(scope, "moe.router", config_.moe.experts, config_.model.hidden)),
      down_(plain_matrix(scope, "moe.down", config_.moe.latent, config_.model.hidden)),
      fc1_gate_(expert_matrix(scope, "moe.fc1_gate", config_.moe.expert_width, config_.moe.latent)),
      fc1_up_(expert_matrix(scope, "moe.fc1_up", config_.moe.expert_width, config_.moe.latent)),
      fc2_(expert_matrix(scope, "moe.fc2", config_.moe.latent, config_.moe.expert_width)),
      up_(last_matrix(scope, "moe.up", config_.moe.latent)),
      shared_gate_(
          plain_matrix(scope, "moe.shared_fc1_gate", config_.moe.shared_width, config_.model.hidden)),
      shared_up_(plain_matrix(scope, "moe.shared_fc1_up", config_.moe.shared_width, config_.model.hidden)),
      shared_fc2_(last_matrix(scope, "moe.shared_fc2", config_.moe.shared_width)),
      norm_{.weight =
                &scope.parameters.declare(vector_of(scope.parameter("moe.norm"), {config_.moe.latent}, 1)),
            .eps = static_cast<float>(config_.model.norm_eps)},
      router_site_(scope.site("moe.router", SiteKind::kMatmul)),
      down_site_(scope.site("moe.down", SiteKind::kMatmul)),
      fc1_site_(scope.site("moe.fc1", SiteKind::kGmm)),
      fc2_site_(scope.site("moe.fc2", SiteKind::kGmm)),
      up_site_(scope.site("moe.up", SiteKind::kMatmul)),
      shared_fc1_site_(scope.site("moe.shared_fc1", SiteKind::kMatmul)),
      shared_fc2_site_(scope.site("moe.shared_fc2", SiteKind::kMatmul)) {}

void LatentMoe::allocate(Memory& memory) {
  bias_ = memory.zeros(1, config_.moe.experts, Pool::kWeights);
  counts_ = memory.zeros(config_.train.micro_batches, config_.moe.experts + 1, Pool::kWeights);
}

Tensor LatentMoe::forward(const Pass& pass, const Tensor& x, Saved& saved) {
  route(pass, x, saved);
  Tensor y = shared_forward(pass, x, saved);
  experts_forward(pass, x, saved);
  if (pass.phase != Phase::kRecompute) {
    const Tensor routed = linear_site(pass, up_site_, Reads::kInForwardOnly, saved.normed, up_);
    pass.ops.run(pass.stream, Add{.count = y.count(), .a = y.data, .b = routed.data, .out = y.data});
  }
  drop_recomputable(pass, saved.normed);
  return y;
}

void LatentMoe::route(const Pass& pass, const Tensor& x, Saved& saved) {
  saved.logits = linear_site(pass, router_site_, Reads::kInBackward, x, router_);
  const SaveKey key = save_key(pass, layer_, SaveSlot::kRouting);
  saved.routing = routing_over(decide_once(pass, key, routing_bytes(), [&](const BlockRef& block) {
    choose(pass, saved.logits, routing_over(block));
  }));
  drop_recomputable(pass, saved.logits);
}

void LatentMoe::choose(const Pass& pass, const Tensor& logits, const Routing& routing) {
  pass.ops.run(pass.stream, Router{.shape = router_shape(),
                                   .logits = logits.data,
                                   .bias = bias_.data,
                                   .expert = routing.expert,
                                   .weight = routing.weight});
  pass.ops.run(pass.stream, Permute{.tokens = config_.tokens(),
                                    .experts = config_.moe.experts,
                                    .top_k = config_.moe.top_k,
                                    .expert = routing.expert,
                                    .offsets = routing.offsets,
                                    .row = routing.row,
                                    .source = routing.source});
  const Bytes size(static_cast<std::uint64_t>(counts_.width) * sizeof(std::int32_t));
  require(pass.session.device().copy(pass.stream, Direction::kD2D,
                                     counts_.block->address + size.count() * pass.micro_batch,
                                     reinterpret_cast<const std::byte*>(routing.offsets), size));
}

// The shared expert's output; none in a recompute pass.
Tensor LatentMoe::shared_forward(const Pass& pass, const Tensor& x, Saved& saved) {
  saved.shared_fc1 = site_output(pass, shared_fc1_site_, Reads::kInBackward, 2 * x.rows,
                                 config_.moe.shared_width, [&](const Tensor& both) {
                                   linear(pass, x, shared_gate_, half_of(both, 0));
                                   linear(pass, x, shared_up_, half_of(both, 1));
                                 });
  if (pass.phase == Phase::kRecompute) return {};
  const Tensor act = glu(pass, saved.shared_fc1);
  drop_recomputable(pass, saved.shared_fc1);
  return linear_site(pass, shared_fc2_site_, Reads::kInForwardOnly, act, shared_fc2_);
}

void LatentMoe::experts_forward(const Pass& pass, const Tensor& x, Saved& saved) {
  const Routing& routing = saved.routing;
  Tensor z = linear_site(pass, down_site_, Reads::kInBackward, x, down_);
  saved.gathered = pass.memory.tensor(rows(), config_.moe.latent);
  pass.ops.run(pass.stream, GatherRows{.rows = rows(),
                                       .width = config_.moe.latent,
                                       .top_k = config_.moe.top_k,
                                       .source = routing.source,
                                       .x = z.data,
                                       .out = saved.gathered.data});
  drop(z);
  saved.fc1 = site_output(pass, fc1_site_, Reads::kInBackward, 2 * rows(), config_.moe.expert_width,
                          [&](const Tensor& both) {
                            grouped_forward(pass, routing, saved.gathered, fc1_gate_, half_of(both, 0));
                            grouped_forward(pass, routing, saved.gathered, fc1_up_, half_of(both, 1));
                          });
  drop_recomputable(pass, saved.gathered);
  // The activation is part of the site: only this product reads it in forward.
  saved.fc2 = site_output(
      pass, fc2_site_, Reads::kInBackward, rows(), config_.moe.latent,
      [&](const Tensor& out) { grouped_forward(pass, routing, glu(pass, saved.fc1), fc2_, out); });
  drop_recomputable(pass, saved.fc1);
  saved.combined = pass.memory.tensor(x.rows, config_.moe.latent);
  pass.ops.run(pass.stream, SumRows{.tokens = x.rows,
                                    .width = config_.moe.latent,
                                    .top_k = config_.moe.top_k,
                                    .row = routing.row,
                                    .weight = routing.weight,
                                    .x = saved.fc2.data,
                                    .out = saved.combined.data});
  drop_recomputable(pass, saved.fc2);
  saved.normed = norm_.forward(pass, saved.combined);
  drop_recomputable(pass, saved.combined);
}

Tensor LatentMoe::backward(const Pass& pass, const Tensor& x, Saved& saved, const Tensor& d_y) {
  Tensor d_x = pass.memory.tensor(x.rows, x.width);
  shared_backward(pass, x, saved, d_y, d_x);
  const Tensor d_weight = pass.memory.tensor(x.rows, config_.moe.top_k);
  Tensor d_gathered = experts_backward(pass, saved, combine_backward(pass, saved, d_y, d_weight));
  const Tensor d_z = pass.memory.tensor(x.rows, config_.moe.latent);
  pass.ops.run(pass.stream, SumRows{.tokens = x.rows,
                                    .width = config_.moe.latent,
                                    .top_k = config_.moe.top_k,
                                    .row = saved.routing.row,
                                    .weight = nullptr,
                                    .x = d_gathered.data,
                                    .out = d_z.data});
  drop(d_gathered);
  linear_weight_gradient(pass, d_z, x, down_);
  linear_input_gradient(pass, d_z, down_, d_x, Accumulate::kAdd);
  router_backward(pass, x, saved, d_weight, d_x);
  saved = Saved{};
  return d_x;
}

void LatentMoe::shared_backward(const Pass& pass, const Tensor& x, Saved& saved, const Tensor& d_y,
                                const Tensor& d_x) {
  Tensor act = pass.memory.tensor(x.rows, config_.moe.shared_width);  // its gradient, until glu_backward
  linear_input_gradient(pass, d_y, shared_fc2_, act);
  const Tensor d_fc1 = glu_backward(pass, saved.shared_fc1, act);
  linear_weight_gradient(pass, d_y, act, shared_fc2_);
  drop(act);
  const Tensor d_gate = half_of(d_fc1, 0);
  const Tensor d_up = half_of(d_fc1, 1);
  linear_weight_gradient(pass, d_gate, x, shared_gate_);
  linear_weight_gradient(pass, d_up, x, shared_up_);
  linear_input_gradient(pass, d_gate, shared_gate_, d_x);
  linear_input_gradient(pass, d_up, shared_up_, d_x, Accumulate::kAdd);
}

// From the sum's output back to the experts' rows; fills d_weight (tokens, top_k). Returns d_fc2.
Tensor LatentMoe::combine_backward(const Pass& pass, Saved& saved, const Tensor& d_y,
                                   const Tensor& d_weight) const {
  linear_weight_gradient(pass, d_y, saved.normed, up_);
  drop(saved.normed);
  Tensor d_normed = pass.memory.tensor(d_y.rows, config_.moe.latent);
  linear_input_gradient(pass, d_y, up_, d_normed);
  const Tensor d_combined = pass.memory.tensor(d_y.rows, config_.moe.latent);
  norm_.backward(pass, saved.combined, d_normed, d_combined);
  drop(saved.combined, d_normed);
  Tensor d_fc2 = pass.memory.tensor(rows(), config_.moe.latent);
  pass.ops.run(pass.stream, SumRowsBackward{.tokens = d_y.rows,
                                            .width = config_.moe.latent,
                                            .top_k = config_.moe.top_k,
                                            .row = saved.routing.row,
                                            .weight = saved.routing.weight,
                                            .x = saved.fc2.data,
                                            .d_out = d_combined.data,
                                            .d_x = d_fc2.data,
                                            .d_weight = d_weight.data});
  drop(saved.fc2);
  return d_fc2;
}

// Through the experts; returns the gradient of the gathered rows.
Tensor LatentMoe::experts_backward(const Pass& pass, Saved& saved, Tensor d_fc2) const {
  const Routing& routing = saved.routing;
  Tensor act = pass.memory.tensor(rows(), config_.moe.expert_width);  // its gradient, until glu_backward
  grouped_input_gradient(pass, routing, d_fc2, fc2_, act, Accumulate::kOverwrite);
  const Tensor d_fc1 = glu_backward(pass, saved.fc1, act);
  grouped_weight_gradient(pass, routing, d_fc2, act, fc2_);
  drop(act, d_fc2);
  const Tensor d_gate = half_of(d_fc1, 0);
  const Tensor d_up = half_of(d_fc1, 1);
  grouped_weight_gradient(pass, routing, d_gate, saved.gathered, fc1_gate_);
  grouped_weight_gradient(pass, routing, d_up, saved.gathered, fc1_up_);
  drop(saved.gathered);
  Tensor d_gathered = pass.memory.tensor(rows(), config_.moe.latent);
  grouped_input_gradient(pass, routing, d_gate, fc1_gate_, d_gathered, Accumulate::kOverwrite);
  grouped_input_gradient(pass, routing, d_up, fc1_up_, d_gathered, Accumulate::kAdd);
  return d_gathered;
}

void LatentMoe::router_backward(const Pass& pass, const Tensor& x, const Saved& saved, const Tensor& d_weight,
                                const Tensor& d_x) const {
  const Tensor d_logits = pass.memory.tensor(x.rows, config_.moe.experts);
  pass.ops.run(pass.stream, RouterBackward{.shape = router_shape(),
                                           .logits = saved.logits.data,
                                           .expert = saved.routing.expert,
                                           .d_weight = d_weight.data,
                                           .d_logits = d_logits.data});
  linear_weight_gradient(pass, d_logits, x, router_);
  linear_input_gradient(pass, d_logits, router_, d_x, Accumulate::kAdd);
}

void LatentMoe::balance(Ops& ops, Stream stream) const {
  // Each micro-batch counts for its share: together they move the bias no further than one would.
  const double rate = config_.moe.balance_rate / static_cast<double>(config_.train.micro_batches);
  const auto* counts = reinterpret_cast<const std::int32_t*>(counts_.data);
  for (std::int64_t i = 0; i < config_.train.micro_batches; ++i) {
    ops.run(stream, BalanceBias{.experts = config_.moe.experts,
                                .gamma = static_cast<float>(rate),
                                .offsets = counts + i * counts_.width,
                                .bias = bias_.data});
  }
}

Routing LatentMoe::routing_over(BlockRef block) const {
  Routing routing;
  auto* next = reinterpret_cast<std::int32_t*>(block->address);
  const auto take = [&](std::int64_t count) { return std::exchange(next, next + count); };
  routing.expert = take(rows());
  routing.weight = reinterpret_cast<float*>(take(rows()));
  routing.row = take(rows());
  routing.source = take(rows());
  routing.offsets = take(config_.moe.experts + 1);
  routing.block = std::move(block);
  return routing;
}

Bytes LatentMoe::routing_bytes() const {
  return Bytes(static_cast<std::uint64_t>(4 * rows() + config_.moe.experts + 1) * sizeof(std::int32_t));
}

RouterShape LatentMoe::router_shape() const {
  return {.tokens = config_.tokens(),
          .experts = config_.moe.experts,
          .top_k = config_.moe.top_k,
          .groups = config_.moe.groups,
          .top_groups = config_.moe.top_groups,
          .scaling = static_cast<float>(config_.moe.scaling)};
}

}  // namespace terrace::trainer
