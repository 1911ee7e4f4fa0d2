// Sparse: every head's query is brought to the width of the latent row, which then is key and value of all
// heads alike: q'_h = [W_k,h^T q_h, q_rope,h], k' = [c, k_rope], o_h = W_v,h (attention over the chosen c).
#include <cmath>
#include <numeric>
#include <utility>

#include "examples/moe_trainer/model/attention_site.hpp"
#include "examples/moe_trainer/model/indexer.hpp"
#include "examples/moe_trainer/model/mla_core.hpp"
#include "examples/moe_trainer/model/row_map.hpp"

namespace terrace::trainer {

namespace {

struct AbsorbedSaved : MlaCore::Saved {
  Tensor q_heads;  // (H T, nope): the first parts of the queries, head by head
  Tensor q, k;     // (T, H (rank + rope)), (T, rank + rope)
  Indexer::Saved index;
  Attended latent;  // (T, H rank)
};

// A row of heads in pieces: `parts` widths one behind the other.
struct QueryMaps {
  const RowMap& first;        // (H, T, nope) of queries (T, H, nope + rope)
  const RowMap& rope;         // (T, H, rope) of the same
  const RowMap& absorb;       // (T, H, rank + rope) of (H, T, rank) and then (T, H, rope)
  const RowMap& latent;       // (H, T, rank) of (T, H, rank + rope)
  const RowMap& latent_rope;  // (T, H, rope) of the same
  const RowMap& emit;         // (T, H, nope + rope) of (H, T, nope) and then (T, H, rope)
};
struct KeyRowMaps {
  const RowMap& key;         // (T, rank + rope) of (T, rank) and then (T, rope)
  const RowMap& key_latent;  // (T, rank) of (T, rank + rope)
  const RowMap& key_rope;    // (T, rope) of the same
};
struct HeadMaps {
  const RowMap& to_heads;    // (H, T) of (T, H)
  const RowMap& from_heads;  // back
  const RowMap& offsets;     // e T, for e = 0 .. H: the rows of each head
};

struct Extent {
  std::int64_t tokens, heads;
};

// (H, T, width) of the first or the last `width` of rows (T, H, whole), in pieces.
RowMap::Source by_head(const Extent& n, std::int64_t width, std::int64_t whole) {
  return [=](std::int64_t i) {
    const std::int64_t row = i / width;  // head * tokens + token
    return (row % n.tokens * n.heads + row / n.tokens) * whole + i % width;
  };
}
RowMap::Source last_part(std::int64_t width, std::int64_t whole) {
  return [=](std::int64_t i) { return i / width * whole + whole - width + i % width; };
}
RowMap::Source first_part(std::int64_t width, std::int64_t whole) {
  return [=](std::int64_t i) { return i / width * whole + i % width; };
}
// (T, H, a + b) of (H, T, a) and then (T, H, b).
RowMap::Source from_both(const Extent& n, std::int64_t a, std::int64_t b) {
  return [=](std::int64_t i) {
    const std::int64_t row = i / (a + b);  // token * heads + head
    const std::int64_t at = i % (a + b);
    if (at >= a) return n.tokens * n.heads * a + row * b + at - a;
    return (row % n.heads * n.tokens + row / n.heads) * a + at;
  };
}

struct Pieces {
  std::int64_t nope, rope, rank;
};
Pieces pieces_of(const MlaConfig& mla) {
  const std::int64_t width = std::gcd(std::gcd(mla.nope_width, mla.rope_width), mla.kv_rank);
  return {mla.nope_width / width, mla.rope_width / width, mla.kv_rank / width};
}

QueryMaps query_maps(RowMaps& maps, const Extent& n, const Pieces& p) {
  const std::int64_t rows = n.tokens * n.heads;
  return {maps.get("mla.query_first", rows * p.nope, by_head(n, p.nope, p.nope + p.rope)),
          maps.get("mla.query_rope", rows * p.rope, last_part(p.rope, p.nope + p.rope)),
          maps.get("mla.absorb", rows * (p.rank + p.rope), from_both(n, p.rank, p.rope)),
          maps.get("mla.absorbed_latent", rows * p.rank, by_head(n, p.rank, p.rank + p.rope)),
          maps.get("mla.absorbed_rope", rows * p.rope, last_part(p.rope, p.rank + p.rope)),
          maps.get("mla.emit", rows * (p.nope + p.rope), from_both(n, p.nope, p.rope))};
}
KeyRowMaps row_maps(RowMaps& maps, const Extent& n, const Pieces& p) {
  return {maps.get("mla.key", n.tokens * (p.rank + p.rope), from_both({n.tokens, 1}, p.rank, p.rope)),
          maps.get("mla.key_latent", n.tokens * p.rank, first_part(p.rank, p.rank + p.rope)),
          maps.get("mla.key_rope", n.tokens * p.rope, last_part(p.rope, p.rank + p.rope))};
}
HeadMaps head_maps(RowMaps& maps, const Extent& n) {
  const std::int64_t rows = n.tokens * n.heads;
  return {maps.get("mla.to_heads", rows, by_head(n, 1, 1)),
          maps.get("mla.from_heads", rows, by_head({n.heads, n.tokens}, 1, 1)),
          maps.get("mla.head_offsets", n.heads + 1, [=](std::int64_t i) { return i * n.tokens; })};
}

class AbsorbedMla final : public MlaCore {
 public:
  explicit AbsorbedMla(const LayerScope& scope)
      : config_(scope.config),
        mla_(scope.config.mla),
        k_up_(per_head_matrix(scope, "mla.k_up", mla_.heads * mla_.nope_width)),
        v_up_(per_head_matrix(scope, "mla.v_up", mla_.heads * mla_.value_width)),
        indexer_(scope, {.prefix = "mla.",
                         .source_width = mla_.q_rank > 0 ? mla_.q_rank : config_.model.hidden,
                         .heads = mla_.index_heads,
                         .width = mla_.index_width,
                         .norm_eps = mla_.norm_eps,
                         .rope_width = mla_.rope_theta > 0 ? mla_.rope_width : 0,
                         .rope_theta = mla_.rope_theta}),
        query_(query_maps(scope.maps, extent(), pieces_of(mla_))),
        row_(row_maps(scope.maps, extent(), pieces_of(mla_))),
        heads_(head_maps(scope.maps, extent())),
        attention_site_(scope.site("mla.attention", SiteKind::kAttention)),
        q_site_(scope.site("mla.k_up", SiteKind::kGmm)),
        v_site_(scope.site("mla.v_up", SiteKind::kGmm)) {}

