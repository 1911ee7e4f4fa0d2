// y = W_o(attention over the selected tokens * sigmoid(W_g x)), one key and one value row a token for all
// heads. The indexer sees x detached: it learns from its own loss, and the model from the language loss only.
//
// In a warm-up attention is over all tokens up to each, and the indexer learns from what it looks at, all of
// it, within the forward pass: nothing waits for a backward one.
#include "examples/moe_trainer/model/indexer.hpp"
#include "examples/moe_trainer/model/mixer.hpp"

namespace terrace::trainer {

namespace {

struct Projection {
  const Parameter& weight;
  SiteId site;
};

struct DsaSaved : Mixer::Saved {
  Tensor q, k, v, gate;
  Indexer::Saved index;
  Tensor attended;
};

class DsaMixer : public Mixer {
 public:
  explicit DsaMixer(const LayerScope& scope)
      : config_(scope.config),
        q_(projection(scope, "dsa.q", scope.config.dsa.heads * scope.config.dsa.key_width)),
        k_(projection(scope, "dsa.k", scope.config.dsa.key_width)),
        v_(projection(scope, "dsa.v", scope.config.dsa.value_width)),
        gate_(projection(scope, "dsa.gate", inner())),
        sink_(scope.vector("dsa.sink", {config_.dsa.heads}, 0)),
        indexer_(scope, {.prefix = "dsa.",
                         .source_width = config_.model.hidden,
                         .heads = config_.dsa.index_heads,
                         .width = config_.dsa.index_width,
                         .norm_eps = config_.model.norm_eps}),
        out_(scope.residual_matrix("dsa.out", inner())),
        attention_site_(scope.site("dsa.attention", SiteKind::kAttention)),
        out_site_(scope.site("dsa.out", SiteKind::kMatmul)) {}

  Output forward(const Pass& pass, const Tensor& x) override {
    auto s = std::make_unique<DsaSaved>();
    indexer_.forward(pass, x, x, shape(), s->index);
    s->q = project(pass, q_, x);
    s->k = project(pass, k_, x);
    s->v = project(pass, v_, x);
    s->gate = project(pass, gate_, x);
    const bool warm_up = pass.phase == Phase::kWarmUp;
    const Tensor lse = warm_up ? pass.floats(x.rows, config_.dsa.heads) : Tensor{};
    s->attended =
        site_output(pass, attention_site_, Reads::kInBackward, x.rows, inner(), [&](const Tensor& y) {
          pass.ops.run(pass.stream, Dsa{.shape = warm_up ? dense_shape() : shape(),
                                        .in = inputs(*s),
                                        .selected = s->index.list(),
                                        .y = y,
                                        .lse = warm_up ? lse.f32() : nullptr});
        });
    if (warm_up) teach(pass, x, *s, lse);
    drop_recomputable(pass, s->q, s->k, s->v, s->gate, s->index.q, s->index.k, s->index.w);
    indexer_.drop_unless_learning(s->index);
    Tensor y = linear_site(pass, out_site_, Reads::kInBackward, s->attended, out_);
    drop_unless_trained(s->attended, out_);
    if (!pass.keeps_activations()) s.reset();
    return {std::move(y), std::move(s)};
  }

  [[nodiscard]] bool reads_input() const override {
    return indexer_.reads_input() || indexer_.reads_source() ||
           trains(q_.weight, k_.weight, v_.weight, gate_.weight);
  }

