// Dense: k_h = [W_k,h c, k_rope], v_h = W_v,h c, over all earlier tokens.
#include <numeric>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/model/attention_site.hpp"
#include "examples/moe_trainer/model/mla_core.hpp"
#include "examples/moe_trainer/model/row_map.hpp"

namespace terrace::trainer {

Joined joined(const Pass& pass, const JoinedShape& shape) {
  Joined both;
  both.all = pass.tensor(1, shape.rows * (shape.first_width + shape.second_width));
  both.first = both.all.reshaped(shape.rows, shape.first_width);
  both.second = both.all.reshaped(shape.rows, shape.second_width);
  both.second.at += both.first.count() * bytes_of(pass.compute);
  return both;
}

void copy(const Pass& pass, const Tensor& from, const Tensor& to) {
  require(pass.session.device().copy(pass.stream, Direction::kD2D, to.at, from.at, from.bytes()));
}

namespace {

struct ExpandedSaved : MlaCore::Saved {
  MlaInputs in;
  Tensor k, v;
  Attended attended;
};

// In pieces of a width that divides both parts of a key.
struct KeyMaps {
  const RowMap& join;   // keys' first parts (T, H, nope), then rotated parts (T, rope), to keys
  const RowMap& first;  // the first parts of keys
  const RowMap& rope;   // (T, H, rope): the rotated parts of keys
  const RowMap& order;  // 0, 1 ... of those, a head's part each
};

KeyMaps key_maps(RowMaps& maps, std::int64_t tokens, const MlaConfig& mla) {
  const std::int64_t piece = std::gcd(mla.nope_width, mla.rope_width);
  const std::int64_t heads = mla.heads;
  const std::int64_t nope = mla.nope_width / piece;
  const std::int64_t rope = mla.rope_width / piece;
  const std::int64_t key = nope + rope;
  return {
      maps.get("mla.join", tokens * heads * key,
               [=](std::int64_t i) {
                 const std::int64_t row = i / key;
                 const std::int64_t at = i % key;
                 return at < nope ? row * nope + at : tokens * heads * nope + row / heads * rope + at - nope;
               }),
      maps.get("mla.first", tokens * heads * nope, [=](std::int64_t i) { return i / nope * key + i % nope; }),
      maps.get("mla.rope", tokens * heads * rope,
               [=](std::int64_t i) { return i / rope * key + nope + i % rope; }),
      maps.get("mla.order", tokens * heads, [](std::int64_t i) { return i; })};
}

class ExpandedMla final : public MlaCore {
 public:
  explicit ExpandedMla(const LayerScope& scope)
      : config_(scope.config),
        mla_(scope.config.mla),
        k_up_(scope.matrix("mla.k_up", mla_.heads * mla_.nope_width, mla_.kv_rank)),
        v_up_(scope.matrix("mla.v_up", mla_.heads * mla_.value_width, mla_.kv_rank)),
        maps_(key_maps(scope.maps, config_.tokens(), mla_)),
        k_site_(scope.site("mla.k_up", SiteKind::kMatmul)),
        v_site_(scope.site("mla.v_up", SiteKind::kMatmul)),
        attention_site_(scope.site("mla.attention", SiteKind::kAttention)) {}

  Tensor forward(const Pass& pass, const MlaSources& from, MlaInputs in,
                 std::unique_ptr<Saved>& saved) override {
    (void)from;
    auto s = std::make_unique<ExpandedSaved>();
    const std::int64_t tokens = in.q.rows;
    s->k = site_output(
        pass, k_site_, Reads::kInBackward, tokens, mla_.heads * key_width(), [&](const Tensor& k) {
          const Joined parts = joined(pass, {tokens, mla_.heads * mla_.nope_width, mla_.rope_width});
          linear(pass, in.latent, k_up_, parts.first);
          copy(pass, in.k_rope, parts.second);
          maps_.join.gather(pass, parts.all, k);
        });
    drop(in.k_rope);
    s->v = linear_site(pass, v_site_, Reads::kInBackward, in.latent, v_up_);
    const AttentionSite at{attention_site_, tokens, mla_.heads * mla_.value_width, mla_.heads};
    s->attended = attention_output(pass, at, [&](const Tensor& o, const Tensor& lse) {
      pass.ops.run(
          pass.stream,
          Attention{
              .shape = shape(), .q = in.q, .k = s->k, .v = s->v, .sink = nullptr, .o = o, .lse = lse.f32()});
    });
    s->in = std::move(in);
    drop_unless_trained(s->in.latent, k_up_, v_up_);
    Tensor attended = s->attended.o;
    if (pass.keeps_activations()) saved = std::move(s);
    return attended;
  }

  MlaInputs backward(const Pass& pass, const MlaSources& from, std::unique_ptr<Saved> saved,
                     const Tensor& d_attended) override {
    (void)from;
    auto& s = static_cast<ExpandedSaved&>(*saved);
    MlaInputs d;
    d.q = pass.tensor(s.in.q.rows, s.in.q.width);
    Tensor d_k = pass.tensor(s.k.rows, s.k.width);
    const Tensor d_v = pass.tensor(s.v.rows, s.v.width);
    pass.ops.run(pass.stream, AttentionBackward{.shape = shape(),
                                                .q = s.in.q,
                                                .k = s.k,
                                                .v = s.v,
                                                .sink = nullptr,
                                                .o = s.attended.o,
                                                .lse = s.attended.lse.f32(),
                                                .d_o = d_attended,
                                                .d_q = d.q,
                                                .d_k = d_k,
                                                .d_v = d_v});
    drop(s.in.q, s.k, s.v, s.attended.o, s.attended.lse);
    d.k_rope = pass.tensor(d_k.rows, mla_.rope_width);
    maps_.rope.gather_sums(pass, d_k, maps_.order, d.k_rope);
    const Tensor d_first = pass.tensor(d_k.rows, mla_.heads * mla_.nope_width);
    maps_.first.gather(pass, d_k, d_first);
    drop(d_k);
    linear_weight_gradient(pass, d_first, s.in.latent, k_up_);
    linear_weight_gradient(pass, d_v, s.in.latent, v_up_);
    d.latent = pass.tensor(s.in.latent.rows, s.in.latent.width);
    linear_input_gradient(pass, d_first, k_up_, d.latent);
    linear_input_gradient(pass, d_v, v_up_, d.latent, Accumulate::kAdd);
    return d;
  }

 private:
  [[nodiscard]] std::int64_t key_width() const { return mla_.nope_width + mla_.rope_width; }
  [[nodiscard]] AttentionShape shape() const {
    return {.batch = config_.train.batch,
            .length = config_.train.length,
            .heads = mla_.heads,
            .key_heads = mla_.heads,
            .key_width = key_width(),
            .value_width = mla_.value_width};
  }

  const Config& config_;
  const MlaConfig& mla_;
  const Parameter& k_up_;
  const Parameter& v_up_;
  KeyMaps maps_;
  SiteId k_site_, v_site_, attention_site_;
};

}  // namespace

std::unique_ptr<MlaCore> make_expanded_mla(const LayerScope& scope) {
  return std::make_unique<ExpandedMla>(scope);
}

}  // namespace terrace::trainer