  Tensor forward(const Pass& pass, const MlaSources& from, MlaInputs in,
                 std::unique_ptr<Saved>& saved) override {
    auto s = std::make_unique<AbsorbedSaved>();
    indexer_.forward(pass, from.x, from.query, shape(), s->index);
    absorb_query(pass, in.q, *s);
    drop(in.q);
    const Joined key = joined(pass, {in.latent.rows, mla_.kv_rank, mla_.rope_width});
    copy(pass, in.latent, key.first);
    copy(pass, in.k_rope, key.second);
    s->k = pass.tensor(in.latent.rows, mla_.kv_rank + mla_.rope_width);
    row_.key.gather(pass, key.all, s->k);
    const AttentionSite at{attention_site_, in.latent.rows, mla_.heads * mla_.kv_rank, mla_.heads};
    s->latent = attention_output(pass, at, [&](const Tensor& o, const Tensor& lse) {
      pass.ops.run(
          pass.stream,
          Dsa{.shape = shape(), .in = inputs(*s), .selected = s->index.list(), .y = o, .lse = lse.f32()});
    });
    Tensor attended =
        site_output(pass, v_site_, Reads::kInBackward, in.latent.rows, mla_.heads * mla_.value_width,
                    [&](const Tensor& out) { expand_values(pass, s->latent.o, out); });
    drop_unless_trained(s->q_heads, k_up_);
    indexer_.drop_unless_learning(s->index);
    if (pass.keeps_activations()) saved = std::move(s);
    return attended;
  }

