// One layer of the model: h = x + mixer(rmsnorm(x)), y = h + latent_moe(rmsnorm(h)).
#pragma once

#include <memory>

#include "examples/moe_trainer/model/latent_moe.hpp"
#include "examples/moe_trainer/model/mixer.hpp"

namespace terrace::trainer {

class Layer {
 public:
  // All that backward reads. Where layers are recomputed it is filled in backward, from the layer's input and
  // the decisions that the session kept.
  struct Saved {
    Tensor x, x_normed, h, h_normed;
    std::unique_ptr<Mixer::Saved> mixer;
    LatentMoe::Saved moe;
  };
  explicit Layer(const LayerScope& scope);
  void allocate(Memory& memory) { moe_.allocate(memory); }

  // Returns y. With recomputation, x goes to the session and `saved` stays empty.
  [[nodiscard]] Tensor forward(const Pass& pass, const Tensor& x, Saved& saved);
  // Fills `saved` again from what the session kept.
  void recompute(const Pass& pass, Saved& saved);
  // Takes d_y and what forward saved; returns d_x, in d_y's place.
  [[nodiscard]] Tensor backward(const Pass& pass, Saved saved, Tensor d_y);

  [[nodiscard]] const LatentMoe& moe() const { return moe_; }

 private:
  [[nodiscard]] Tensor run(const Pass& pass, const Tensor& x, Saved& saved);

  const Config& config_;
  int layer_;
  Norm mixer_norm_, moe_norm_;
  std::unique_ptr<Mixer> mixer_;
  LatentMoe moe_;
};

}  // namespace terrace::trainer
