// What sublayers read and add to.
//
// Plain: one running sum. Attention residuals: a sublayer's input is a mix of the embedding, of each finished
// block's sum of outputs, and of the running sum of the block it is in, weighted by softmax over
// <norm * query, v / rms(v)>; a block's sum starts empty. Queries start at zero: at first all parts count
// alike.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "examples/moe_trainer/model/scope.hpp"

namespace terrace::trainer {

// Values on the way forward, their gradients on the way back (empty: none yet).
struct ResidualStream {
  std::vector<Tensor> parts;  // the embedding and the finished blocks; none where the residual is plain
  Tensor sum;                 // empty before a block's first sublayer
};

class ResidualMix {
 public:
  // Declares `prefix`norm and `prefix`query. Where the configuration has plain residuals: none.
  [[nodiscard]] static std::optional<ResidualMix> declare(ParameterGroup& parameters, const Config& config,
                                                          const std::string& prefix);
  ResidualMix(const Parameter& norm, const Parameter& query, double eps)
      : norm_(&norm), query_(&query), eps_(static_cast<float>(eps)) {}

  // Of all parts and the sum, where there is one.
  [[nodiscard]] Tensor forward(const Pass& pass, const std::vector<Tensor>& parts, const Tensor& sum) const;
  // Adds to the gradients of the parts and of the sum. Precondition: `d` has as many parts as there were.
  void backward(const Pass& pass, const std::vector<Tensor>& parts, const Tensor& sum, const Tensor& d_mixed,
                ResidualStream& d) const;

 private:
  const Parameter* norm_;
  const Parameter* query_;
  float eps_;
};

}  // namespace terrace::trainer
