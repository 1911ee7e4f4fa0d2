// Rows of activations and the weights of experts as 8-bit numbers with scales (ops/fp8.hpp).
#pragma once

#include "examples/moe_trainer/model/pass.hpp"
#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

struct QuantisedRows {
  BlockRef block;
  E4m3* q = nullptr;  // (rows, width)
  float* scale = nullptr;
  std::int64_t rows = 0, width = 0;

  // Rows first .. first + count, in the same block.
  [[nodiscard]] QuantisedRows row_range(std::int64_t first, std::int64_t count) const;
  explicit operator bool() const { return q != nullptr; }
};
// x is bf16.
[[nodiscard]] QuantisedRows quantised(const Pass& pass, const Tensor& x);

// Both copies of a stack of matrices (groups, out, in).
class QuantisedWeights {
 public:
  void allocate(Memory& memory, const Parameter& w);
  // Makes both from w's bf16 copy: in the forward of a step's first micro-batch, for all of the step; of
  // frozen weights in the first step alone. Elsewhere it does nothing.
  void refresh(const Pass& pass, const Parameter& w);

  // out_r = w_e x_r, and d_x_r [+]= w_e^T d_y_r.
  void forward(const Pass& pass, const std::int32_t* offsets, const QuantisedRows& x,
               const Tensor& out) const;
  void input_gradient(const Pass& pass, const std::int32_t* offsets, const QuantisedRows& d_y,
                      const Tensor& d_x, Accumulate into) const;

  explicit operator bool() const { return straight_.q != nullptr; }

 private:
  std::int64_t groups_ = 0;
  bool made_ = false;
  QuantisedRows straight_, turned_;  // rows are output channels, and input channels
};

}  // namespace terrace::trainer
