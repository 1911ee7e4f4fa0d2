#include "examples/moe_trainer/model/layer.hpp"

#include <utility>

#include "examples/moe_trainer/model/decision.hpp"

namespace terrace::trainer {

namespace {

std::unique_ptr<Mixer> make_mixer(const LayerScope& scope) {
  switch (scope.config.kind(scope.layer).mixer) {
    case MixerKind::kKda:
      return make_kda_mixer(scope);
    case MixerKind::kDsa:
      return make_dsa_mixer(scope);
    case MixerKind::kMla:
      return make_mla_mixer(scope);
    case MixerKind::kGqa:
      break;
  }
  return make_gqa_mixer(scope);
}

std::unique_ptr<Ffn> make_ffn(const LayerScope& scope) {
  switch (scope.config.kind(scope.layer).ffn) {
    case FfnKind::kLatentMoe:
      return make_latent_moe(scope);
    case FfnKind::kMoe:
      return make_moe(scope);
    case FfnKind::kDense:
      break;
  }
  return make_dense(scope);
}

}  // namespace

Layer::Layer(const LayerScope& scope)
    : config_(scope.config),
      layer_(scope.layer),
      mixer_norm_(scope.norm("mixer_norm", config_.model.hidden, config_.model.norm_eps)),
      ffn_norm_(scope.norm("moe_norm", config_.model.hidden, config_.model.norm_eps)),
      mixer_mix_(ResidualMix::declare(scope.parameters, config_, scope.parameter("mixer_mix."))),
      ffn_mix_(ResidualMix::declare(scope.parameters, config_, scope.parameter("moe_mix."))),
      mixer_(make_mixer(scope)),
      ffn_(make_ffn(scope)) {}

bool Layer::begins_block() const { return mixer_mix_ && layer_ % config_.model.residual_block == 0; }

void Layer::forward(const Pass& pass, ResidualStream& stream, Saved& saved) {
  if (begins_block()) stream.parts.push_back(std::exchange(stream.sum, Tensor{}));
  saved.parts = stream.parts;
  if (pass.recompute == Recompute::kFull && stream.sum) {
    require(pass.session.save(save_key(pass, layer_, SaveSlot::kLayerInput), stream.sum.block));
  }
  stream.sum = run(pass, stream.sum, saved);
}

void Layer::recompute(const Pass& pass, Saved& saved) {
  Tensor sum;
  if (!begins_block()) {
    const SaveKey key = save_key(pass, layer_, SaveSlot::kLayerInput);
    sum = Tensor::over(require(pass.session.load(key)), config_.tokens(), config_.model.hidden, pass.compute);
  }
  (void)run(pass.in(Phase::kRecompute), sum, saved);
}

// The sum after the layer; in a recompute pass, where backward does not read it, an empty tensor.
Tensor Layer::run(const Pass& pass, const Tensor& sum, Saved& saved) {
  saved.x = mixer_mix_ ? mixer_mix_->forward(pass, saved.parts, sum) : sum;
  saved.x_normed = mixer_norm_.forward(pass, saved.x);
  Mixer::Output mixed = mixer_->forward(pass, saved.x_normed);
  saved.mixer = std::move(mixed.saved);
  if (!mixer_->reads_input()) saved.x_normed = saved.x_normed.shape_alone();
  drop_recomputable(pass, saved.x, saved.x_normed);
  Tensor middle = mixed.y;
  if (sum) {
    middle = pass.tensor(sum.rows, sum.width);
    pass.ops.run(pass.stream, Add{.count = middle.count(), .a = sum, .b = mixed.y, .out = middle});
  }
  drop(mixed.y);
  saved.h = ffn_mix_ ? ffn_mix_->forward(pass, saved.parts, middle) : middle;
  saved.h_normed = ffn_norm_.forward(pass, saved.h);
  Ffn::Output fed = ffn_->forward(pass, saved.h_normed);
  saved.ffn = std::move(fed.saved);
  if (!ffn_->reads_input()) saved.h_normed = saved.h_normed.shape_alone();
  Tensor y = std::move(fed.y);
  if (y) pass.ops.run(pass.stream, Add{.count = y.count(), .a = middle, .b = y, .out = y});
  if (pass.keeps_activations()) {
    saved.sum = sum;
    saved.middle_sum = std::move(middle);
  } else {
    std::vector<Tensor> parts = std::move(saved.parts);
    saved = Saved{};
    saved.parts = std::move(parts);
  }
  return y;
}

void Layer::backward(const Pass& pass, Saved saved, ResidualStream& d) {
  Tensor d_h_normed = ffn_->backward(pass, saved.h_normed, std::move(saved.ffn), d.sum);
  if (ffn_mix_) {
    const Tensor d_h = pass.tensor(d.sum.rows, d.sum.width);
    ffn_norm_.backward(pass, saved.h, d_h_normed, d_h);
    ffn_mix_->backward(pass, saved.parts, saved.middle_sum, d_h, d);
  } else {
    ffn_norm_.backward(pass, saved.h, d_h_normed, d.sum, Accumulate::kAdd);  // both paths add up in place
  }
  drop(saved.h, saved.h_normed, saved.middle_sum, d_h_normed);
  const Tensor d_x_normed = mixer_->backward(pass, saved.x_normed, std::move(saved.mixer), d.sum);
  if (!mixer_mix_) {
    mixer_norm_.backward(pass, saved.x, d_x_normed, d.sum, Accumulate::kAdd);
    return;
  }
  const Tensor d_x = pass.tensor(d.sum.rows, d.sum.width);
  mixer_norm_.backward(pass, saved.x, d_x_normed, d_x);
  if (begins_block()) drop(d.sum);  // the block's sum began here
  mixer_mix_->backward(pass, saved.parts, saved.sum, d_x, d);
  if (!begins_block()) return;
  d.sum = std::move(d.parts.back());  // it was the running sum of the layer before
  d.parts.pop_back();
}

}  // namespace terrace::trainer
