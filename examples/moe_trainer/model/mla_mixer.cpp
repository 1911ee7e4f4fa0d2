// Multi-head latent attention:
//
//   q = W_q x, or W_q rmsnorm(W_qd x)    c = rmsnorm(W_d x)    k_rope = W_r x
//   y = W_o attention(q, keys and values of c and k_rope)
//
// The last rope_width numbers of each head's query, and k_rope, are rotated where the configuration has a
// theta.
#include <optional>
#include <utility>

#include "examples/moe_trainer/model/mixer.hpp"
#include "examples/moe_trainer/model/mla_core.hpp"

namespace terrace::trainer {

namespace {

struct MlaSaved : Mixer::Saved {
  Tensor q_low, q_source;  // before and after the norm; both empty without a low rank
  Tensor latent_in;        // before the norm
  std::unique_ptr<MlaCore::Saved> core;
  Tensor attended;
};

// x W_d^T, normed.
struct LowRank {
  const Parameter& weight;
  Norm norm;
  SiteId site;
};

class MlaMixer final : public Mixer {
 public:
  explicit MlaMixer(const LayerScope& scope) : MlaMixer(scope, low_rank_query(scope)) {}

  Output forward(const Pass& pass, const Tensor& x) override {
    auto s = std::make_unique<MlaSaved>();
    if (q_down_) {
      s->q_low = linear_site(pass, q_down_->site, Reads::kInBackward, x, q_down_->weight);
      s->q_source = q_down_->norm.forward(pass, s->q_low);
      drop_recomputable(pass, s->q_low);
    }
    const Tensor source = q_down_ ? s->q_source : x;
    MlaInputs in;
    in.q = turned(pass, linear_site(pass, q_site_, Reads::kInBackward, source, q_), query_part(),
                  RotaryDirection::kForward);
    s->latent_in = linear_site(pass, kv_down_.site, Reads::kInBackward, x, kv_down_.weight);
    in.latent = kv_down_.norm.forward(pass, s->latent_in);
    in.k_rope = turned(pass, linear_site(pass, rope_site_, Reads::kInBackward, x, k_rope_), key_part(),
                       RotaryDirection::kForward);
    s->attended = core_->forward(pass, {.x = x, .query = source}, std::move(in), s->core);
    if (q_down_ && !core_->reads_query()) drop_unless_trained(s->q_source, q_);
    Tensor y = linear_site(pass, out_site_, Reads::kInBackward, s->attended, out_);
    drop_unless_trained(s->attended, out_);
    if (!pass.keeps_activations()) s.reset();
    return {std::move(y), std::move(s)};
  }

  [[nodiscard]] bool reads_input() const override {
    return core_->reads_input() || trains(kv_down_.weight, k_rope_) ||
           (q_down_ ? trains(q_down_->weight) : trains(q_) || core_->reads_query());
  }

  Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                  const Tensor& d_y) override {
    auto& s = static_cast<MlaSaved&>(*saved);
    linear_weight_gradient(pass, d_y, s.attended, out_);
    Tensor d_attended = pass.tensor(x.rows, s.attended.width);
    linear_input_gradient(pass, d_y, out_, d_attended);
    drop(s.attended);
    const Tensor source = q_down_ ? s.q_source : x;
    MlaInputs d = core_->backward(pass, {.x = x, .query = source}, std::move(s.core), d_attended);
    drop(d_attended);
    d.q = turned(pass, std::move(d.q), query_part(), RotaryDirection::kInverse);
    d.k_rope = turned(pass, std::move(d.k_rope), key_part(), RotaryDirection::kInverse);

    Tensor d_x = pass.tensor(x.rows, x.width);
    linear_weight_gradient(pass, d.k_rope, x, k_rope_);
    linear_input_gradient(pass, d.k_rope, k_rope_, d_x);
    low_rank_backward(pass, kv_down_, x, s.latent_in, d.latent, d_x);
    linear_weight_gradient(pass, d.q, source, q_);
    if (!q_down_) {
      linear_input_gradient(pass, d.q, q_, d_x, Accumulate::kAdd);
      return d_x;
    }
    const Tensor d_source = pass.tensor(source.rows, source.width);
    linear_input_gradient(pass, d.q, q_, d_source);
    low_rank_backward(pass, *q_down_, x, s.q_low, d_source, d_x);
    return d_x;
  }

