// What steps take beside what their plan said: copies slow computing down, the host leaves gaps, an output
// that is kept spares more than its operator. Learned from the first steps by a plan, and added to what it
// predicts. Pure: the caller has the clock.
#pragma once

#include <vector>

#include "swapcore/plan/prediction.hpp"

namespace terrace {

class ResidualWatch {
 public:
  // A plan begins, whose model says this. Until its own steps tell, it is corrected by those of the one
  // before.
  void begin(const Prediction& modelled);
  // A step by it, in order. True where the residual has just become known: corrected() says something new.
  [[nodiscard]] bool add(const Prediction::Measured& step);
  [[nodiscard]] Prediction corrected(Prediction modelled) const;
  // The median of the steps since then and of this one, with this one's bytes.
  [[nodiscard]] Prediction::Measured typical(const Prediction::Measured& last) const;

 private:
  double modelled_seconds_ = 0, modelled_stall_ = 0;
  double share_ = 0, stall_ = 0;            // of the modelled seconds; seconds
  int steps_ = 0;                           // by this plan
  std::vector<Prediction::Measured> seen_;  // those that tell, then those since; bounded
};

}  // namespace terrace
