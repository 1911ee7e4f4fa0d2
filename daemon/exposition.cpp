#include "daemon/exposition.hpp"

namespace terrace {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;

MetricFamily family(const char* name, const char* help, MetricType type) {
  MetricFamily result;
  result.name = name;
  result.help = help;
  result.type =
      type == MetricType::kCounter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
  return result;
}

void add_sample(MetricFamily& to, std::vector<ClientMetric::Label> labels, double value) {
  ClientMetric sample;
  sample.label = std::move(labels);
  if (to.type == prometheus::MetricType::Counter) {
    sample.counter.value = value;
  } else {
    sample.gauge.value = value;
  }
  to.metric.push_back(std::move(sample));
}

MetricFamily family_of(NodeMetric metric) {
  const NodeMetricInfo& info = node_metric_table()[static_cast<std::size_t>(metric)];
  return family(info.name, info.help, info.type);
}

const char* tier_name(std::size_t tier) { return name_of(static_cast<TierId>(tier)); }

}  // namespace

std::vector<MetricFamily> Exposition::Collect() const {
  const ClientRegistry::View view = registry_.view(ClientRegistry::Ended::kLeftOut);
  std::vector<MetricFamily> families;
  for (const MetricInfo& info : metric_table()) {
    MetricFamily& of_metric = families.emplace_back(family(info.name, info.help, info.type));
    for (const auto& [job, totals] : view.jobs) {
      for (std::size_t i = 0; i < info.slots; ++i) {
        std::vector<ClientMetric::Label> labels{{"job", job}};
        for (auto& [name, value] : labels_of(info, i)) labels.push_back({std::move(name), std::move(value)});
        add_sample(of_metric, std::move(labels), exposed_value(info, totals.values[info.first_slot + i]));
      }
    }
  }
  MetricFamily leases = family_of(NodeMetric::kLeaseBytes);
  for (const auto& [job, totals] : view.jobs) {
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      add_sample(leases, {{"job", job}, {"tier", tier_name(tier)}},
                 static_cast<double>(totals.leased[tier].count()));
    }
  }
  MetricFamily budgets = family_of(NodeMetric::kNodeBudgetBytes);
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    add_sample(budgets, {{"tier", tier_name(tier)}}, static_cast<double>(view.budget[tier].count()));
  }
  MetricFamily clients = family_of(NodeMetric::kClients);
  add_sample(clients, {}, static_cast<double>(view.live.size()));
  MetricFamily joined = family_of(NodeMetric::kClientsJoined);
  add_sample(joined, {}, static_cast<double>(view.joined_total));
  for (MetricFamily* own : {&leases, &budgets, &clients, &joined}) families.push_back(std::move(*own));
  return families;
}

}  // namespace terrace
