// The half of a layer that looks at one token at a time: experts, or one gated unit for all.
#pragma once

#include <memory>

#include "examples/moe_trainer/model/scope.hpp"

namespace terrace::trainer {

class Ffn {
 public:
  // What backward reads, besides the input.
  struct Saved {
    virtual ~Saved() = default;
  };
  struct Output {
    Tensor y;                      // empty in a recompute pass, where backward reads nothing of it
    std::unique_ptr<Saved> saved;  // null where the pass keeps no activations
  };
  virtual ~Ffn() = default;
  // What is neither weight nor activation; once, before the first pass.
  virtual void allocate(Memory& memory) { (void)memory; }
  // What the layer adds to its residual stream, (tokens, hidden).
  [[nodiscard]] virtual Output forward(const Pass& pass, const Tensor& x) = 0;
  // Whether backward reads the numbers of x, and not its shape alone.
  [[nodiscard]] virtual bool reads_input() const = 0;
  // Takes what forward saved and gives it back piece by piece; returns d_x.
  [[nodiscard]] virtual Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                                        const Tensor& d_y) = 0;
  // Moves the router's bias by what the step's micro-batches counted.
  virtual void balance(Ops& ops, Stream stream) const { (void)ops, (void)stream; }
  // (1, experts) of fp32; null where nothing is routed by a bias.
  [[nodiscard]] virtual const Tensor* router_bias() const { return nullptr; }
};

[[nodiscard]] std::unique_ptr<Ffn> make_latent_moe(const LayerScope& scope);
[[nodiscard]] std::unique_ptr<Ffn> make_moe(const LayerScope& scope);
[[nodiscard]] std::unique_ptr<Ffn> make_dense(const LayerScope& scope);

}  // namespace terrace::trainer
