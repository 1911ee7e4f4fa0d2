// One walk through the model: what every layer's forward and backward needs to know.
#pragma once

#include <cstdint>
#include <optional>

#include "examples/moe_trainer/config.hpp"
#include "examples/moe_trainer/memory.hpp"
#include "examples/moe_trainer/model/selections.hpp"
#include "examples/moe_trainer/ops/ops.hpp"
#include "swapcore/session.hpp"

namespace terrace::trainer {

enum class Phase : std::uint8_t {
  kForward,
  kRecompute,  // a layer's forward, run again in backward: decisions are replayed, cached outputs fetched
  kBackward,
  kWarmUp,    // a forward pass alone, in which sparse layers look at all tokens and their indexers learn that
  kEvaluate,  // a forward pass alone that leaves everything as it was
};

// Chooses the tokens for sparse attention in DsaSelect's place, where that one's rule for equal scores is not
// the wanted one.
class TokenChooser {
 public:
  virtual ~TokenChooser() = default;
  // Fills select.selected, in the form that DsaSelect gives it.
  virtual void choose(const DsaSelect& select) const = 0;
};

struct Pass {
  Session& session;
  Memory& memory;
  Ops& ops;
  Stream stream;
  Recompute recompute = Recompute::kNone;
  Dtype compute = Dtype::kF32;  // of activations, the residual stream among them
  Phase phase = Phase::kForward;
  std::uint32_t micro_batch = 0;
  const TokenChooser* chooser = nullptr;  // null: DsaSelect
  Selections* selections = nullptr;       // of this walk; the model sets it

  // Whether what is computed now stays until backward; otherwise it goes after its last reader in forward.
  [[nodiscard]] bool keeps_activations() const {
    return phase == Phase::kRecompute || (phase == Phase::kForward && recompute == Recompute::kNone);
  }
  // Whether layers choose, experts and tokens, as a model in use does.
  [[nodiscard]] bool chooses() const { return phase == Phase::kForward || phase == Phase::kEvaluate; }
  [[nodiscard]] Pass in(Phase other) const {
    Pass pass = *this;
    pass.phase = other;
    return pass;
  }
  [[nodiscard]] Pass with(Selections& of_walk) const {
    Pass pass = *this;
    pass.selections = &of_walk;
    return pass;
  }
  // Uninitialised; of the type that activations have, and of fp32 whatever they have.
  [[nodiscard]] Tensor tensor(std::int64_t rows, std::int64_t width) const {
    return memory.tensor(rows, width, Pool::kActivation, compute);
  }
  [[nodiscard]] Tensor floats(std::int64_t rows, std::int64_t width) const {
    return memory.tensor(rows, width);
  }
};

// Drops tensors that only backward would read again, where they will be recomputed.
template <typename... Tensors>
void drop_recomputable(const Pass& pass, Tensors&... tensors) {
  if (!pass.keeps_activations()) drop(tensors...);
}

}  // namespace terrace::trainer
