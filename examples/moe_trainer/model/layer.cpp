#include "examples/moe_trainer/model/layer.hpp"

#include <utility>

#include "examples/moe_trainer/model/decision.hpp"

namespace terrace::trainer {

namespace {

Norm declare_norm(const LayerScope& scope, const char* name) {
  return {
      .weight = &scope.parameters.declare(vector_of(scope.parameter(name), {scope.config.model.hidden}, 1)),
      .eps = static_cast<float>(scope.config.model.norm_eps)};
}

}  // namespace

Layer::Layer(const LayerScope& scope)
    : config_(scope.config),
      layer_(scope.layer),
      mixer_norm_(declare_norm(scope, "mixer_norm")),
      moe_norm_(declare_norm(scope, "moe_norm")),
      mixer_(scope.config.is_dsa(scope.layer) ? make_dsa_mixer(scope) : make_kda_mixer(scope)),
      moe_(scope) {}

Tensor Layer::forward(const Pass& pass, const Tensor& x, Saved& saved) {
  if (pass.recompute == Recompute::kFull) {
    require(pass.session.save(save_key(pass, layer_, SaveSlot::kLayerInput), x.block));
  }
  return run(pass.in(Phase::kForward), x, saved);
}

void Layer::recompute(const Pass& pass, Saved& saved) {
  const SaveKey key = save_key(pass, layer_, SaveSlot::kLayerInput);
  const Tensor x = Tensor::over(require(pass.session.load(key)), config_.tokens(), config_.model.hidden);
  (void)run(pass.in(Phase::kRecompute), x, saved);
}

Tensor Layer::run(const Pass& pass, const Tensor& x, Saved& saved) {
  if (pass.keeps_activations()) saved.x = x;
  saved.x_normed = mixer_norm_.forward(pass, x);
  Mixer::Output mixed = mixer_->forward(pass, saved.x_normed);
  saved.mixer = std::move(mixed.saved);
  drop_recomputable(pass, saved.x_normed);
  Tensor h = pass.memory.tensor(x.rows, x.width);
  pass.ops.run(pass.stream, Add{.count = h.count(), .a = x.data, .b = mixed.y.data, .out = h.data});
  drop(mixed.y);
  saved.h_normed = moe_norm_.forward(pass, h);
  Tensor y = moe_.forward(pass, saved.h_normed, saved.moe);
  if (y) pass.ops.run(pass.stream, Add{.count = y.count(), .a = h.data, .b = y.data, .out = y.data});
  if (pass.keeps_activations()) {
    saved.h = std::move(h);
  } else {
    saved = Saved{};
  }
  return y;
}

Tensor Layer::backward(const Pass& pass, Saved saved, Tensor d_y) {
  Tensor d_h_normed = moe_.backward(pass, saved.h_normed, saved.moe, d_y);
  Tensor d_h = std::move(d_y);  // both residual paths add up in place
  moe_norm_.backward(pass, saved.h, d_h_normed, d_h, Accumulate::kAdd);
  drop(saved.h, saved.h_normed, d_h_normed);
  const Tensor d_x_normed = mixer_->backward(pass, saved.x_normed, std::move(saved.mixer), d_h);
  mixer_norm_.backward(pass, saved.x, d_x_normed, d_h, Accumulate::kAdd);
  return d_h;
}

}  // namespace terrace::trainer