  Tensor backward(const Pass& pass, const Tensor& x, std::unique_ptr<Saved> saved,
                  const Tensor& d_y) override {
    auto& s = static_cast<DsaSaved&>(*saved);
    linear_weight_gradient(pass, d_y, s.attended, out_);
    drop(s.attended);
    Tensor d_attended = pass.tensor(x.rows, inner());
    linear_input_gradient(pass, d_y, out_, d_attended);

    Tensor d_q = pass.tensor(x.rows, q_.weight.shape[0]);
    Tensor d_k = pass.tensor(x.rows, k_.weight.shape[0]);
    Tensor d_v = pass.tensor(x.rows, v_.weight.shape[0]);
    Tensor d_gate = pass.tensor(x.rows, inner());
    Indexer::Gradients d_index = indexer_.gradients(pass, x.rows);
    BlockRef map = indexer_.key_map(pass, shape(), s.index);
    pass.ops.run(pass.stream, DsaBackward{.shape = shape(),
                                          .in = inputs(s),
                                          .selected = s.index.list(),
                                          .d_y = d_attended,
                                          .d_q = d_q,
                                          .d_k = d_k,
                                          .d_v = d_v,
                                          .d_gate = d_gate,
                                          .d_sink = sink_.gradient,
                                          .index_loss_weight = indexer_.loss_weight(),
                                          .d_index_q = d_index.q,
                                          .d_index_k = d_index.k,
                                          .d_index_w = d_index.w,
                                          .key_map = words_of(map)});
    map.reset();
    drop(s.q, s.k, s.v, s.gate, s.index.q, s.index.k, s.index.w, d_attended);
    s.index.selected.reset();

    indexer_.backward(pass, x, x, s.index, d_index);
    drop(s.index.k_in, d_index.q, d_index.k, d_index.w);
    Tensor d_x = pass.tensor(x.rows, x.width);
    project_backward(pass, q_, x, d_q, d_x, Accumulate::kOverwrite);
    project_backward(pass, k_, x, d_k, d_x, Accumulate::kAdd);
    project_backward(pass, v_, x, d_v, d_x, Accumulate::kAdd);
    project_backward(pass, gate_, x, d_gate, d_x, Accumulate::kAdd);
    return d_x;
  }

 private:
  static Projection projection(const LayerScope& scope, const char* name, std::int64_t out) {
    return {scope.matrix(name, out, scope.config.model.hidden), scope.site(name, SiteKind::kMatmul)};
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

  static const KeyWord* words_of(const BlockRef& map) {
    return map == nullptr ? nullptr : reinterpret_cast<const KeyWord*>(map->address);
  }

  // The indexer's gradients from attention over all tokens, which was just computed.
  void teach(const Pass& pass, const Tensor& x, const DsaSaved& s, const Tensor& lse) const {
    const Indexer::Gradients d = indexer_.gradients(pass, x.rows);
    if (!d.q) return;
    pass.ops.run(pass.stream, DsaBackward{.shape = dense_shape(),
                                          .in = inputs(s),
                                          .selected = nullptr,
                                          .d_y = nullptr,
                                          .d_q = nullptr,
                                          .d_k = nullptr,
                                          .d_v = nullptr,
                                          .d_gate = nullptr,
                                          .d_sink = nullptr,
                                          .index_loss_weight = indexer_.loss_weight(),
                                          .d_index_q = d.q,
                                          .d_index_k = d.k,
                                          .d_index_w = d.w,
                                          .lse = lse.f32()});
    indexer_.backward(pass, x, x, s.index, d);
  }

  [[nodiscard]] DsaShape dense_shape() const {
    DsaShape dense = shape();
    dense.top_k = dense.length;
    return dense;
  }
  [[nodiscard]] std::int64_t inner() const { return config_.dsa.heads * config_.dsa.value_width; }
  [[nodiscard]] DsaShape shape() const {
    DsaShape shape{.batch = config_.train.batch,
                   .length = config_.train.length,
                   .heads = config_.dsa.heads,
                   .key_width = config_.dsa.key_width,
                   .value_width = config_.dsa.value_width,
                   .index_heads = 0,
                   .index_width = 0,
                   .top_k = config_.dsa.top_k};
    indexer_.describe(shape);
    return shape;
  }
  [[nodiscard]] DsaInputs inputs(const DsaSaved& s) const {
    DsaInputs in{};
    in.q = s.q;
    in.k = s.k;
    in.v = s.v;
    in.gate = s.gate;
    in.sink = sink_.value;
    Indexer::fill(in, s.index);
    return in;
  }

  const Config& config_;
  Projection q_, k_, v_, gate_;
  const Parameter& sink_;
  Indexer indexer_;
  const Parameter& out_;
  SiteId attention_site_, out_site_;
};

}  // namespace

std::unique_ptr<Mixer> make_dsa_mixer(const LayerScope& scope) { return std::make_unique<DsaMixer>(scope); }

}  // namespace terrace::trainer
