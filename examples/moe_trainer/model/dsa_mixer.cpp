// y = W_o(attention over the selected tokens * sigmoid(W_g x)), one key and one value row a token for all
// heads. The indexer sees x detached: it learns from its own loss, and the model from the language loss only.
#include "examples/moe_trainer/model/decision.hpp"
#include "examples/moe_trainer/model/mixer.hpp"

namespace terrace::trainer {

namespace {

struct Projection {
  const Parameter& weight;
  SiteId site;
};

struct DsaSaved : Mixer::Saved {
  Tensor q, k, v, gate;
  Tensor index_q, index_k_in, index_k, index_w;
  Tensor attended;
  BlockRef selected;
};

class DsaMixer : public Mixer {
 public:
  explicit DsaMixer(const LayerScope& scope)
      : config_(scope.config),
        layer_(scope.layer),
        q_(projection(scope, "dsa.q", scope.config.dsa.heads * scope.config.dsa.key_width)),
        k_(projection(scope, "dsa.k", scope.config.dsa.key_width)),
        v_(projection(scope, "dsa.v", scope.config.dsa.value_width)),
        gate_(projection(scope, "dsa.gate", inner())),
        index_q_(projection(scope, "dsa.index_q", config_.dsa.index_heads * config_.dsa.index_width)),
        index_k_(projection(scope, "dsa.index_k", config_.dsa.index_width)),
        index_w_(projection(scope, "dsa.index_w", config_.dsa.index_heads)),
        out_(scope.parameters.declare(residual_matrix(scope.parameter("dsa.out"), config_.model.hidden,
                                                      inner(), config_.model.layers))),
        sink_(scope.parameters.declare(vector_of(scope.parameter("dsa.sink"), {config_.dsa.heads}, 0))),
        index_norm_(scope.parameters.declare(
            vector_of(scope.parameter("dsa.index_norm"), {config_.dsa.index_width}, 1))),
        index_bias_(scope.parameters.declare(
            vector_of(scope.parameter("dsa.index_bias"), {config_.dsa.index_width}, 0))),
        attention_site_(scope.site("dsa.attention", SiteKind::kAttention)),
        out_site_(scope.site("dsa.out", SiteKind::kMatmul)) {}

  Output forward(const Pass& pass, const Tensor& x) override {
    auto s = std::make_unique<DsaSaved>();
    index_forward(pass, x, *s);
    s->q = project(pass, q_, x);
    s->k = project(pass, k_, x);
    s->v = project(pass, v_, x);
    s->gate = project(pass, gate_, x);
    s->attended =
        site_output(pass, attention_site_, Reads::kInBackward, x.rows, inner(), [&](const Tensor& y) {
          pass.ops.run(pass.stream,
                       Dsa{.shape = shape(), .in = inputs(*s), .selected = selected(*s), .y = y.data});
        });
    drop_recomputable(pass, s->q, s->k, s->v, s->gate, s->index_q, s->index_k, s->index_w);
    Tensor y = linear_site(pass, out_site_, Reads::kInBackward, s->attended, out_);
    if (!pass.keeps_activations()) s.reset();
    return {std::move(y), std::move(s)};
  }

  Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                  const Tensor& d_y) override {
    auto& s = static_cast<DsaSaved&>(*saved);
    linear_weight_gradient(pass, d_y, s.attended, out_);
    drop(s.attended);
    Tensor d_attended = pass.memory.tensor(x.rows, inner());
    linear_input_gradient(pass, d_y, out_, d_attended);

    Tensor d_q = pass.memory.tensor(x.rows, q_.weight.shape[0]);
    Tensor d_k = pass.memory.tensor(x.rows, k_.weight.shape[0]);
    Tensor d_v = pass.memory.tensor(x.rows, v_.weight.shape[0]);
    Tensor d_gate = pass.memory.tensor(x.rows, inner());
    Tensor d_index_q = pass.memory.tensor(x.rows, index_q_.weight.shape[0]);
    Tensor d_index_k = pass.memory.tensor(x.rows, config_.dsa.index_width);
    Tensor d_index_w = pass.memory.tensor(x.rows, config_.dsa.index_heads);
    const double loss_weight = config_.dsa.index_loss_weight / static_cast<double>(config_.tokens_per_step());
    pass.ops.run(pass.stream, DsaBackward{.shape = shape(),
                                          .in = inputs(s),
                                          .selected = selected(s),
                                          .d_y = d_attended.data,
                                          .d_q = d_q.data,
                                          .d_k = d_k.data,
                                          .d_v = d_v.data,
                                          .d_gate = d_gate.data,
                                          .d_sink = sink_.gradient,
                                          .index_loss_weight = static_cast<float>(loss_weight),
                                          .d_index_q = d_index_q.data,
                                          .d_index_k = d_index_k.data,
                                          .d_index_w = d_index_w.data});
    drop(s.q, s.k, s.v, s.gate, s.index_q, s.index_k, s.index_w, d_attended);
    s.selected.reset();

    index_backward(pass, x, s.index_k_in, {d_index_q, d_index_k, d_index_w});
    drop(s.index_k_in, d_index_q, d_index_k, d_index_w);
    Tensor d_x = pass.memory.tensor(x.rows, x.width);
    project_backward(pass, q_, x, d_q, d_x, Accumulate::kOverwrite);
    project_backward(pass, k_, x, d_k, d_x, Accumulate::kAdd);
    project_backward(pass, v_, x, d_v, d_x, Accumulate::kAdd);
    project_backward(pass, gate_, x, d_gate, d_x, Accumulate::kAdd);
    return d_x;
  }

