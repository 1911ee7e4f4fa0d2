// Grouped-query attention: q = rotary(norm(W_q x)), k = rotary(norm(W_k x)) head by head, v = W_v x,
// y = W_o attention(q, k, v).
#include "examples/moe_trainer/model/attention_site.hpp"
#include "examples/moe_trainer/model/mixer.hpp"

namespace terrace::trainer {

namespace {

// q or k: projected, normed, rotated.
struct Rotated {
  const Parameter& weight;
  Norm norm;
  std::int64_t heads;
  SiteId site;
};

struct GqaSaved : Mixer::Saved {
  Tensor q_in, k_in;  // before the norms
  Tensor q, k, v;
  Attended attended;
};

class GqaMixer final : public Mixer {
 public:
  explicit GqaMixer(const LayerScope& scope)
      : config_(scope.config),
        q_(rotated(scope, "gqa.q", config_.gqa.heads)),
        k_(rotated(scope, "gqa.k", config_.gqa.key_heads)),
        v_(scope.matrix("gqa.v", config_.gqa.key_heads * config_.gqa.head_width, config_.model.hidden)),
        out_(scope.residual_matrix("gqa.out", inner())),
        v_site_(scope.site("gqa.v", SiteKind::kMatmul)),
        attention_site_(scope.site("gqa.attention", SiteKind::kAttention)),
        out_site_(scope.site("gqa.out", SiteKind::kMatmul)) {}

  Output forward(const Pass& pass, const Tensor& x) override {
    auto s = std::make_unique<GqaSaved>();
    s->q = project(pass, q_, x, s->q_in);
    s->k = project(pass, k_, x, s->k_in);
    s->v = linear_site(pass, v_site_, Reads::kInBackward, x, v_);
    attend(pass, *s);
    drop_recomputable(pass, s->q, s->k, s->v);
    Tensor y = linear_site(pass, out_site_, Reads::kInBackward, s->attended.o, out_);
    if (!pass.keeps_activations()) s.reset();
    return {std::move(y), std::move(s)};
  }

  [[nodiscard]] bool reads_input() const override { return trains(q_.weight, k_.weight, v_); }

  Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                  const Tensor& d_y) override {
    auto& s = static_cast<GqaSaved&>(*saved);
    linear_weight_gradient(pass, d_y, s.attended.o, out_);
    Tensor d_attended = pass.tensor(x.rows, inner());
    linear_input_gradient(pass, d_y, out_, d_attended);
    Tensor d_q = pass.tensor(x.rows, s.q.width);
    Tensor d_k = pass.tensor(x.rows, s.k.width);
    const Tensor d_v = pass.tensor(x.rows, s.v.width);
    pass.ops.run(pass.stream, AttentionBackward{.shape = shape(),
                                                .q = s.q,
                                                .k = s.k,
                                                .v = s.v,
                                                .sink = nullptr,
                                                .o = s.attended.o,
                                                .lse = s.attended.lse.f32(),
                                                .d_o = d_attended,
                                                .d_q = d_q,
                                                .d_k = d_k,
                                                .d_v = d_v});
    drop(d_attended, s.attended.o, s.attended.lse, s.q, s.k, s.v);
    Tensor d_x = pass.tensor(x.rows, x.width);
    project_backward(pass, q_, x, s.q_in, d_q, d_x, Accumulate::kOverwrite);
    project_backward(pass, k_, x, s.k_in, d_k, d_x, Accumulate::kAdd);
    linear_weight_gradient(pass, d_v, x, v_);
    linear_input_gradient(pass, d_v, v_, d_x, Accumulate::kAdd);
    return d_x;
  }

 private:
  Rotated rotated(const LayerScope& scope, const std::string& name, std::int64_t heads) const {
    const std::int64_t width = config_.gqa.head_width;
    return {scope.matrix(name, heads * width, config_.model.hidden),
            scope.norm(name + "_norm", width, config_.model.norm_eps), heads,
            scope.site(name, SiteKind::kMatmul)};
  }

  Tensor project(const Pass& pass, const Rotated& p, const Tensor& x, Tensor& before) const {
    before = linear_site(pass, p.site, Reads::kInBackward, x, p.weight);
    const Tensor y = p.norm.forward(pass, before.reshaped(x.rows * p.heads, config_.gqa.head_width))
                         .reshaped(x.rows, before.width);
    drop_recomputable(pass, before);
    turn(pass, y, p.heads, RotaryDirection::kForward);
    return y;
  }

  // d_y and `before` go; d_x gets the projection's share.
  void project_backward(const Pass& pass, const Rotated& p, const Tensor& x, Tensor& before, Tensor& d_y,
                        const Tensor& d_x, Accumulate into) const {
    turn(pass, d_y, p.heads, RotaryDirection::kInverse);
    const std::int64_t rows = x.rows * p.heads;
    const std::int64_t width = config_.gqa.head_width;
    const Tensor d_before = pass.tensor(x.rows, before.width);
    p.norm.backward(pass, before.reshaped(rows, width), d_y.reshaped(rows, width),
                    d_before.reshaped(rows, width));
    drop(before, d_y);
    linear_weight_gradient(pass, d_before, x, p.weight);
    linear_input_gradient(pass, d_before, p.weight, d_x, into);
  }

  void turn(const Pass& pass, const Tensor& x, std::int64_t heads, RotaryDirection way) const {
    pass.ops.run(pass.stream, Rotary{.batch = config_.train.batch,
                                     .length = config_.train.length,
                                     .heads = heads,
                                     .width = config_.gqa.head_width,
                                     .rotary_width = config_.gqa.head_width,
                                     .layout = RotaryLayout::kHalf,
                                     .direction = way,
                                     .theta = config_.gqa.rope_theta,
                                     .x = x,
                                     .y = x});
  }

  void attend(const Pass& pass, GqaSaved& s) const {
    const AttentionSite at{attention_site_, s.q.rows, inner(), config_.gqa.heads};
    s.attended = attention_output(pass, at, [&](const Tensor& o, const Tensor& lse) {
      pass.ops.run(
          pass.stream,
          Attention{
              .shape = shape(), .q = s.q, .k = s.k, .v = s.v, .sink = nullptr, .o = o, .lse = lse.f32()});
    });
  }

  [[nodiscard]] std::int64_t inner() const { return config_.gqa.heads * config_.gqa.head_width; }
  [[nodiscard]] AttentionShape shape() const {
    return {.batch = config_.train.batch,
            .length = config_.train.length,
            .heads = config_.gqa.heads,
            .key_heads = config_.gqa.key_heads,
            .key_width = config_.gqa.head_width,
            .value_width = config_.gqa.head_width};
  }

  const Config& config_;
  Rotated q_, k_;
  const Parameter& v_;
  const Parameter& out_;
  SiteId v_site_, attention_site_, out_site_;
};

}  // namespace

std::unique_ptr<Mixer> make_gqa_mixer(const LayerScope& scope) { return std::make_unique<GqaMixer>(scope); }

}  // namespace terrace::trainer
