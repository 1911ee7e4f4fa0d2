// The half of a layer that looks at other tokens: KDA or DSA.
#pragma once

#include <memory>

#include "examples/moe_trainer/model/linear.hpp"

namespace terrace::trainer {

// Shared by everything a layer declares.
struct LayerScope {
  Session& session;
  ParameterGroup& parameters;
  const Config& config;
  int layer;

  [[nodiscard]] std::string parameter(const char* name) const {
    return "layer." + std::to_string(layer) + "." + name;
  }
  [[nodiscard]] SiteId site(const char* group, SiteKind kind) const {
    return declare_site(session, {.layer = layer, .group = group, .kind = kind});
  }
};

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
  // Takes what forward saved and gives it back piece by piece; returns d_x.
  [[nodiscard]] virtual Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                                        const Tensor& d_y) = 0;
};

[[nodiscard]] std::unique_ptr<Mixer> make_kda_mixer(const LayerScope& scope);
[[nodiscard]] std::unique_ptr<Mixer> make_dsa_mixer(const LayerScope& scope);

}  // namespace terrace::trainer
