// What everything that a layer is made of needs to declare its parameters and its sites.
#pragma once

#include <string>

#include "examples/moe_trainer/model/linear.hpp"
#include "examples/moe_trainer/model/row_map.hpp"

namespace terrace::trainer {

struct LayerScope {
  Session& session;
  ParameterGroup& parameters;
  RowMaps& maps;
  const Config& config;
  int layer;

  [[nodiscard]] std::string parameter(const std::string& name) const {
    return "layer." + std::to_string(layer) + "." + name;
  }
  [[nodiscard]] SiteId site(const std::string& group, SiteKind kind) const {
    return declare_site(session, {.layer = layer, .group = group, .kind = kind});
  }
  [[nodiscard]] Parameter& matrix(const std::string& name, std::int64_t out, std::int64_t in) const {
    return adapted(name, parameters.declare(trainer::matrix(parameter(name), out, in)));
  }
  // (hidden, in): writes to the residual stream.
  [[nodiscard]] Parameter& residual_matrix(const std::string& name, std::int64_t in) const {
    return adapted(name, parameters.declare(trainer::residual_matrix(parameter(name), config.model.hidden, in,
                                                                     config.model.layers)));
  }
  // A matrix, or the last two dimensions a stack of them, that may have adapters: they are declared where the
  // configuration names it.
  Parameter& adapted(const std::string& name, Parameter& base) const;
  [[nodiscard]] Parameter& vector(const std::string& name, std::vector<std::int64_t> shape,
                                  double start) const {
    return parameters.declare(vector_of(parameter(name), std::move(shape), start));
  }
  [[nodiscard]] Norm norm(const std::string& name, std::int64_t width, double eps) const {
    return {.weight = &vector(name, {width}, 1), .eps = static_cast<float>(eps)};
  }
};

}  // namespace terrace::trainer
