#include "examples/moe_trainer/model/residual.hpp"

namespace terrace::trainer {

std::optional<ResidualMix> ResidualMix::declare(ParameterGroup& parameters, const Config& config,
                                                const std::string& prefix) {
  if (config.model.residual == ResidualKind::kPlain) return std::nullopt;
  const Parameter& norm = parameters.declare(vector_of(prefix + "norm", {config.model.hidden}, 1));
  const Parameter& query = parameters.declare(vector_of(prefix + "query", {config.model.hidden}, 0));
  return ResidualMix(norm, query, config.model.norm_eps);
}

Tensor ResidualMix::forward(const Pass& pass, const std::vector<Tensor>& parts, const Tensor& sum) const {
  Tensor mixed = pass.tensor(parts.front().rows, parts.front().width);
  AttnRes op{.rows = mixed.rows,
             .width = mixed.width,
             .sources = 0,
             .eps = eps_,
             .v = {},
             .w = norm_->value,
             .q = query_->value,
             .h = mixed};
  for (const Tensor& part : parts) op.v[op.sources++] = part;
  if (sum) op.v[op.sources++] = sum;
  pass.ops.run(pass.stream, op);
  return mixed;
}

void ResidualMix::backward(const Pass& pass, const std::vector<Tensor>& parts, const Tensor& sum,
                           const Tensor& d_mixed, ResidualStream& d) const {
  AttnResBackward op{.rows = d_mixed.rows,
                     .width = d_mixed.width,
                     .sources = 0,
                     .eps = eps_,
                     .v = {},
                     .w = norm_->value,
                     .q = query_->value,
                     .d_h = d_mixed,
                     .d_v = {},
                     .into_d_v = {},
                     .d_w = norm_->gradient,
                     .d_q = query_->gradient};
  const auto source = [&](const Tensor& v, Tensor& d_v) {
    const std::int64_t i = op.sources++;
    op.into_d_v[i] = d_v ? Accumulate::kAdd : Accumulate::kOverwrite;
    if (!d_v) d_v = pass.tensor(v.rows, v.width);
    op.v[i] = v;
    op.d_v[i] = d_v;
  };
  for (std::size_t i = 0; i < parts.size(); ++i) source(parts[i], d.parts[i]);
  if (sum) source(sum, d.sum);
  pass.ops.run(pass.stream, op);
}

}  // namespace terrace::trainer
