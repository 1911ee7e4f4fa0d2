// Gated units, one an expert, over the rows that a routing sends to each: E_e(z) = W2_e glu(W1g_e z, W1u_e
// z). With moe.compute = "fp8" the products with the weights and their input gradients are of 8-bit numbers;
// weight gradients and adapters are not.
#pragma once

#include "examples/moe_trainer/model/glu.hpp"
#include "examples/moe_trainer/model/quantised.hpp"
#include "examples/moe_trainer/model/router.hpp"

namespace terrace::trainer {

// A stack of matrices, and its 8-bit copies where products are of those.
struct ExpertMatrix {
  const Parameter& base;
  QuantisedWeights quantised = {};
};

class Experts {
 public:
  struct Saved {
    Tensor gathered;  // z, a row for each expert of each token; a shape alone where fc1 is frozen
    Tensor fc1, fc2;  // fc1 holds the gate's half (rows, expert_width), then the other
  };
  // `width` of z and of the output.
  Experts(const LayerScope& scope, std::int64_t width);
  // Once, before the first pass.
  void allocate(Memory& memory);

  // Fills saved.fc2, the experts' outputs; z (tokens, width) goes.
  void forward(const Pass& pass, const Routing& routing, Tensor z, Saved& saved);
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
  const ParameterGroup& group_;
  std::int64_t width_;
  ExpertMatrix fc1_gate_, fc1_up_, fc2_;
  SiteId fc1_site_, fc2_site_;
};

}  // namespace terrace::trainer
