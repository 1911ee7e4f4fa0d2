// Who moves parameters while walks go through the model: told where a walk stands.
#pragma once

#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

class GroupKeeper {
 public:
  virtual ~GroupKeeper() = default;
  // A walk reads the group from now on, and adds to its gradients.
  virtual void before_use(ParameterGroup& group) = 0;
  // The walk adds no more to the group's gradients, and reads it no more.
  virtual void after_gradients(ParameterGroup& group) = 0;
};

}  // namespace terrace::trainer
