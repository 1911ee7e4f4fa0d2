#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/trainer/oracle.hpp"

namespace terrace::trainer::oracle {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
Values row_of(const Values& values, std::int64_t row, std::int64_t width) {
  return {values.begin() + row * width, values.begin() + (row + 1) * width};
}
// Indices of the largest first, equal ones in order.
std::vector<std::int64_t> descending(const Values& values) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return values[at(a)] > values[at(b)]; });
  return order;
}

}  // namespace

Values router_scores(RouterScore score, const Values& logits) {
  Values scores;
  if (score == RouterScore::kSigmoid) {
    for (const double logit : logits) scores.push_back(sigmoid(logit));
    return scores;
  }
  const double top = *std::max_element(logits.begin(), logits.end());
  double total = 0;
  for (const double logit : logits) total += std::exp(logit - top);
  for (const double logit : logits) scores.push_back(std::exp(logit - top) / total);
  return scores;
}

Values routed_weights(const RouterShape& s, const Values& logits, const std::vector<std::int32_t>& expert) {
  Values weight;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const Values scores = router_scores(s.score, row_of(logits, t, s.experts));
    double total = 0;
    for (std::int64_t j = 0; j < s.top_k; ++j) total += scores[at(expert[at(t * s.top_k + j)])];
    if (s.renormalise == Renormalise::kNo) total = 1;
    for (std::int64_t j = 0; j < s.top_k; ++j) {
      weight.push_back(s.scaling * scores[at(expert[at(t * s.top_k + j)])] / total);
    }
  }
  return weight;
}

Routed route(const RouterShape& s, const Values& logits, const Values& bias) {
  Routed routed;
  const std::int64_t size = s.experts / s.groups;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    Values biased = router_scores(s.score, row_of(logits, t, s.experts)), group;
    for (std::int64_t e = 0; e < s.experts; ++e) biased[at(e)] += bias[at(e)];
    for (std::int64_t g = 0; g < s.groups; ++g) {
      Values members = row_of(biased, g, size);
      std::sort(members.rbegin(), members.rend());
      group.push_back(members[0] + (size > 1 ? members[1] : 0));
    }
    const std::vector<std::int64_t> groups = descending(group);
    const auto kept_end = groups.begin() + std::min(s.groups, s.top_groups);
    std::int64_t chosen = 0;
    for (const std::int64_t e : descending(biased)) {
      if (chosen == s.top_k || std::find(groups.begin(), kept_end, e / size) == kept_end) continue;
      routed.expert.push_back(static_cast<std::int32_t>(e));
      ++chosen;
    }
  }
  routed.weight = routed_weights(s, logits, routed.expert);
  return routed;
}

double sequence_loss(const SequenceLoss& op, const std::vector<std::int32_t>& starts, const Values& logits,
                     const std::vector<std::int32_t>& expert) {
  double loss = 0;
  for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
    const double tokens = starts[i + 1] - starts[i];
    Values f(at(op.experts)), p(at(op.experts));
    for (std::int64_t t = starts[i]; t < starts[i + 1]; ++t) {
      for (std::int64_t j = 0; j < op.top_k; ++j) {
        const std::int32_t e = expert[at(t * op.top_k + j)];
        if (e >= 0) f[at(e)] += static_cast<double>(op.experts) / (static_cast<double>(op.top_k) * tokens);
      }
      const Values scores = router_scores(op.score, row_of(logits, t, op.experts));
      const double total = std::accumulate(scores.begin(), scores.end(), 0.0);
      for (std::size_t e = 0; e < scores.size(); ++e) p[e] += scores[e] / total / tokens;
    }
    loss += static_cast<double>(op.alpha) * inner(f, p);
  }
  return loss;
}

Values quantile_bias(const QuantileBias& op, const Values& logits, const Values& bias) {
  std::vector<Values> required(at(op.experts));
  for (std::int64_t t = 0; t < op.tokens; ++t) {
    const Values scores = router_scores(op.score, row_of(logits, t, op.experts));
    Values biased = scores;
    for (std::size_t e = 0; e < scores.size(); ++e) biased[e] += bias[e];
    std::sort(biased.rbegin(), biased.rend());
    for (std::size_t e = 0; e < scores.size(); ++e) required[e].push_back(biased[at(op.top_k)] - scores[e]);
  }
  Values result;
  double mean = 0;
  for (Values& column : required) {
    std::sort(column.begin(), column.end());
    result.push_back(column[at((op.top_k * op.tokens + op.experts - 1) / op.experts - 1)]);
    mean += result.back() / static_cast<double>(op.experts);
  }
  for (double& value : result) value -= mean;
  return result;
}

Permuted permute(const Permute& op, const std::vector<std::int32_t>& expert, const Values& weight,
                 const std::vector<std::int32_t>& replica_starts, const std::vector<std::int32_t>& replicas) {
  Permuted result;
  result.row.assign(expert.size(), -1);
  const std::int64_t places = replica_starts.empty() ? op.experts : op.places;
  std::vector<std::vector<std::int32_t>> slots_of(at(places));
  for (std::int32_t e = 0; e < op.experts; ++e) {
    std::vector<std::int32_t> mine;
    for (std::size_t i = 0; i < expert.size(); ++i) {
      if (expert[i] == e) mine.push_back(static_cast<std::int32_t>(i));
    }
    result.counts.push_back(static_cast<std::int32_t>(mine.size()));
    if (op.capacity > 0 && static_cast<std::int64_t>(mine.size()) > op.capacity) {
      Values weights;
      for (const std::int32_t slot : mine) weights.push_back(weight[at(slot)]);
      std::vector<std::int32_t> kept;
      for (const std::int64_t i : descending(weights)) kept.push_back(mine[at(i)]);
      kept.resize(at(op.capacity));
      std::sort(kept.begin(), kept.end());
      mine = kept;
    }
    for (std::size_t rank = 0; rank < mine.size(); ++rank) {
      std::int64_t place = e;
      if (!replica_starts.empty()) {
        const std::int64_t first = replica_starts[at(e)], count = replica_starts[at(e + 1)] - first;
        place = replicas[at(first) + rank % at(count)];
      }
      slots_of[at(place)].push_back(mine[rank]);
    }
  }
  for (const auto& slots : slots_of) {
    result.offsets.push_back(static_cast<std::int32_t>(result.source.size()));
    for (const std::int32_t slot : slots) {
      result.row[at(slot)] = static_cast<std::int32_t>(result.source.size());
      result.source.push_back(slot);
    }
  }
  result.offsets.push_back(static_cast<std::int32_t>(result.source.size()));
  result.source.resize(expert.size(), -1);
  return result;
}

}  // namespace terrace::trainer::oracle
