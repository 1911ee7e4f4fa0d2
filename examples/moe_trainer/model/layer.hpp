// One layer of the model: x += mixer(rmsnorm(x)), x += ffn(rmsnorm(x)), x the running sum; or, with attention
// residuals, both sublayers read a mix of the stream instead of the sum (residual.hpp).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "examples/moe_trainer/model/ffn.hpp"
#include "examples/moe_trainer/model/mixer.hpp"
#include "examples/moe_trainer/model/residual.hpp"

namespace terrace::trainer {

class Layer {
 public:
  // All that backward reads. Where layers are recomputed it is filled in backward, from the layer's input and
  // the decisions that the session kept.
  struct Saved {
    std::vector<Tensor> parts;  // of the stream, as this layer saw it
    Tensor sum, middle_sum;     // before the layer and between its halves; of a plain stream x and h
    Tensor x, x_normed, h, h_normed;
    std::unique_ptr<Mixer::Saved> mixer;
    std::unique_ptr<Ffn::Saved> ffn;
  };
  explicit Layer(const LayerScope& scope);
  void allocate(Memory& memory) { ffn_->allocate(memory); }

  // Moves the stream on. With recomputation, the running sum goes to the session and `saved` keeps only the
  // finished parts, which later layers read anyway.
  void forward(const Pass& pass, ResidualStream& stream, Saved& saved);
  // Fills `saved` again from what the session kept.
  void recompute(const Pass& pass, Saved& saved);
  // Takes what forward saved and moves the stream's gradients back.
  void backward(const Pass& pass, Saved saved, ResidualStream& d);

  [[nodiscard]] const Ffn& ffn() const { return *ffn_; }

 private:
  [[nodiscard]] bool begins_block() const;
  [[nodiscard]] Tensor run(const Pass& pass, const Tensor& sum, Saved& saved);

  const Config& config_;
  int layer_;
  Norm mixer_norm_, ffn_norm_;
  std::optional<ResidualMix> mixer_mix_, ffn_mix_;
  std::unique_ptr<Mixer> mixer_;
  std::unique_ptr<Ffn> ffn_;
};

}  // namespace terrace::trainer
