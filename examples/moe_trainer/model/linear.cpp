#include "examples/moe_trainer/model/linear.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "examples/moe_trainer/model/scope.hpp"

namespace terrace::trainer {

Parameter& LayerScope::adapted(const std::string& name, Parameter& base) const {
  const std::vector<std::string>& targets = config.lora.targets;
  if (std::find(targets.begin(), targets.end(), name) == targets.end()) return base;
  std::vector<std::int64_t> down = base.shape;
  std::vector<std::int64_t> up = base.shape;
  down.end()[-2] = config.lora.rank;
  up.end()[-1] = config.lora.rank;
  const double deviation = 1.0 / std::sqrt(static_cast<double>(base.shape.back()));
  base.down = &parameters.declare_adapter(
      {.name = base.name + ".down", .shape = std::move(down), .init = Init::normal(deviation)});
  // Zeros: at first the model is what it was.
  base.up = &parameters.declare_adapter(
      {.name = base.name + ".up", .shape = std::move(up), .init = Init::constant(0)});
  return base;
}

namespace {

// `numbers` of w from number `first` on.
Tensor widened(const Pass& pass, const Parameter& w, std::int64_t first, std::int64_t numbers) {
  const std::int64_t row = first / w.width();
  Tensor y = pass.memory.tensor(numbers / w.width(), w.width(), Pool::kScratch, pass.compute);
  pass.ops.run(pass.stream, DequantiseBlocks{.rows = y.rows,
                                             .width = y.width,
                                             .q = w.block_numbers + first,
                                             .scale = w.block_scale + row * blocks_of(w.width()),
                                             .y = y});
  return y;
}

In moved(In array, std::int64_t numbers) {
  return {static_cast<const std::byte*>(array.at()) + numbers * bytes_of(array.dtype()), array.dtype()};
}

}  // namespace

Operand::Operand(const Pass& pass, const Parameter& w)
    : made_(w.in_blocks() ? widened(pass, w, 0, w.count()) : Tensor{}),
      numbers_(made_ ? In(made_) : w.operand()) {}

Operand::Operand(const Pass& pass, const Parameter& w, const Range& range) {
  const std::int64_t each = w.count() / w.shape.front();
  if (w.in_blocks()) made_ = widened(pass, w, range.first * each, range.count * each);
  numbers_ = made_ ? In(made_) : moved(w.operand(), range.first * each);
}

namespace {

// out [+]= x w^T.
void product(const Pass& pass, const Tensor& x, const Parameter& w, const Tensor& out, Accumulate into) {
  pass.ops.run(pass.stream, Matmul{.m = x.rows,
                                   .n = w.shape[0],
                                   .k = w.shape[1],
                                   .a = x,
                                   .ta = Transpose::kNo,
                                   .b = Operand(pass, w),
                                   .tb = Transpose::kYes,
                                   .c = out,
                                   .into = into});
}

// The narrow middle of an adapter, and its gradient.
Tensor narrow(const Pass& pass, const Tensor& x, const Parameter& w) {
  Tensor low = pass.tensor(x.rows, w.down->shape[0]);
  product(pass, x, *w.down, low, Accumulate::kOverwrite);
  return low;
}
Tensor narrow_gradient(const Pass& pass, const Tensor& d_y, const Parameter& w) {
  Tensor d_low = pass.tensor(d_y.rows, w.down->shape[0]);
  linear_input_gradient(pass, d_y, *w.up, d_low);
  return d_low;
}

}  // namespace

void linear(const Pass& pass, const Tensor& x, const Parameter& w, const Tensor& out) {
  product(pass, x, w, out, Accumulate::kOverwrite);
  if (w.down != nullptr) product(pass, narrow(pass, x, w), *w.up, out, Accumulate::kAdd);
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
                                   .a = d_y,
                                   .ta = Transpose::kNo,
                                   .b = Operand(pass, w),
                                   .tb = Transpose::kNo,
                                   .c = d_x,
                                   .into = into});
  if (w.down == nullptr) return;
  linear_input_gradient(pass, narrow_gradient(pass, d_y, w), *w.down, d_x, Accumulate::kAdd);
}

void linear_weight_gradient(const Pass& pass, const Tensor& d_y, const Tensor& x, const Parameter& w) {
  if (w.down != nullptr) {
    linear_weight_gradient(pass, d_y, narrow(pass, x, w), *w.up);
    linear_weight_gradient(pass, narrow_gradient(pass, d_y, w), x, *w.down);
  }
  if (w.training == Training::kNo) return;
  pass.ops.run(pass.stream, Matmul{.m = w.shape[0],
                                   .n = w.shape[1],
                                   .k = d_y.rows,
                                   .a = d_y,
                                   .ta = Transpose::kYes,
                                   .b = x,
                                   .tb = Transpose::kNo,
                                   .c = w.gradient,
                                   .into = Accumulate::kAdd});
}

namespace {

// x itself where it is fp32.
Tensor as_floats(const Pass& pass, const Tensor& x) {
  if (x.dtype == Dtype::kF32) return x;
  Tensor y = pass.floats(x.rows, x.width);
  pass.ops.run(pass.stream, Convert{.count = x.count(), .x = x, .y = y});
  return y;
}

}  // namespace

void float_linear(const Pass& pass, const Tensor& x, const Parameter& w, const Tensor& out) {
  pass.ops.run(pass.stream, Matmul{.m = x.rows,
                                   .n = w.shape[0],
                                   .k = w.shape[1],
                                   .a = as_floats(pass, x),
                                   .ta = Transpose::kNo,
                                   .b = w.value,
                                   .tb = Transpose::kYes,
                                   .c = out});
}

void float_linear_backward(const Pass& pass, const Tensor& d_y, const Tensor& x, const Parameter& w,
                           const Tensor& d_x) {
  if (trains(w)) linear_weight_gradient(pass, d_y, as_floats(pass, x), w);
  const bool direct = d_x.dtype == Dtype::kF32;
  const Tensor share = direct ? d_x : pass.floats(d_x.rows, d_x.width);
  pass.ops.run(pass.stream, Matmul{.m = d_y.rows,
                                   .n = w.shape[1],
                                   .k = w.shape[0],
                                   .a = d_y,
                                   .ta = Transpose::kNo,
                                   .b = w.value,
                                   .tb = Transpose::kNo,
                                   .c = share,
                                   .into = direct ? Accumulate::kAdd : Accumulate::kOverwrite});
  if (direct) return;
  pass.ops.run(pass.stream, Add{.count = d_x.count(), .a = d_x, .b = share, .out = d_x});
}

Tensor Norm::forward(const Pass& pass, const Tensor& x) const {
  Tensor y = pass.tensor(x.rows, x.width);
  pass.ops.run(pass.stream,
               RmsNorm{.rows = x.rows, .width = x.width, .eps = eps, .x = x, .w = weight->value, .y = y});
  return y;
}

void Norm::backward(const Pass& pass, const Tensor& x, const Tensor& d_y, const Tensor& d_x,
                    Accumulate into) const {
  pass.ops.run(pass.stream, RmsNormBackward{.rows = x.rows,
                                            .width = x.width,
                                            .eps = eps,
                                            .x = x,
                                            .w = weight->value,
                                            .d_y = d_y,
                                            .d_x = d_x,
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
