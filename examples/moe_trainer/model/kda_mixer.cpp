// y = W_o(gated_rmsnorm(kda(silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x)), z, W_b x), W_g x)),
// z = W_up W_down x; the output gate W_g may be such a pair too. The operator norms q and k and applies the
// decay gate and beta's sigmoid.
#include <optional>
#include <utility>

#include "examples/moe_trainer/model/mixer.hpp"

namespace terrace::trainer {

namespace {

// One of q, k, v: a projection and a short convolution over time.
struct ConvolvedProjection {
  const Parameter& weight;
  const Parameter& taps;
  SiteId site;
};

struct KdaSaved : Mixer::Saved {
  Tensor q_in, k_in, v_in;  // before the convolution
  Tensor q, k, v;
  Tensor gate_low, gate, beta;
  Tensor o, out_gate_low, out_gate, normed;
};

class KdaMixer : public Mixer {
 public:
  explicit KdaMixer(const LayerScope& scope)
      : config_(scope.config),
        q_(convolved(scope, "kda.q", "kda.q_conv")),
        k_(convolved(scope, "kda.k", "kda.k_conv")),
        v_(convolved(scope, "kda.v", "kda.v_conv")),
        gate_down_(scope.matrix("kda.gate_down", config_.kda.gate_rank, config_.model.hidden)),
        gate_up_(scope.matrix("kda.gate_up", inner(), config_.kda.gate_rank)),
        beta_(scope.matrix("kda.beta", config_.kda.heads, config_.model.hidden)),
        out_gate_down_(low_rank_out_gate(scope)),
        out_gate_(scope.matrix("kda.out_gate", inner(),
                               out_gate_down_ != nullptr ? config_.kda.out_gate_rank : config_.model.hidden)),
        out_(scope.residual_matrix("kda.out", inner())),
        a_log_(scope.vector("kda.a_log", {config_.kda.heads}, 0)),
        dt_bias_(scope.parameters.declare(slow_decay(scope.parameter("kda.dt_bias")))),
        norm_(scope.vector("kda.norm", {config_.kda.head_width}, 1)) {
    if (out_gate_down_ != nullptr) out_gate_down_site_ = scope.site("kda.out_gate_down", SiteKind::kMatmul);
    gate_down_site_ = scope.site("kda.gate_down", SiteKind::kMatmul);
    gate_up_site_ = scope.site("kda.gate_up", SiteKind::kMatmul);
    beta_site_ = scope.site("kda.beta", SiteKind::kMatmul);
    out_gate_site_ = scope.site("kda.out_gate", SiteKind::kMatmul);
    scan_site_ = scope.site("kda.scan", SiteKind::kScan);
    out_site_ = scope.site("kda.out", SiteKind::kMatmul);
  }

  Output forward(const Pass& pass, const Tensor& x) override {
    auto s = std::make_unique<KdaSaved>();
    s->q = project(pass, q_, x, s->q_in);
    s->k = project(pass, k_, x, s->k_in);
    s->v = project(pass, v_, x, s->v_in);
    s->gate_low = linear_site(pass, gate_down_site_, Reads::kInBackward, x, gate_down_);
    s->gate = linear_site(pass, gate_up_site_, Reads::kInBackward, s->gate_low, gate_up_);
    drop_unless_trained(s->gate_low, gate_up_);
    drop_recomputable(pass, s->gate_low);
    s->beta = linear_site(pass, beta_site_, Reads::kInBackward, x, beta_);
    s->o = site_output(pass, scan_site_, Reads::kInBackward, x.rows, inner(), [&](const Tensor& o) {
      pass.ops.run(pass.stream, Kda{.shape = shape(), .in = inputs(*s), .o = o});
    });
    drop_recomputable(pass, s->q, s->k, s->v, s->gate, s->beta);
    if (out_gate_down_ != nullptr) {
      s->out_gate_low = linear_site(pass, out_gate_down_site_, Reads::kInBackward, x, *out_gate_down_);
    }
    const Tensor& gate_input = out_gate_down_ != nullptr ? s->out_gate_low : x;
    s->out_gate = linear_site(pass, out_gate_site_, Reads::kInBackward, gate_input, out_gate_);
    s->normed = pass.tensor(x.rows, inner());
    pass.ops.run(pass.stream, GatedRmsNorm{.rows = x.rows * config_.kda.heads,
                                           .width = config_.kda.head_width,
                                           .eps = eps(),
                                           .o = s->o,
                                           .w = norm_.value,
                                           .gate = s->out_gate,
                                           .y = s->normed});
    drop_unless_trained(s->out_gate_low, out_gate_);
    drop_recomputable(pass, s->o, s->out_gate_low, s->out_gate);
    // Backward reads the sum of this and the residual stream, so it is recomputed, or kept, like the others.
    Tensor y = linear_site(pass, out_site_, Reads::kInBackward, s->normed, out_);
    drop_unless_trained(s->normed, out_);
    if (!pass.keeps_activations()) s.reset();
    return {std::move(y), std::move(s)};
  }

