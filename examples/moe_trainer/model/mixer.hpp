// The half of a layer that looks at other tokens.
#pragma once

#include <memory>

#include "examples/moe_trainer/model/scope.hpp"

namespace terrace::trainer {

class Mixer {
 public:
  // What backward reads, besides the input.
  struct Saved {
    virtual ~Saved() = default;
  };
  struct Output {
    Tensor y;
    std::unique_ptr<Saved> saved;  // null where the pass keeps no activations
  };
  virtual ~Mixer() = default;
  // y (tokens, hidden) of x (tokens, hidden).
  [[nodiscard]] virtual Output forward(const Pass& pass, const Tensor& x) = 0;
  // Whether backward reads the numbers of x, and not its shape alone.
  [[nodiscard]] virtual bool reads_input() const = 0;
  // Takes what forward saved and gives it back piece by piece; returns d_x.
  [[nodiscard]] virtual Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                                        const Tensor& d_y) = 0;
};

[[nodiscard]] std::unique_ptr<Mixer> make_kda_mixer(const LayerScope& scope);
[[nodiscard]] std::unique_ptr<Mixer> make_dsa_mixer(const LayerScope& scope);
[[nodiscard]] std::unique_ptr<Mixer> make_gqa_mixer(const LayerScope& scope);
// With an indexer where the configuration has one.
[[nodiscard]] std::unique_ptr<Mixer> make_mla_mixer(const LayerScope& scope);

}  // namespace terrace::trainer
