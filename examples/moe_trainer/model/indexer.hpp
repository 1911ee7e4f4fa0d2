// Chooses the tokens that sparse attention looks at.
//
//   q = rotary(W_q source)   k = rotary(layernorm(W_k x))   w = W_w x      rotation where it is asked for
//
// Its inputs are detached: it learns from its own loss, where that has a weight, and nothing of that loss
// reaches the model.
#pragma once

#include <string>

#include "examples/moe_trainer/model/decision.hpp"
#include "examples/moe_trainer/model/scope.hpp"

namespace terrace::trainer {

class Indexer {
 public:
  struct Options {
    std::string prefix;  // of its parameters and sites: "dsa."
    std::int64_t source_width = 0, heads = 0, width = 0;
    double norm_eps = 1e-6;
    std::int64_t rope_width = 0;  // the first numbers of each head; 0: nothing is rotated
    double rope_theta = 0;
  };
  struct Saved {
    Tensor q, k_in, k, w;
    BlockRef selected;
    [[nodiscard]] const std::int32_t* list() const {
      return reinterpret_cast<const std::int32_t*>(selected->address);
    }
  };
  struct Gradients {
    Tensor q, k, w;  // empty where the indexer does not learn
  };
  Indexer(const LayerScope& scope, const Options& options);

  // `shape` is that of the attention, the indexer's part filled in by describe().
  void describe(DsaShape& shape) const;
  void forward(const Pass& pass, const Tensor& x, const Tensor& source, const DsaShape& shape,
               Saved& saved) const;
  static void fill(DsaInputs& in, const Saved& saved);
  [[nodiscard]] Gradients gradients(const Pass& pass, std::int64_t tokens) const;
  void backward(const Pass& pass, const Tensor& x, const Tensor& source, const Saved& saved,
                const Gradients& d) const;

  // The indexer's loss in the mean over a step's tokens; 0: it does not learn.
  [[nodiscard]] float loss_weight() const;

 private:
  struct Projection {
    const Parameter& weight;
    SiteId site;
  };
  [[nodiscard]] Projection projection(const LayerScope& scope, const char* name, std::int64_t out,
                                      std::int64_t in) const;
  [[nodiscard]] Tensor rotated(const Pass& pass, Tensor x, std::int64_t heads, RotaryDirection way) const;

  const Config& config_;
  Options options_;
  int layer_;
  Projection q_, k_, w_;
  const Parameter& norm_;
  const Parameter& bias_;
};

}  // namespace terrace::trainer
