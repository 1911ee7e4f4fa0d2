// Experts in a latent width, beside a shared expert:
//
//   y = W_u rmsnorm(sum_j p_j E_j(W_d x)) + shared(x)
#include <utility>

#include "examples/moe_trainer/model/experts.hpp"
#include "examples/moe_trainer/model/ffn.hpp"
#include "examples/moe_trainer/model/glu_mlp.hpp"
#include "examples/moe_trainer/model/router.hpp"

namespace terrace::trainer {

namespace {

struct LatentMoeSaved : Ffn::Saved {
  ExpertRouter::Saved router;
  Experts::Saved experts;
  Tensor combined, normed;  // (tokens, latent)
  GluMlp::Saved shared;
};

class LatentMoe final : public Ffn {
 public:
  explicit LatentMoe(const LayerScope& scope)
      : config_(scope.config),
        router_(scope),
        down_(scope.matrix("moe.down", config_.moe.latent, config_.model.hidden)),
        experts_(scope, config_.moe.latent),
        up_(scope.residual_matrix("moe.up", config_.moe.latent)),
        shared_(scope, {.prefix = "moe.shared_", .width = config_.moe.shared_width}),
        norm_(scope.norm("moe.norm", config_.moe.latent, config_.model.norm_eps)),
        down_site_(scope.site("moe.down", SiteKind::kMatmul)),
        up_site_(scope.site("moe.up", SiteKind::kMatmul)) {}

  void allocate(Memory& memory) override {
    router_.allocate(memory);
    experts_.allocate(memory);
  }
  void balance(Ops& ops, Stream stream) const override { router_.balance(ops, stream); }
  [[nodiscard]] const Tensor* router_bias() const override { return &router_.bias(); }

  Output forward(const Pass& pass, const Tensor& x) override {
    auto s = std::make_unique<LatentMoeSaved>();
    router_.forward(pass, x, s->router);
    Tensor y = shared_.forward(pass, x, s->shared);
    const Routing& routing = s->router.routing;
    experts_.forward(pass, routing, linear_site(pass, down_site_, Reads::kInBackward, x, down_), s->experts);
    s->combined = experts_.combine(pass, routing, s->experts);
    s->normed = norm_.forward(pass, s->combined);
    drop_recomputable(pass, s->combined);
    if (pass.phase != Phase::kRecompute) {
      const Tensor routed = linear_site(pass, up_site_, Reads::kInForwardOnly, s->normed, up_);
      pass.ops.run(pass.stream, Add{.count = y.count(), .a = y, .b = routed, .out = y});
    }
    drop_unless_trained(s->normed, up_);
    if (!pass.keeps_activations()) s.reset();
    return {std::move(y), std::move(s)};
  }

  [[nodiscard]] bool reads_input() const override {
    return router_.reads_input() || shared_.reads_input() || trains(down_);
  }

  Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                  const Tensor& d_y) override {
    auto& s = static_cast<LatentMoeSaved&>(*saved);
    Tensor d_x = pass.tensor(x.rows, x.width);
    shared_.backward(pass, x, s.shared, d_y, d_x);
    const Tensor d_weight = pass.floats(x.rows, config_.moe.top_k);
    const Tensor d_z =
        experts_.backward(pass, s.router.routing, s.experts, combined_gradient(pass, s, d_y), d_weight);
    linear_weight_gradient(pass, d_z, x, down_);
    linear_input_gradient(pass, d_z, down_, d_x, Accumulate::kAdd);
    router_.backward(pass, x, s.router, d_weight, d_x);
    return d_x;
  }

 private:
  Tensor combined_gradient(const Pass& pass, LatentMoeSaved& s, const Tensor& d_y) const {
    linear_weight_gradient(pass, d_y, s.normed, up_);
    drop(s.normed);
    const Tensor d_normed = pass.tensor(d_y.rows, config_.moe.latent);
    linear_input_gradient(pass, d_y, up_, d_normed);
    Tensor d_combined = pass.tensor(d_y.rows, config_.moe.latent);
    norm_.backward(pass, s.combined, d_normed, d_combined);
    drop(s.combined);
    return d_combined;
  }

  const Config& config_;
  ExpertRouter router_;
  const Parameter& down_;
  Experts experts_;
  const Parameter& up_;
  GluMlp shared_;
  Norm norm_;
  SiteId down_site_, up_site_;
};

}  // namespace

std::unique_ptr<Ffn> make_latent_moe(const LayerScope& scope) { return std::make_unique<LatentMoe>(scope); }

}  // namespace terrace::trainer