  [[nodiscard]] bool reads_input() const override { return indexer_.reads_input(); }
  [[nodiscard]] bool reads_query() const override { return indexer_.reads_source(); }

  MlaInputs backward(const Pass& pass, const MlaSources& from, std::unique_ptr<Saved> saved,
                     const Tensor& d_attended) override {
    auto& s = static_cast<AbsorbedSaved&>(*saved);
    Tensor d_o = expand_values_backward(pass, s.latent.o, d_attended);
    Tensor d_q = pass.tensor(s.q.rows, s.q.width);
    const Tensor d_k = pass.tensor(s.k.rows, s.k.width);
    const Indexer::Gradients d_index = indexer_.gradients(pass, s.k.rows);
    pass.ops.run(pass.stream, DsaBackward{.shape = shape(),
                                          .in = inputs(s),
                                          .selected = s.index.list(),
                                          .d_y = d_o,
                                          .d_q = d_q,
                                          .d_k = d_k,
                                          .d_v = nullptr,
                                          .d_gate = nullptr,
                                          .d_sink = nullptr,
                                          .index_loss_weight = indexer_.loss_weight(),
                                          .d_index_q = d_index.q,
                                          .d_index_k = d_index.k,
                                          .d_index_w = d_index.w,
                                          .index_loss = nullptr,
                                          .lse = s.latent.lse.f32(),
                                          .attention = s.latent.o});
    drop(d_o, s.q, s.k, s.latent.o, s.latent.lse);
    indexer_.backward(pass, from.x, from.query, s.index, d_index);
    MlaInputs d;
    d.q = absorb_query_backward(pass, s.q_heads, d_q);
    d.latent = pass.tensor(d_k.rows, mla_.kv_rank);
    row_.key_latent.gather(pass, d_k, d.latent);
    d.k_rope = pass.tensor(d_k.rows, mla_.rope_width);
    row_.key_rope.gather(pass, d_k, d.k_rope);
    return d;
  }

 private:
  // No target of adapters: heads multiply their parts of it from either side.
  static Parameter& per_head_matrix(const LayerScope& scope, const char* name, std::int64_t out) {
    return scope.parameters.declare(matrix(scope.parameter(name), out, scope.config.mla.kv_rank));
  }

  void absorb_query(const Pass& pass, const Tensor& q, AbsorbedSaved& s) const {
    s.q_heads = pass.tensor(q.rows * mla_.heads, mla_.nope_width);
    query_.first.gather(pass, q, s.q_heads);
    s.q = site_output(pass, q_site_, Reads::kInBackward, q.rows,
                      mla_.heads * (mla_.kv_rank + mla_.rope_width), [&](const Tensor& out) {
                        const Joined parts = joined(pass, {s.q_heads.rows, mla_.kv_rank, mla_.rope_width});
                        pass.ops.grouped_input_gradient(
                            pass.stream,
                            by_head_product(Operand(pass, k_up_), mla_.nope_width, s.q_heads, parts.first));
                        query_.rope.gather(pass, q, parts.second);
                        query_.absorb.gather(pass, parts.all, out);
                      });
    drop_recomputable(pass, s.q_heads);
  }

  // d_q goes. Returns the gradient of the queries (T, H (nope + rope)).
  Tensor absorb_query_backward(const Pass& pass, const Tensor& q_heads, Tensor& d_q) const {
    const Tensor d_latent = pass.tensor(q_heads.rows, mla_.kv_rank);
    query_.latent.gather(pass, d_q, d_latent);
    if (trains(k_up_)) weight_gradient(pass, k_up_, mla_.nope_width, q_heads, d_latent);
    const Joined parts = joined(pass, {q_heads.rows, mla_.nope_width, mla_.rope_width});
    pass.ops.grouped_forward(pass.stream,
                             by_head_product(Operand(pass, k_up_), mla_.nope_width, d_latent, parts.first));
    query_.latent_rope.gather(pass, d_q, parts.second);
    Tensor d = pass.tensor(d_q.rows, mla_.heads * (mla_.nope_width + mla_.rope_width));
    drop(d_q);
    query_.emit.gather(pass, parts.all, d);
    return d;
  }