  [[nodiscard]] bool reads_input() const override {
    return trains(q_.weight, k_.weight, v_.weight, gate_down_, beta_,
                  out_gate_down_ != nullptr ? *out_gate_down_ : out_gate_);
  }

  Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                  const Tensor& d_y) override {
    auto& s = static_cast<KdaSaved&>(*saved);
    Tensor d_x = pass.tensor(x.rows, x.width);
    Tensor d_o = output_backward(pass, x, s, d_y, d_x);
    Tensor d_q = pass.tensor(x.rows, inner());
    Tensor d_k = pass.tensor(x.rows, inner());
    Tensor d_v = pass.tensor(x.rows, inner());
    const Tensor d_gate = pass.tensor(x.rows, inner());
    const Tensor d_beta = pass.tensor(x.rows, config_.kda.heads);
    pass.ops.run(pass.stream, KdaBackward{.shape = shape(),
                                          .in = inputs(s),
                                          .d_o = d_o,
                                          .d_q = d_q,
                                          .d_k = d_k,
                                          .d_v = d_v,
                                          .d_gate = d_gate,
                                          .d_beta = d_beta,
                                          .d_a_log = a_log_.gradient,
                                          .d_dt_bias = dt_bias_.gradient});
    drop(d_o);
    drop(s.q, s.k, s.v, s.gate, s.beta);

    project_backward(pass, q_, x, s.q_in, d_q, d_x);
    project_backward(pass, k_, x, s.k_in, d_k, d_x);
    project_backward(pass, v_, x, s.v_in, d_v, d_x);
    linear_weight_gradient(pass, d_beta, x, beta_);
    linear_input_gradient(pass, d_beta, beta_, d_x, Accumulate::kAdd);
    linear_weight_gradient(pass, d_gate, s.gate_low, gate_up_);
    const Tensor d_low = pass.tensor(x.rows, config_.kda.gate_rank);
    linear_input_gradient(pass, d_gate, gate_up_, d_low);
    linear_weight_gradient(pass, d_low, x, gate_down_);
    linear_input_gradient(pass, d_low, gate_down_, d_x, Accumulate::kAdd);
    return d_x;
  }

 private:
  static Parameter* low_rank_out_gate(const LayerScope& scope) {
    const KdaConfig& kda = scope.config.kda;
    if (kda.out_gate_rank == 0) return nullptr;
    return &scope.matrix("kda.out_gate_down", kda.out_gate_rank, scope.config.model.hidden);
  }

  ConvolvedProjection convolved(const LayerScope& scope, const char* name, const char* conv) const {
    Parameter taps{.name = scope.parameter(conv),
                   .shape = {inner(), config_.kda.conv_taps},
                   .init = Init::normal(0.5),
                   .decay = Decay::kNo};
    return {scope.matrix(name, inner(), config_.model.hidden), scope.parameters.declare(std::move(taps)),
            scope.site(name, SiteKind::kMatmul)};
  }

  // Decays of 0.5% to 45% a token at the start, a spread over the channels.
  Parameter slow_decay(std::string name) const {
    return {.name = std::move(name),
            .shape = {config_.kda.heads, config_.kda.head_width},
            .init = Init::uniform({.least = -7, .most = -2}),
            .decay = Decay::kNo};
  }

  Tensor project(const Pass& pass, const ConvolvedProjection& p, const Tensor& x, Tensor& before) const {
    before = linear_site(pass, p.site, Reads::kInBackward, x, p.weight);
    Tensor y = pass.tensor(x.rows, inner());
    pass.ops.run(pass.stream, CausalConv{.batch = config_.train.batch,
                                         .length = config_.train.length,
                                         .channels = inner(),
                                         .taps = config_.kda.conv_taps,
                                         .x = before,
                                         .w = p.taps.value,
                                         .y = y});
    drop_recomputable(pass, before);
    return y;
  }

