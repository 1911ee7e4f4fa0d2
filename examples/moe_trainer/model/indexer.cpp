#include "examples/moe_trainer/model/indexer.hpp"

#include <utility>

namespace terrace::trainer {

Indexer::Indexer(const LayerScope& scope, const Options& options)
    : config_(scope.config),
      options_(options),
      layer_(scope.layer),
      q_(projection(scope, "index_q", options.heads * options.width, options.source_width)),
      k_(projection(scope, "index_k", options.width, config_.model.hidden)),
      w_(projection(scope, "index_w", options.heads, config_.model.hidden)),
      norm_(scope.vector(options.prefix + "index_norm", {options.width}, 1)),
      bias_(scope.vector(options.prefix + "index_bias", {options.width}, 0)) {}

Indexer::Projection Indexer::projection(const LayerScope& scope, const char* name, std::int64_t out,
                                        std::int64_t in) const {
  const std::string full = options_.prefix + name;
  return {scope.matrix(full, out, in), scope.site(full, SiteKind::kMatmul)};
}

void Indexer::describe(DsaShape& shape) const {
  shape.index_heads = options_.heads;
  shape.index_width = options_.width;
}

void Indexer::fill(DsaInputs& in, const Saved& saved) {
  in.index_q = saved.q;
  in.index_k = saved.k;
  in.index_w = saved.w;
}

float Indexer::loss_weight() const {
  return static_cast<float>(config_.dsa.index_loss_weight / static_cast<double>(config_.tokens_per_step()));
}

Tensor Indexer::rotated(const Pass& pass, Tensor x, std::int64_t heads, RotaryDirection way) const {
  if (options_.rope_width == 0) return x;
  Tensor y = pass.tensor(x.rows, x.width);
  pass.ops.run(pass.stream, Rotary{.batch = config_.train.batch,
                                   .length = config_.train.length,
                                   .heads = heads,
                                   .width = options_.width,
                                   .rotary_width = options_.rope_width,
                                   .layout = RotaryLayout::kHalf,
                                   .direction = way,
                                   .theta = options_.rope_theta,
                                   .x = x,
                                   .y = y});
  return y;
}

void Indexer::forward(const Pass& pass, const Tensor& x, const Tensor& source, const DsaShape& shape,
                      Saved& s) const {
  const auto project = [&](const Projection& p, const Tensor& from) {
    return linear_site(pass, p.site, Reads::kInBackward, from, p.weight);
  };
  s.q = rotated(pass, project(q_, source), options_.heads, RotaryDirection::kForward);
  s.k_in = project(k_, x);
  s.w = project(w_, x);
  Tensor normed = pass.tensor(x.rows, options_.width);
  pass.ops.run(pass.stream, LayerNorm{.rows = x.rows,
                                      .width = options_.width,
                                      .eps = static_cast<float>(options_.norm_eps),
                                      .x = s.k_in,
                                      .w = norm_.value,
                                      .b = bias_.value,
                                      .y = normed});
  s.k = rotated(pass, std::move(normed), 1, RotaryDirection::kForward);
  const auto slots = static_cast<std::uint64_t>(x.rows * shape.slots());
  s.selected = decide_once(pass, save_key(pass, layer_, SaveSlot::kSelected),
                           Bytes(slots * sizeof(std::int32_t)), [&](const BlockRef& block) {
                             DsaSelect select{.shape = shape,
                                              .in = {},
                                              .selected = reinterpret_cast<std::int32_t*>(block->address)};
                             fill(select.in, s);
                             if (pass.chooser != nullptr) return pass.chooser->choose(select);
                             pass.ops.run(pass.stream, select);
                           });
}

Indexer::Gradients Indexer::gradients(const Pass& pass, std::int64_t tokens) const {
  if (config_.dsa.index_loss_weight == 0) return {};
  return {pass.tensor(tokens, options_.heads * options_.width), pass.tensor(tokens, options_.width),
          pass.tensor(tokens, options_.heads)};
}

void Indexer::backward(const Pass& pass, const Tensor& x, const Tensor& source, const Saved& s,
                       const Gradients& d) const {
  if (!d.q) return;
  linear_weight_gradient(pass, rotated(pass, d.q, options_.heads, RotaryDirection::kInverse), source,
                         q_.weight);
  linear_weight_gradient(pass, d.w, x, w_.weight);
  const Tensor d_k_in = pass.tensor(x.rows, options_.width);
  pass.ops.run(pass.stream, LayerNormBackward{.rows = x.rows,
                                              .width = options_.width,
                                              .eps = static_cast<float>(options_.norm_eps),
                                              .x = s.k_in,
                                              .w = norm_.value,
                                              .d_y = rotated(pass, d.k, 1, RotaryDirection::kInverse),
                                              .d_x = d_k_in,
                                              .d_w = norm_.gradient,
                                              .d_b = bias_.gradient});
  linear_weight_gradient(pass, d_k_in, x, k_.weight);
}

}  // namespace terrace::trainer
