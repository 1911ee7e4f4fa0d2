#include "examples/moe_trainer/model/router.hpp"

#include <cmath>
#include <utility>

#include "examples/moe_trainer/model/expert_walk.hpp"

namespace terrace::trainer {

ExpertRouter::ExpertRouter(const LayerScope& scope)
    : config_(scope.config),
      group_(scope.parameters),
      layer_(scope.layer),
      weight_(declare_weight(scope)),
      site_(scope.site("moe.router", SiteKind::kMatmul)) {}

Parameter& ExpertRouter::declare_weight(const LayerScope& scope) {
  Parameter weight =
      matrix(scope.parameter("moe.router"), scope.config.moe.experts, scope.config.model.hidden);
  weight.precision = Precision::kFp32;
  return scope.parameters.declare(std::move(weight));
}

void ExpertRouter::allocate(Memory& memory) {
  bias_ = memory.zeros(1, config_.moe.experts, Pool::kWeights);
  counts_ = memory.zeros(config_.train.micro_batches, config_.moe.experts, Pool::kWeights);
}

void ExpertRouter::forward(const Pass& pass, const Tensor& x, Saved& saved) {
  saved.logits =
      site_output(pass, site_, Reads::kInBackward, SiteShape{x.rows, config_.moe.experts, Dtype::kF32},
                  [&](const Tensor& logits) { float_linear(pass, x, weight_, logits); });
  const SaveKey key = save_key(pass, layer_, SaveSlot::kRouting);
  saved.routing = routing_over(decide_once(pass, key, routing_bytes(), [&](const BlockRef& block) {
    choose(pass, saved.logits, routing_over(block));
  }));
  drop_recomputable(pass, saved.logits);
}

void ExpertRouter::choose(const Pass& pass, const Tensor& logits, const Routing& routing) const {
  pass.ops.run(pass.stream, Router{.shape = shape(),
                                   .logits = logits.f32(),
                                   .bias = bias_.f32(),
                                   .expert = routing.expert,
                                   .weight = routing.weight});
  std::int32_t* const counts =
      counts_.as<std::int32_t>() + static_cast<std::int64_t>(pass.micro_batch) * counts_.width;
  pass.ops.run(pass.stream, Permute{.tokens = config_.tokens(),
                                    .experts = config_.moe.experts,
                                    .top_k = config_.moe.top_k,
                                    .expert = routing.expert,
                                    .offsets = routing.offsets,
                                    .row = routing.row,
                                    .source = routing.source,
                                    .capacity = slots_kept(),
                                    .weight = routing.weight,
                                    .counts = counts});
  if (group_.expert_store != nullptr) group_.expert_store->routed(group_, expert_walk(pass), counts);
  // The step's last choice is made: from here on the bias is the next step's.
  const bool last = pass.micro_batch + 1 == static_cast<std::uint32_t>(config_.train.micro_batches);
  const bool moves = last && pass.phase == Phase::kForward && config_.lora.rank == 0;
  if (config_.moe.balance != Balance::kQuantile || !moves) return;
  pass.ops.run(pass.stream, QuantileBias{.tokens = config_.tokens(),
                                         .experts = config_.moe.experts,
                                         .top_k = config_.moe.top_k,
                                         .score = config_.moe.scoring,
                                         .logits = logits.f32(),
                                         .bias = bias_.f32()});
}

void ExpertRouter::backward(const Pass& pass, const Tensor& x, const Saved& saved, const Tensor& d_weight,
                            const Tensor& d_x) const {
  const Tensor d_logits = pass.floats(x.rows, config_.moe.experts);
  pass.ops.run(pass.stream, RouterBackward{.shape = shape(),
                                           .logits = saved.logits.f32(),
                                           .expert = saved.routing.expert,
                                           .d_weight = d_weight.f32(),
                                           .d_logits = d_logits.f32()});
  if (config_.moe.sequence_loss_weight > 0) {
    const auto sequences = static_cast<double>(config_.train.batch * config_.train.micro_batches);
    pass.ops.run(pass.stream,
                 SequenceLoss{.tokens = config_.tokens(),
                              .experts = config_.moe.experts,
                              .top_k = config_.moe.top_k,
                              .length = config_.train.length,
                              .packing = {},
                              .alpha = static_cast<float>(config_.moe.sequence_loss_weight / sequences),
                              .score = config_.moe.scoring,
                              .logits = saved.logits.f32(),
                              .expert = saved.routing.expert,
                              .loss = nullptr,
                              .d_logits = d_logits.f32()});
  }
  float_linear_backward(pass, d_logits, x, weight_, d_x);
}

void ExpertRouter::balance(Ops& ops, Stream stream) const {
  if (config_.moe.balance != Balance::kSign || config_.lora.rank > 0) return;  // adapters leave it
  // Each micro-batch counts for its share: together they move the bias no further than one would.
  const double rate = config_.moe.balance_rate / static_cast<double>(config_.train.micro_batches);
  for (std::int64_t i = 0; i < config_.train.micro_batches; ++i) {
    ops.run(stream, BalanceBias{.experts = config_.moe.experts,
                                .gamma = static_cast<float>(rate),
                                .offsets = nullptr,
                                .bias = bias_.f32(),
                                .counts = counts_.as<const std::int32_t>() + i * counts_.width});
  }
}

Routing ExpertRouter::routing_over(BlockRef block) const {
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

Bytes ExpertRouter::routing_bytes() const {
  return Bytes(static_cast<std::uint64_t>(4 * rows() + config_.moe.experts + 1) * sizeof(std::int32_t));
}

std::int64_t ExpertRouter::slots_kept() const {
  if (config_.moe.capacity == 0) return 0;
  const double even = static_cast<double>(rows()) / static_cast<double>(config_.moe.experts);
  return static_cast<std::int64_t>(std::ceil(config_.moe.capacity * even));
}

RouterShape ExpertRouter::shape() const {
  return {.tokens = config_.tokens(),
          .experts = config_.moe.experts,
          .top_k = config_.moe.top_k,
          .groups = config_.moe.groups,
          .top_groups = config_.moe.top_groups,
          .scaling = static_cast<float>(config_.moe.scaling),
          .score = config_.moe.scoring,
          .renormalise = config_.moe.renormalise};
}

}  // namespace terrace::trainer