  // out (T, H value) of o (T, H rank).
  void expand_values(const Pass& pass, const Tensor& o, const Tensor& out) const {
    const Tensor by_head = heads_first(pass, o, mla_.kv_rank);
    const Tensor values = pass.tensor(by_head.rows, mla_.value_width);
    pass.ops.grouped_forward(pass.stream,
                             by_head_product(Operand(pass, v_up_), mla_.value_width, by_head, values));
    heads_.from_heads.gather(pass, values, out);
  }
  Tensor expand_values_backward(const Pass& pass, const Tensor& o, const Tensor& d_out) const {
    const Tensor d_values = heads_first(pass, d_out, mla_.value_width);
    if (trains(v_up_)) {
      weight_gradient(pass, v_up_, mla_.value_width, d_values, heads_first(pass, o, mla_.kv_rank));
    }
    const Tensor d_by_head = pass.tensor(d_values.rows, mla_.kv_rank);
    pass.ops.grouped_input_gradient(
        pass.stream, by_head_product(Operand(pass, v_up_), mla_.value_width, d_values, d_by_head));
    Tensor d_o = pass.tensor(o.rows, o.width);
    heads_.from_heads.gather(pass, d_by_head, d_o);
    return d_o;
  }

  Tensor heads_first(const Pass& pass, const Tensor& x, std::int64_t width) const {
    Tensor y = pass.tensor(x.rows * mla_.heads, width);
    heads_.to_heads.gather(pass, x, y);
    return y;
  }

  // Each head's rows by its own (out_width, rank) part of the weight.
  GroupedMatmul by_head_product(In w, std::int64_t out_width, const Tensor& a, const Tensor& c) const {
    return {.groups = mla_.heads,
            .rows = a.rows,
            .n = out_width,
            .k = mla_.kv_rank,
            .offsets = heads_.offsets.places(),
            .a = a,
            .w = w,
            .c = c};
  }
  void weight_gradient(const Pass& pass, const Parameter& w, std::int64_t out_width, const Tensor& wide,
                       const Tensor& latent) const {
    pass.ops.run(pass.stream, GroupedWeightGradient{.groups = mla_.heads,
                                                    .rows = wide.rows,
                                                    .n = out_width,
                                                    .k = mla_.kv_rank,
                                                    .offsets = heads_.offsets.places(),
                                                    .d_c = wide,
                                                    .a = latent,
                                                    .d_w = w.gradient,
                                                    .into = Accumulate::kAdd});
  }

  [[nodiscard]] Extent extent() const { return {config_.tokens(), mla_.heads}; }
  [[nodiscard]] DsaShape shape() const {
    DsaShape shape{
        .batch = config_.train.batch,
        .length = config_.train.length,
        .heads = mla_.heads,
        .key_width = mla_.kv_rank + mla_.rope_width,
        .value_width = mla_.kv_rank,
        .index_heads = 0,
        .index_width = 0,
        .top_k = mla_.index_top_k,
        .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(mla_.nope_width + mla_.rope_width)))};
    indexer_.describe(shape);
    return shape;
  }
  [[nodiscard]] DsaInputs inputs(const AbsorbedSaved& s) const {
    DsaInputs in{};
    in.q = s.q;
    in.k = s.k;
    Indexer::fill(in, s.index);
    return in;
  }

  const Config& config_;
  const MlaConfig& mla_;
  const Parameter& k_up_;
  const Parameter& v_up_;
  Indexer indexer_;
  QueryMaps query_;
  KeyRowMaps row_;
  HeadMaps heads_;
  SiteId attention_site_, q_site_, v_site_;
};

}  // namespace

std::unique_ptr<MlaCore> make_absorbed_mla(const LayerScope& scope) {
  return std::make_unique<AbsorbedMla>(scope);
}

}  // namespace terrace::trainer