 private:
  struct IndexGradients {
    const Tensor& q;
    const Tensor& k;
    const Tensor& w;
  };

  static Projection projection(const LayerScope& scope, const char* name, std::int64_t out) {
    return {scope.parameters.declare(matrix(scope.parameter(name), out, scope.config.model.hidden)),
            scope.site(name, SiteKind::kMatmul)};
  }

  static Tensor project(const Pass& pass, const Projection& p, const Tensor& x) {
    return linear_site(pass, p.site, Reads::kInBackward, x, p.weight);
  }

  static void project_backward(const Pass& pass, const Projection& p, const Tensor& x, Tensor& d_y,
                               const Tensor& d_x, Accumulate into) {
    linear_weight_gradient(pass, d_y, x, p.weight);
    linear_input_gradient(pass, d_y, p.weight, d_x, into);
    drop(d_y);
  }

  void index_forward(const Pass& pass, const Tensor& x, DsaSaved& s) const {
    s.index_q = project(pass, index_q_, x);
    s.index_k_in = project(pass, index_k_, x);
    s.index_w = project(pass, index_w_, x);
    s.index_k = pass.memory.tensor(x.rows, config_.dsa.index_width);
    pass.ops.run(pass.stream, LayerNorm{.rows = x.rows,
                                        .width = config_.dsa.index_width,
                                        .eps = eps(),
                                        .x = s.index_k_in.data,
                                        .w = index_norm_.value,
                                        .b = index_bias_.value,
                                        .y = s.index_k.data});
    const auto slots = static_cast<std::uint64_t>(x.rows * shape().slots());
    s.selected = decide_once(
        pass, save_key(pass, layer_, SaveSlot::kSelected), Bytes(slots * sizeof(std::int32_t)),
        [&](const BlockRef& block) {
          pass.ops.run(pass.stream, DsaSelect{.shape = shape(),
                                              .in = inputs(s),
                                              .selected = reinterpret_cast<std::int32_t*>(block->address)});
        });
  }

  void index_backward(const Pass& pass, const Tensor& x, const Tensor& index_k_in,
                      const IndexGradients& d) const {
    linear_weight_gradient(pass, d.q, x, index_q_.weight);
    linear_weight_gradient(pass, d.w, x, index_w_.weight);
    const Tensor d_k_in = pass.memory.tensor(x.rows, config_.dsa.index_width);
    pass.ops.run(pass.stream, LayerNormBackward{.rows = x.rows,
                                                .width = config_.dsa.index_width,
                                                .eps = eps(),
                                                .x = index_k_in.data,
                                                .w = index_norm_.value,
                                                .d_y = d.k.data,
                                                .d_x = d_k_in.data,
                                                .d_w = index_norm_.gradient,
                                                .d_b = index_bias_.gradient});
    linear_weight_gradient(pass, d_k_in, x, index_k_.weight);
  }

  [[nodiscard]] std::int64_t inner() const { return config_.dsa.heads * config_.dsa.value_width; }
  [[nodiscard]] float eps() const { return static_cast<float>(config_.model.norm_eps); }
  [[nodiscard]] DsaShape shape() const {
    return {.batch = config_.train.batch,
            .length = config_.train.length,
            .heads = config_.dsa.heads,
            .key_width = config_.dsa.key_width,
            .value_width = config_.dsa.value_width,
            .index_heads = config_.dsa.index_heads,
            .index_width = config_.dsa.index_width,
            .top_k = config_.dsa.top_k};
  }
  [[nodiscard]] DsaInputs inputs(const DsaSaved& s) const {
    return {.q = s.q.data,
            .k = s.k.data,
            .v = s.v.data,
            .gate = s.gate.data,
            .sink = sink_.value,
            .index_q = s.index_q.data,
            .index_k = s.index_k.data,
            .index_w = s.index_w.data};
  }
  [[nodiscard]] static const std::int32_t* selected(const DsaSaved& s) {
    return reinterpret_cast<const std::int32_t*>(s.selected->address);
  }

  const Config& config_;
  int layer_;
  Projection q_, k_, v_, gate_, index_q_, index_k_, index_w_;
  const Parameter& out_;
  const Parameter& sink_;
  const Parameter& index_norm_;
  const Parameter& index_bias_;
  SiteId attention_site_, out_site_;
};

}  // namespace

std::unique_ptr<Mixer> make_dsa_mixer(const LayerScope& scope) { return std::make_unique<DsaMixer>(scope); }

}  // namespace terrace::trainer
