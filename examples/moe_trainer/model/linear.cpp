#include "examples/moe_trainer/model/linear.hpp"

#include <cmath>
#include <utility>

namespace terrace::trainer {

void linear(const Pass& pass, const Tensor& x, const Parameter& w, const Tensor& out) {
  pass.ops.run(pass.stream, Matmul{.m = x.rows,
                                   .n = w.shape[0],
                                   .k = w.shape[1],
                                   .a = x.data,
                                   .ta = Transpose::kNo,
                                   .b = w.value,
                                   .tb = Transpose::kYes,
                                   .c = out.data});
}

Tensor linear_site(const Pass& pass, SiteId site, Reads reads, const Tensor& x, const Parameter& w) {
  return site_output(pass, site, reads, x.rows, w.shape[0],
                     [&](const Tensor& out) { linear(pass, x, w, out); });
}

void linear_input_gradient(const Pass& pass, const Tensor& d_y, const Parameter& w, const Tensor& d_x,
                           Accumulate into) {
  pass.ops.run(pass.stream, Matmul{.m = d_y.rows,
                                   .n = w.shape[1],
                                   .k = w.shape[0],
                                   .a = d_y.data,
                                   .ta = Transpose::kNo,
                                   .b = w.value,
                                   .tb = Transpose::kNo,
                                   .c = d_x.data,
                                   .into = into});
}

void linear_weight_gradient(const Pass& pass, const Tensor& d_y, const Tensor& x, const Parameter& w) {
  pass.ops.run(pass.stream, Matmul{.m = w.shape[0],
                                   .n = w.shape[1],
                                   .k = d_y.rows,
                                   .a = d_y.data,
                                   .ta = Transpose::kYes,
                                   .b = x.data,
                                   .tb = Transpose::kNo,
                                   .c = w.gradient,
                                   .into = Accumulate::kAdd});
}

Tensor Norm::forward(const Pass& pass, const Tensor& x) const {
  Tensor y = pass.memory.tensor(x.rows, x.width);
  pass.ops.run(
      pass.stream,
      RmsNorm{.rows = x.rows, .width = x.width, .eps = eps, .x = x.data, .w = weight->value, .y = y.data});
  return y;
}

void Norm::backward(const Pass& pass, const Tensor& x, const Tensor& d_y, const Tensor& d_x,
                    Accumulate into) const {
  pass.ops.run(pass.stream, RmsNormBackward{.rows = x.rows,
                                            .width = x.width,
                                            .eps = eps,
                                            .x = x.data,
                                            .w = weight->value,
                                            .d_y = d_y.data,
                                            .d_x = d_x.data,
                                            .into_d_x = into,
                                            .d_w = weight->gradient});
}

Parameter matrix(std::string name, std::int64_t out, std::int64_t in) {
  return {.name = std::move(name),
          .shape = {out, in},
          .init = Init::normal(1.0 / std::sqrt(static_cast<double>(in)))};
}

Parameter residual_matrix(std::string name, std::int64_t out, std::int64_t in, std::int64_t layers) {
  const double deviation = 1.0 / std::sqrt(static_cast<double>(in) * 2.0 * static_cast<double>(layers));
  return {.name = std::move(name), .shape = {out, in}, .init = Init::normal(deviation)};
}

Parameter vector_of(std::string name, std::vector<std::int64_t> shape, double start) {
  return {
      .name = std::move(name), .shape = std::move(shape), .init = Init::constant(start), .decay = Decay::kNo};
}

}  // namespace terrace::trainer