 private:
  struct Part {  // of each head, the last `rotary` of `width` numbers
    std::int64_t heads, width, rotary;
  };

  MlaMixer(const LayerScope& scope, std::optional<LowRank> q_down)
      : config_(scope.config),
        q_down_(std::move(q_down)),
        q_(scope.matrix("mla.q", mla().heads * (mla().nope_width + mla().rope_width),
                        q_down_ ? mla().q_rank : config_.model.hidden)),
        kv_down_(low_rank(scope, "mla.kv_down", "mla.kv_norm", mla().kv_rank)),
        k_rope_(scope.matrix("mla.k_rope", mla().rope_width, config_.model.hidden)),
        core_(mla().index_heads > 0 ? make_absorbed_mla(scope) : make_expanded_mla(scope)),
        out_(scope.residual_matrix("mla.out", mla().heads * mla().value_width)),
        q_site_(scope.site("mla.q", SiteKind::kMatmul)),
        rope_site_(scope.site("mla.k_rope", SiteKind::kMatmul)),
        out_site_(scope.site("mla.out", SiteKind::kMatmul)) {}

  static LowRank low_rank(const LayerScope& scope, const char* weight, const char* norm, std::int64_t rank) {
    return {scope.matrix(weight, rank, scope.config.model.hidden),
            scope.norm(norm, rank, scope.config.mla.norm_eps), scope.site(weight, SiteKind::kMatmul)};
  }
  static std::optional<LowRank> low_rank_query(const LayerScope& scope) {
    if (scope.config.mla.q_rank == 0) return std::nullopt;
    return low_rank(scope, "mla.q_down", "mla.q_norm", scope.config.mla.q_rank);
  }

  // d_x += the projection's share; `before` goes.
  static void low_rank_backward(const Pass& pass, const LowRank& p, const Tensor& x, Tensor& before,
                                const Tensor& d_normed, const Tensor& d_x) {
    const Tensor d_before = pass.tensor(before.rows, before.width);
    p.norm.backward(pass, before, d_normed, d_before);
    drop(before);
    linear_weight_gradient(pass, d_before, x, p.weight);
    linear_input_gradient(pass, d_before, p.weight, d_x, Accumulate::kAdd);
  }

  // Another tensor, since x may be a site's output; x itself where nothing turns.
  Tensor turned(const Pass& pass, Tensor x, const Part& part, RotaryDirection way) const {
    if (mla().rope_theta == 0) return x;
    Tensor y = pass.tensor(x.rows, x.width);
    pass.ops.run(pass.stream, Rotary{.batch = config_.train.batch,
                                     .length = config_.train.length,
                                     .heads = part.heads,
                                     .width = part.width,
                                     .offset = part.width - part.rotary,
                                     .rotary_width = part.rotary,
                                     .layout = RotaryLayout::kInterleaved,
                                     .direction = way,
                                     .theta = mla().rope_theta,
                                     .x = x,
                                     .y = y});
    return y;
  }
  [[nodiscard]] Part query_part() const {
    return {mla().heads, mla().nope_width + mla().rope_width, mla().rope_width};
  }
  [[nodiscard]] Part key_part() const { return {1, mla().rope_width, mla().rope_width}; }
  [[nodiscard]] const MlaConfig& mla() const { return config_.mla; }

  const Config& config_;
  std::optional<LowRank> q_down_;
  const Parameter& q_;
  LowRank kv_down_;
  const Parameter& k_rope_;
  std::unique_ptr<MlaCore> core_;
  const Parameter& out_;
  SiteId q_site_, rope_site_, out_site_;
};

}  // namespace

std::unique_ptr<Mixer> make_mla_mixer(const LayerScope& scope) { return std::make_unique<MlaMixer>(scope); }

}  // namespace terrace::trainer
