// y = x w^T and its gradients, for a weight (out, in).
#pragma once

#include "examples/moe_trainer/model/site.hpp"
#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

// What products read of a matrix or a stack of them. Of one in blocks it is made here, in scratch that goes
// with this: after the launch of the product.
class Operand {
 public:
  struct Range {  // of matrices of a stack
    std::int64_t first, count;
  };
  Operand(const Pass& pass, const Parameter& w);
  Operand(const Pass& pass, const Parameter& w, const Range& range);
  operator In() const { return numbers_; }

 private:
  Tensor made_;
  In numbers_;
};

// Whether one of these matrices or its adapter is trained: then backward reads what they multiply.
template <typename... Matrices>
[[nodiscard]] bool trains(const Matrices&... w) {
  return ((w.training == Training::kYes || w.down != nullptr) || ...);
}
// Lets go of an input that backward reads for the gradients of these matrices alone, where none is trained.
// Its shape stays: gradients are made after it.
template <typename... Matrices>
void drop_unless_trained(Tensor& input, const Matrices&... w) {
  if (!trains(w...)) input = input.shape_alone();
}

// out (rows, w.out) = x (rows, w.in) w^T.
void linear(const Pass& pass, const Tensor& x, const Parameter& w, const Tensor& out);
// The same as a site.
[[nodiscard]] Tensor linear_site(const Pass& pass, SiteId site, Reads reads, const Tensor& x,
                                 const Parameter& w);
// d_x (rows, w.in) [+]= d_y w.
void linear_input_gradient(const Pass& pass, const Tensor& d_y, const Parameter& w, const Tensor& d_x,
                           Accumulate into = Accumulate::kOverwrite);
// w.gradient += d_y^T x. Reads x only where trains(w).
void linear_weight_gradient(const Pass& pass, const Tensor& d_y, const Tensor& x, const Parameter& w);

// The same product in fp32, with the fp32 value of w, whatever type x has. Its gradient, d_y of fp32: adds to
// w.gradient and to d_x.
void float_linear(const Pass& pass, const Tensor& x, const Parameter& w, const Tensor& out);
void float_linear_backward(const Pass& pass, const Tensor& d_y, const Tensor& x, const Parameter& w,
                           const Tensor& d_x);

// RMSNorm over whole rows, weight (width).
struct Norm {
  const Parameter* weight = nullptr;
  float eps = 0;
  [[nodiscard]] Tensor forward(const Pass& pass, const Tensor& x) const;
  // d_x [+]= the gradient; the weight's is added.
  void backward(const Pass& pass, const Tensor& x, const Tensor& d_y, const Tensor& d_x,
                Accumulate into = Accumulate::kOverwrite) const;
};

// A matrix that starts so that its output is as large as its input.
[[nodiscard]] Parameter matrix(std::string name, std::int64_t out, std::int64_t in);
// One that writes to the residual stream, scaled down by the number of such writes.
[[nodiscard]] Parameter residual_matrix(std::string name, std::int64_t out, std::int64_t in,
                                        std::int64_t layers);
// A vector or the like: starts constant, never decays.
[[nodiscard]] Parameter vector_of(std::string name, std::vector<std::int64_t> shape, double start);

}  // namespace terrace::trainer
