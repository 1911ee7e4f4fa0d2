#include "examples/moe_trainer/model/model.hpp"

#include <utility>

namespace terrace::trainer {

namespace {
constexpr double kEmbeddingDeviation = 0.5;
}

Model::Model(Session& session, const Config& config) : config_(config) {
  const auto group = [&](std::string name) -> ParameterGroup& {
    return *groups_.emplace_back(std::make_unique<ParameterGroup>(std::move(name)));
  };
  const std::int64_t hidden = config.model.hidden;
  embedding_ = &group("embedding")
                    .declare({.name = "embedding",
                              .shape = {kVocabulary, hidden},
                              .init = Init::normal(kEmbeddingDeviation)});
  for (int layer = 0; layer < config.model.layers; ++layer) {
    ParameterGroup& parameters = group("layer." + std::to_string(layer));
    layers_.push_back(std::make_unique<Layer>(LayerScope{session, parameters, config, layer}));
  }
  ParameterGroup& last = group("head");
  norm_ = {.weight = &last.declare(vector_of("final_norm", {hidden}, 1)),
           .eps = static_cast<float>(config.model.norm_eps)};
  // Small logits: the first loss is that of a guess, ln 256.
  head_ = &last.declare({.name = "head",
                         .shape = {kVocabulary, hidden},
                         .init = Init::normal(1.0 / static_cast<double>(hidden))});
}

void Model::allocate(Session& session, Memory& memory, std::uint64_t seed) {
  for (const auto& group : groups_) group->allocate(session, memory, seed);
  for (const auto& layer : layers_) layer->allocate(memory);
}

Tensor Model::embed(const Pass& pass, const MicroBatch& batch) const {
  Tensor x = pass.memory.tensor(config_.tokens(), config_.model.hidden);
  pass.ops.run(pass.stream, Embedding{.tokens = x.rows,
                                      .width = x.width,
                                      .vocabulary = kVocabulary,
                                      .ids = batch.ids,
                                      .table = embedding_->value,
                                      .out = x.data});
  return x;
}

// The loss and its gradient in one go; returns the gradient of x, which goes.
Tensor Model::head(const Pass& pass, const MicroBatch& batch, Tensor x, float* loss_sum) const {
  Tensor normed = norm_.forward(pass, x);
  const Tensor d_normed = pass.memory.tensor(x.rows, x.width);
  pass.ops.run(pass.stream,
               LinearCrossEntropy{.tokens = x.rows,
                                  .width = x.width,
                                  .vocabulary = kVocabulary,
                                  .hidden = normed.data,
                                  .weight = head_->value,
                                  .labels = batch.labels,
                                  .gradient_scale = 1.0F / static_cast<float>(config_.tokens_per_step()),
                                  .loss_sum = loss_sum,
                                  .d_hidden = d_normed.data,
                                  .d_weight = head_->gradient});
  drop(normed);
  Tensor d_x = pass.memory.tensor(x.rows, x.width);
  norm_.backward(pass, x, d_normed, d_x);
  return d_x;
}

void Model::train(const Pass& pass, const MicroBatch& batch, float* loss_sum) {
  Tensor x = embed(pass, batch);
  std::vector<Layer::Saved> saved(layers_.size());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    pass.session.enter_forward(static_cast<int>(i), pass.micro_batch);
    x = layers_[i]->forward(pass, x, saved[i]);
  }
  pass.session.enter_head(pass.micro_batch);
  Tensor d = head(pass, batch, std::exchange(x, Tensor{}), loss_sum);
  for (std::size_t i = layers_.size(); i-- > 0;) {
    pass.session.enter_backward(static_cast<int>(i), pass.micro_batch);
    if (pass.recompute == Recompute::kFull) layers_[i]->recompute(pass, saved[i]);
    d = layers_[i]->backward(pass.in(Phase::kBackward), std::move(saved[i]), std::move(d));
  }
  pass.ops.run(pass.stream, EmbeddingBackward{.tokens = d.rows,
                                              .width = d.width,
                                              .vocabulary = kVocabulary,
                                              .ids = batch.ids,
                                              .d_out = d.data,
                                              .d_table = embedding_->gradient});
}

void Model::balance(Ops& ops, Stream stream) const {
  for (const auto& layer : layers_) layer->moe().balance(ops, stream);
}

std::int64_t Model::parameter_count() const {
  std::int64_t count = 0;
  for (const auto& group : groups_) {
    for (const Parameter& parameter : group->parameters()) count += parameter.count();
  }
  return count;
}

}  // namespace terrace::trainer
