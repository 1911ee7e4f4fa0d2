// Experts in a latent width, beside a shared expert:
//
//   y = W_u rmsnorm(sum_j p_j E_j(W_d x)) + W_2 glu(W_1g x, W_1u x),   E_e(z) = W2_e glu(W1g_e z, W1u_e z)
//
// p and the experts of a token come from sigmoid(W_r x), selected with a bias that no gradient reaches: it
// moves once a step towards equal counts. Every token reaches its experts: no capacity, nothing dropped.
#pragma once

#include <memory>

#include "examples/moe_trainer/model/mixer.hpp"

namespace terrace::trainer {

// Where tokens go: expert and weight (tokens, top_k), and the row map that Permute makes of it.
struct Routing {
  BlockRef block;
  std::int32_t* expert = nullptr;
  float* weight = nullptr;
  std::int32_t* offsets = nullptr;  // (experts + 1)
  std::int32_t* row = nullptr;
  std::int32_t* source = nullptr;
};

class LatentMoe {
 public:
  // What backward reads, besides the input.
  struct Saved {
    Routing routing;
    Tensor logits;
    Tensor gathered;          // W_d x, a row for each expert of each token
    Tensor fc1, fc2;          // fc1 holds the gate's half (rows, expert_width), then the other's
    Tensor combined, normed;  // (tokens, latent)
    Tensor shared_fc1;        // as fc1
  };
  explicit LatentMoe(const LayerScope& scope);
  // The router's bias and counts; once, before the first pass.
  void allocate(Memory& memory);

  // What the layer adds to its residual stream, (tokens, hidden); in a recompute pass, where backward reads
  // nothing of it, an empty tensor.
  [[nodiscard]] Tensor forward(const Pass& pass, const Tensor& x, Saved& saved);
  // Takes what forward saved and gives it back piece by piece; returns d_x.
  [[nodiscard]] Tensor backward(const Pass& pass, const Tensor& x, Saved& saved, const Tensor& d_y);
  // Moves the bias by what the step's micro-batches counted.
  void balance(Ops& ops, Stream stream) const;

  [[nodiscard]] const Tensor& router_bias() const { return bias_; }  // (1, experts)

 private:
  void route(const Pass& pass, const Tensor& x, Saved& saved);
  void choose(const Pass& pass, const Tensor& logits, const Routing& routing);
  [[nodiscard]] Tensor shared_forward(const Pass& pass, const Tensor& x, Saved& saved);
  void experts_forward(const Pass& pass, const Tensor& x, Saved& saved);
  void shared_backward(const Pass& pass, const Tensor& x, Saved& saved, const Tensor& d_y, const Tensor& d_x);
  [[nodiscard]] Tensor combine_backward(const Pass& pass, Saved& saved, const Tensor& d_y,
                                        const Tensor& d_weight) const;
  [[nodiscard]] Tensor experts_backward(const Pass& pass, Saved& saved, Tensor d_fc2) const;
  void router_backward(const Pass& pass, const Tensor& x, const Saved& saved, const Tensor& d_weight,
                       const Tensor& d_x) const;
  [[nodiscard]] Routing routing_over(BlockRef block) const;
  [[nodiscard]] Bytes routing_bytes() const;
  [[nodiscard]] RouterShape router_shape() const;
  [[nodiscard]] std::int64_t rows() const { return config_.tokens() * config_.moe.top_k; }

  const Config& config_;
  int layer_;
  const Parameter& router_;
  const Parameter& down_;
  const Parameter& fc1_gate_;
  const Parameter& fc1_up_;
  const Parameter& fc2_;
  const Parameter& up_;
  const Parameter& shared_gate_;
  const Parameter& shared_up_;
  const Parameter& shared_fc2_;
  Norm norm_;
  SiteId router_site_, down_site_, fc1_site_, fc2_site_, up_site_, shared_fc1_site_, shared_fc2_site_;
  Tensor bias_;
  Tensor counts_;  // (micro_batches, experts + 1) of int32: each micro-batch's offsets
};

}  // namespace terrace::trainer
