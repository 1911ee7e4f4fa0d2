// Experts in the model's width, with a shared one where the configuration has it:
//
//   y = sum_j p_j E_j(x) + shared(x)
#include <optional>
#include <utility>

#include "examples/moe_trainer/model/experts.hpp"
#include "examples/moe_trainer/model/ffn.hpp"
#include "examples/moe_trainer/model/glu_mlp.hpp"
#include "examples/moe_trainer/model/router.hpp"

namespace terrace::trainer {

namespace {

struct MoeSaved : Ffn::Saved {
  ExpertRouter::Saved router;
  Experts::Saved experts;
  GluMlp::Saved shared;
};

class Moe final : public Ffn {
 public:
  explicit Moe(const LayerScope& scope)
      : config_(scope.config), router_(scope), experts_(scope, config_.model.hidden) {
    if (config_.moe.shared_width > 0) {
      shared_.emplace(scope, GluMlp::Options{.prefix = "moe.shared_", .width = config_.moe.shared_width});
    }
  }

  void allocate(Memory& memory) override {
    router_.allocate(memory);
    experts_.allocate(memory);
  }
  void balance(Ops& ops, Stream stream) const override { router_.balance(ops, stream); }
  [[nodiscard]] const Tensor* router_bias() const override { return &router_.bias(); }

  Output forward(const Pass& pass, const Tensor& x) override {
    auto s = std::make_unique<MoeSaved>();
    router_.forward(pass, x, s->router);
    Tensor shared;
    if (shared_) shared = shared_->forward(pass, x, s->shared);
    experts_.forward(pass, s->router.routing, x, s->experts);
    Tensor y;
    if (pass.phase != Phase::kRecompute) {
      y = experts_.combine(pass, s->router.routing, s->experts);
      if (shared) pass.ops.run(pass.stream, Add{.count = y.count(), .a = y, .b = shared, .out = y});
    }
    if (!pass.keeps_activations()) s.reset();
    return {std::move(y), std::move(s)};
  }

  [[nodiscard]] bool reads_input() const override {
    return router_.reads_input() || (shared_ && shared_->reads_input());
  }

  Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                  const Tensor& d_y) override {
    auto& s = static_cast<MoeSaved&>(*saved);
    const Tensor d_weight = pass.floats(x.rows, config_.moe.top_k);
    Tensor d_x = experts_.backward(pass, s.router.routing, s.experts, d_y, d_weight);
    router_.backward(pass, x, s.router, d_weight, d_x);
    if (shared_) {
      const Tensor d_shared = pass.tensor(x.rows, x.width);
      shared_->backward(pass, x, s.shared, d_y, d_shared);
      pass.ops.run(pass.stream, Add{.count = d_x.count(), .a = d_x, .b = d_shared, .out = d_x});
    }
    return d_x;
  }

 private:
  const Config& config_;
  ExpertRouter router_;
  Experts experts_;
  std::optional<GluMlp> shared_;
};

}  // namespace

std::unique_ptr<Ffn> make_moe(const LayerScope& scope) { return std::make_unique<Moe>(scope); }

}  // namespace terrace::trainer
