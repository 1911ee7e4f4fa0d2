// y = W_2 glu(W_1g x, W_1u x): a dense layer, or the expert that every token shares.
#pragma once

#include <string>

#include "examples/moe_trainer/model/glu.hpp"
#include "examples/moe_trainer/model/scope.hpp"

namespace terrace::trainer {

class GluMlp {
 public:
  struct Saved {
    Tensor fc1;  // the gate's half (rows, width), then the other
  };
  struct Options {
    std::string prefix;  // of its parameters and sites: "moe.shared_"
    std::int64_t width = 0;
  };
  GluMlp(const LayerScope& scope, const Options& options);

  // (rows, hidden); empty in a recompute pass.
  [[nodiscard]] Tensor forward(const Pass& pass, const Tensor& x, Saved& saved) const;
  // Whether backward reads the numbers of x.
  [[nodiscard]] bool reads_input() const { return trains(gate_, up_); }
  // Takes what forward saved; writes d_x.
  void backward(const Pass& pass, const Tensor& x, Saved& saved, const Tensor& d_y, const Tensor& d_x) const;

 private:
  GluActivation activation_;
  std::int64_t width_;
  const Parameter& gate_;
  const Parameter& up_;
  const Parameter& down_;
  SiteId fc1_site_, fc2_site_;
};

}  // namespace terrace::trainer
