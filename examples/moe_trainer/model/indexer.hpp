// Chooses the tokens that sparse attention looks at, or takes the choice of an earlier layer.
//
//   q = rotary(W_q source)   k = rotary(layernorm(W_k x))   w = W_w x      rotation where it is asked for
//
// Its inputs are detached: it learns from its own loss, where that has a weight, and nothing of that loss
// reaches the model. What it learns is the attention of its own layer; layers that reuse its choice have no
// indexer and teach it nothing.
#pragma once

#include <optional>
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
    Tensor q, k_in, k, w;  // empty where another layer selects
    BlockRef selected;     // null in a warm-up: all tokens up to each
    [[nodiscard]] const std::int32_t* list() const {
      return selected == nullptr ? nullptr : reinterpret_cast<const std::int32_t*>(selected->address);
    }
  };
  struct Gradients {
    Tensor q, k, w;  // empty where the indexer does not learn, be it frozen or without a loss
  };
  Indexer(const LayerScope& scope, const Options& options);

  // `shape` is that of the attention, the indexer's part filled in by describe().
  void describe(DsaShape& shape) const;
  void forward(const Pass& pass, const Tensor& x, const Tensor& source, const DsaShape& shape,
               Saved& saved) const;
  static void fill(DsaInputs& in, const Saved& saved);
  // The choice turned round, for backward. Null where no other layer reads it, or it would take much memory.
  [[nodiscard]] BlockRef key_map(const Pass& pass, const DsaShape& shape, const Saved& saved) const;
  [[nodiscard]] Gradients gradients(const Pass& pass, std::int64_t tokens) const;
  void backward(const Pass& pass, const Tensor& x, const Tensor& source, const Saved& saved,
                const Gradients& d) const;

  // Whether backward reads the numbers of x, of source, and of what forward saved.
  [[nodiscard]] bool reads_input() const;
  [[nodiscard]] bool reads_source() const;
  void drop_unless_learning(Saved& saved) const;

  // The indexer's loss in the mean over a step's tokens; 0: it does not learn.
  [[nodiscard]] float loss_weight() const;

 private:
  struct Projection {
    const Parameter& weight;
    SiteId site;
  };
  struct Weights {
    Projection q, k, w;
    const Parameter& norm;
    const Parameter& bias;
  };
  [[nodiscard]] std::optional<Weights> declare(const LayerScope& scope) const;
  [[nodiscard]] bool selects() const { return own_.has_value(); }
  [[nodiscard]] bool learns() const { return reads_input() || reads_source(); }
  void score(const Pass& pass, const Tensor& x, const Tensor& source, Saved& saved) const;
  [[nodiscard]] BlockRef select(const Pass& pass, const DsaShape& shape, const Saved& saved) const;
  void save(const Pass& pass, const IndexLists& lists, const BlockRef& selected) const;
  [[nodiscard]] BlockRef load(const Pass& pass, const IndexLists& lists) const;
  [[nodiscard]] SaveKey key(const Pass& pass) const;
  [[nodiscard]] Tensor rotated(const Pass& pass, Tensor x, std::int64_t heads, RotaryDirection way) const;

  const Config& config_;
  Options options_;
  int layer_;
  SharedChoice choice_;
  std::optional<Weights> own_;  // of a layer that selects
};

}  // namespace terrace::trainer
