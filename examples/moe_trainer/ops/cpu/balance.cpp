// The balance of the experts' load: the bias in its two forms, and the loss of each sequence.
//   L = alpha sum_e f_e P_e = alpha / n sum_t u_t,   u_t = sum_e f_e p_te,   p_te = score_te / sum of scores
//   dL/dp_te = alpha f_e / n;   sigmoid: dl = alpha / n (f_e - u_t) / Z s (1 - s);   softmax: alpha / n p
//   (f_e - u_t)
// n is the sequence's tokens.
#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/router_scores.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kTokens = 64;  // of a task

struct Sequence {
  std::int64_t begin, end;
};
Sequence sequence_of(const SequenceLoss& op, std::int64_t index) {
  if (op.packing) return {op.packing.starts[index], op.packing.starts[index + 1]};
  return {index * op.length, (index + 1) * op.length};
}

// One token's u; its gradient is added to d_logits.
float sequence_token(const SequenceLoss& op, std::int64_t token, float rate, const float* share,
                     float* scores) {
  const float* logits = op.logits + token * op.experts;
  scores_of(op.score, logits, op.experts, scores);
  float total = 0, along = 0;
  for (std::int64_t e = 0; e < op.experts; ++e) {
    total += scores[e];
    along += share[e] * scores[e];
  }
  if (total == 0) return 0;
  const float u = along / total;
  if (op.d_logits == nullptr) return u;
  float* d_logits = op.d_logits + token * op.experts;
  for (std::int64_t e = 0; e < op.experts; ++e) {
    const float slope = op.score == RouterScore::kSoftmax ? 1.0F : 1.0F / (1.0F + std::exp(logits[e]));
    d_logits[e] += rate * (share[e] - u) * scores[e] / total * slope;
  }
  return u;
}

// What an expert needs for a token to select it: cutoff - score.
void required_of(const QuantileBias& op, std::int64_t token, float* scores, float* biased) {
  scores_of(op.score, op.logits + token * op.experts, op.experts, scores);
  for (std::int64_t e = 0; e < op.experts; ++e) biased[e] = scores[e] + op.bias[e];
  std::nth_element(biased, biased + op.top_k, biased + op.experts, std::greater<>());
  const float cutoff = biased[op.top_k];
  for (std::int64_t e = 0; e < op.experts; ++e) scores[e] = cutoff - scores[e];
}

}  // namespace

void compute(const BalanceBias& op, std::byte*) {
  const auto count = [&](std::int64_t e) {
    return std::int64_t{op.counts != nullptr ? op.counts[e] : op.offsets[e + 1] - op.offsets[e]};
  };
  std::int64_t total = 0;
  for (std::int64_t e = 0; e < op.experts; ++e) total += count(e);
  for (std::int64_t e = 0; e < op.experts; ++e) {
    const std::int64_t short_of_mean = total - count(e) * op.experts;  // times the number of experts: exact
    op.bias[e] += op.gamma * static_cast<float>((short_of_mean > 0) - (short_of_mean < 0));
  }
}

Bytes scratch_bytes(const SequenceLoss& op) {
  if (op.experts < 1 || op.experts > Permute::kMostExperts) {
    throw std::runtime_error("sequence loss: 1 to 4096 experts");
  }
  if (!op.packing && (op.length < 1 || op.tokens % op.length != 0)) {
    throw std::runtime_error("sequence loss: the length divides the tokens");
  }
  const std::int64_t floats = op.experts * (1 + worker_count()) + op.tokens;
  return Bytes(static_cast<std::uint64_t>(floats) * sizeof(float));
}

void compute(const SequenceLoss& op, std::byte* scratch) {
  auto* share = reinterpret_cast<float*>(scratch);
  float* u = share + op.experts;
  float* rows = u + op.tokens;
  const std::int64_t sequences = op.packing ? op.packing.sequences : op.tokens / op.length;
  double loss = 0;
  for (std::int64_t index = 0; index < sequences; ++index) {
    const auto [begin, end] = sequence_of(op, index);
    if (end <= begin) continue;
    const auto tokens = static_cast<double>(end - begin);
    std::fill_n(share, op.experts, 0.0F);
    for (std::int64_t slot = begin * op.top_k; slot < end * op.top_k; ++slot) {
      if (op.expert[slot] >= 0) share[op.expert[slot]] += 1;
    }
    const double whole = static_cast<double>(op.experts) / (tokens * static_cast<double>(op.top_k));
    for (std::int64_t e = 0; e < op.experts; ++e) share[e] *= static_cast<float>(whole);
    const double rate = static_cast<double>(op.alpha) / tokens;
    parallel_for((end - begin + kTokens - 1) / kTokens, [&, begin = begin, end = end](std::int64_t task,
                                                                                      std::int64_t worker) {
      const std::int64_t last = std::min(end, begin + (task + 1) * kTokens);
      for (std::int64_t t = begin + task * kTokens; t < last; ++t) {
        u[t] = sequence_token(op, t, static_cast<float>(rate), share, rows + worker * op.experts);
      }
    });
    double sum = 0;
    for (std::int64_t t = begin; t < end; ++t) sum += static_cast<double>(u[t]);
    loss += rate * sum;
  }
  if (op.loss != nullptr) *op.loss += static_cast<float>(loss);
}

Bytes scratch_bytes(const QuantileBias& op) {
  if (op.top_k < 1 || op.top_k >= op.experts)
    throw std::runtime_error("quantile bias: top_k is 1 to experts - 1");
  const std::int64_t floats = op.experts * (op.tokens + 2 * worker_count());
  return Bytes(static_cast<std::uint64_t>(floats) * sizeof(float));
}

void compute(const QuantileBias& op, std::byte* scratch) {
  if (op.tokens == 0) return;
  auto* required = reinterpret_cast<float*>(scratch);  // (E, T)
  float* rows = required + op.experts * op.tokens;
  parallel_for((op.tokens + kTokens - 1) / kTokens, [&](std::int64_t task, std::int64_t worker) {
    float* scores = rows + worker * 2 * op.experts;
    const std::int64_t end = std::min(op.tokens, (task + 1) * kTokens);
    for (std::int64_t t = task * kTokens; t < end; ++t) {
      required_of(op, t, scores, scores + op.experts);
      for (std::int64_t e = 0; e < op.experts; ++e) required[e * op.tokens + t] = scores[e];
    }
  });
  const std::int64_t rank = (op.top_k * op.tokens + op.experts - 1) / op.experts - 1;
  parallel_for(op.experts, [&](std::int64_t e, std::int64_t) {
    float* column = required + e * op.tokens;
    std::nth_element(column, column + rank, column + op.tokens);
    op.bias[e] = column[rank];
  });
  double mean = 0;
  for (std::int64_t e = 0; e < op.experts; ++e) mean += static_cast<double>(op.bias[e]);
  mean /= static_cast<double>(op.experts);
  for (std::int64_t e = 0; e < op.experts; ++e) op.bias[e] -= static_cast<float>(mean);
}

}  // namespace terrace::trainer::cpu