  // d_y and `before` go; d_x gets the projection's share.
  void project_backward(const Pass& pass, const ConvolvedProjection& p, const Tensor& x, Tensor& before,
                        Tensor& d_y, const Tensor& d_x) const {
    const Tensor d_before = pass.tensor(x.rows, inner());
    pass.ops.run(pass.stream, CausalConvBackward{.batch = config_.train.batch,
                                                 .length = config_.train.length,
                                                 .channels = inner(),
                                                 .taps = config_.kda.conv_taps,
                                                 .x = before,
                                                 .w = p.taps.value,
                                                 .d_y = d_y,
                                                 .d_x = d_before,
                                                 .d_w = p.taps.gradient});
    drop(before, d_y);
    linear_weight_gradient(pass, d_before, x, p.weight);
    linear_input_gradient(pass, d_before, p.weight, d_x, Accumulate::kAdd);
  }

  // Through the output projection, the norm and the output gate; d_x gets the gate's share. Returns d_o.
  Tensor output_backward(const Pass& pass, const Tensor& x, KdaSaved& s, const Tensor& d_y,
                         const Tensor& d_x) const {
    linear_weight_gradient(pass, d_y, s.normed, out_);
    drop(s.normed);
    Tensor d_normed = pass.tensor(x.rows, inner());
    linear_input_gradient(pass, d_y, out_, d_normed);
    Tensor d_o = pass.tensor(x.rows, inner());
    const Tensor d_out_gate = pass.tensor(x.rows, inner());
    pass.ops.run(pass.stream, GatedRmsNormBackward{.rows = x.rows * config_.kda.heads,
                                                   .width = config_.kda.head_width,
                                                   .eps = eps(),
                                                   .o = s.o,
                                                   .w = norm_.value,
                                                   .gate = s.out_gate,
                                                   .d_y = d_normed,
                                                   .d_o = d_o,
                                                   .d_gate = d_out_gate,
                                                   .d_w = norm_.gradient});
    drop(s.o, s.out_gate, d_normed);
    if (out_gate_down_ == nullptr) {
      linear_weight_gradient(pass, d_out_gate, x, out_gate_);
      linear_input_gradient(pass, d_out_gate, out_gate_, d_x);
      return d_o;
    }
    linear_weight_gradient(pass, d_out_gate, s.out_gate_low, out_gate_);
    const Tensor d_low = pass.tensor(x.rows, s.out_gate_low.width);
    linear_input_gradient(pass, d_out_gate, out_gate_, d_low);
    drop(s.out_gate_low);
    linear_weight_gradient(pass, d_low, x, *out_gate_down_);
    linear_input_gradient(pass, d_low, *out_gate_down_, d_x);
    return d_o;
  }

  [[nodiscard]] std::int64_t inner() const { return config_.kda.heads * config_.kda.head_width; }
  [[nodiscard]] float eps() const { return static_cast<float>(config_.model.norm_eps); }
  [[nodiscard]] KdaShape shape() const {
    return {.batch = config_.train.batch,
            .length = config_.train.length,
            .key_heads = config_.kda.heads,
            .value_heads = config_.kda.heads,
            .key_width = config_.kda.head_width,
            .value_width = config_.kda.head_width,
            .gate = config_.kda.lower_bound == 0 ? KdaGate::kSoftplus : KdaGate::kLowerBound,
            .lower_bound = static_cast<float>(config_.kda.lower_bound)};
  }
  [[nodiscard]] KdaInputs inputs(const KdaSaved& s) const {
    return {.q = s.q,
            .k = s.k,
            .v = s.v,
            .gate = s.gate,
            .beta = s.beta,
            .a_log = a_log_.value,
            .dt_bias = dt_bias_.value};
  }

  const Config& config_;
  ConvolvedProjection q_, k_, v_;
  const Parameter& gate_down_;
  const Parameter& gate_up_;
  const Parameter& beta_;
  const Parameter* out_gate_down_;  // null: the gate is of full rank
  const Parameter& out_gate_;
  const Parameter& out_;
  const Parameter& a_log_;
  const Parameter& dt_bias_;
  const Parameter& norm_;
  SiteId gate_down_site_, gate_up_site_, beta_site_, out_gate_down_site_, out_gate_site_, scan_site_,
      out_site_;
};

}  // namespace

std::unique_ptr<Mixer> make_kda_mixer(const LayerScope& scope) { return std::make_unique<KdaMixer>(scope); }

}  // namespace terrace::trainer
