// One gated unit for all tokens.
#include <utility>

#include "examples/moe_trainer/model/ffn.hpp"
#include "examples/moe_trainer/model/glu_mlp.hpp"

namespace terrace::trainer {

namespace {

struct DenseSaved : Ffn::Saved {
  GluMlp::Saved mlp;
};

class Dense final : public Ffn {
 public:
  explicit Dense(const LayerScope& scope)
      : mlp_(scope, {.prefix = "dense.", .width = scope.config.model.dense_width}) {}

  Output forward(const Pass& pass, const Tensor& x) override {
    auto s = std::make_unique<DenseSaved>();
    Tensor y = mlp_.forward(pass, x, s->mlp);
    if (!pass.keeps_activations()) s.reset();
    return {std::move(y), std::move(s)};
  }

  [[nodiscard]] bool reads_input() const override { return mlp_.reads_input(); }

  Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                  const Tensor& d_y) override {
    Tensor d_x = pass.tensor(x.rows, x.width);
    mlp_.backward(pass, x, static_cast<DenseSaved&>(*saved).mlp, d_y, d_x);
    return d_x;
  }

 private:
  GluMlp mlp_;
};

}  // namespace

std::unique_ptr<Ffn> make_dense(const LayerScope& scope) { return std::make_unique<Dense>(scope); }

}  // namespace terrace::trainer
