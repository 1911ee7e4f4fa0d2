// What the registry knows, as Prometheus metric families: the table of runtime/metrics.def, by job.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <memory>
#include <vector>

#include "daemon/client_registry.hpp"

namespace terrace {

class Exposition final : public prometheus::Collectable {
 public:
  // Precondition: the registry outlives the exposition.
  explicit Exposition(ClientRegistry& registry) : registry_(registry) {}
  [[nodiscard]] std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  ClientRegistry& registry_;
};

}  // namespace terrace
