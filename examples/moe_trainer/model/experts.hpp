// Gated units, one an expert, over the rows that a routing sends to each: E_e(z) = W2_e glu(W1g_e z, W1u_e
// z).
#pragma once

#include "examples/moe_trainer/model/glu.hpp"
#include "examples/moe_trainer/model/router.hpp"

namespace terrace::trainer {

class Experts {
 public:
  struct Saved {
    Tensor gathered;  // z, a row for each expert of each token
    Tensor fc1, fc2;  // fc1 holds the gate's half (rows, expert_width), then the other
  };
  // `width` of z and of the output.
  Experts(const LayerScope& scope, std::int64_t width);

  // Fills saved.fc2, the experts' outputs; z (tokens, width) goes.
  void forward(const Pass& pass, const Routing& routing, Tensor z, Saved& saved) const;
  // sum over a token's experts of weight * output, (tokens, width). Last reader of fc2 in forward.
  [[nodiscard]] Tensor combine(const Pass& pass, const Routing& routing, Saved& saved) const;
  // Fills d_weight (tokens, top_k) of fp32. Returns d_z.
  [[nodiscard]] Tensor backward(const Pass& pass, const Routing& routing, Saved& saved,
                                const Tensor& d_combined, const Tensor& d_weight) const;

 private:
  [[nodiscard]] Tensor rows_backward(const Pass& pass, const Routing& routing, Saved& saved,
                                     Tensor d_fc2) const;
  [[nodiscard]] std::int64_t rows() const { return config_.tokens() * config_.moe.top_k; }

  const Config& config_;
  std::int64_t width_;
  const Parameter& fc1_gate_;
  const Parameter& fc1_up_;
  const Parameter& fc2_;
  SiteId fc1_site_, fc2_site_;
};

}  // namespace terrace::trainer
