#include "examples/moe_trainer/ops/cpu/dsa_index.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

// Probabilities summed over heads and normalised to one; padded slots are zero.
void attention_target(const DsaShape& shape, const DsaSizes& sizes, const Selected& chosen, const float* p,
                      float* target) {
  Vec all = zero();
  for (std::int64_t s = 0; s < sizes.slots; s += kLanes) {
    Vec total = zero();
    for (std::int64_t h = 0; h < shape.heads; ++h) total += load(p + h * sizes.slots + s);
    for (std::int64_t lane = std::clamp<std::int64_t>(chosen.count - s, 0, kLanes); lane < kLanes; ++lane) {
      total[lane] = 0;
    }
    all += total;
    store(target + s, total);
  }
  const float mass = sum(all);
  const float factor = mass > 0 ? 1.0F / mass : 0.0F;
  for (std::int64_t s = 0; s < sizes.slots; s += kLanes) store(target + s, load(target + s) * factor);
}

// Scores become weight * (softmax - target); returns the loss sum p (log p - log softmax).
float score_gradient(const Selected& chosen, float weight, const float* target, float* scores) {
  float top = -std::numeric_limits<float>::infinity();
  for (std::int64_t s = 0; s < chosen.count; ++s) top = std::max(top, scores[s]);
  Vec total = zero();
  for (std::int64_t s = 0; s < chosen.count; s += kLanes) {
    Vec e = exp(load(scores + s) - top);
    for (std::int64_t lane = chosen.count - s; lane < kLanes; ++lane) e[lane] = 0;
    total += e;
  }
  const float z = sum(total), lse = top + std::log(z);
  Vec loss = zero();
  for (std::int64_t s = 0; s < chosen.count; s += kLanes) {
    const Vec p = load(target + s), score = load(scores + s);
    // A probability of zero (padding too) adds nothing, whatever its logarithm.
    loss += p > 0.0F ? p * (log(max(p, splat(std::numeric_limits<float>::min()))) - (score - lse)) : zero();
    store(scores + s, weight * (exp(score - lse) - p));
  }
  for (std::int64_t s = chosen.count; s < round_up_to(chosen.count, kLanes); ++s) scores[s] = 0;
  return sum(loss);
}

}  // namespace

float index_backward(const DsaBackward& op, const DsaSizes& sizes, std::int64_t token, const Selected& chosen,
                     const float* p, const IndexScratch& work, float* panel, float* d_products) {
  const DsaShape& shape = op.shape;
  const std::int64_t row = shape.index_heads * shape.index_width, slots = sizes.slots;
  const Rows keys{op.in.index_k + token / shape.length * shape.length * shape.index_width, shape.index_width,
                  shape.index_width};
  const float* weight = op.in.index_w + token * shape.index_heads;
  pad_heads({shape.index_heads, sizes.index_heads, shape.index_width, sizes.index},
            op.in.index_q + token * row, work.q);
  gather_dot({sizes.index_heads, sizes.index, slots}, work.q, keys, chosen, panel, d_products);
  for (std::int64_t s = 0; s < slots; s += kLanes) {
    Vec total = zero();
    for (std::int64_t h = 0; h < shape.index_heads; ++h) {
      total += max(load(d_products + h * slots + s), zero()) * weight[h];
    }
    store(work.scores + s, total * sizes.index_scale);
  }
  attention_target(shape, sizes, chosen, p, work.target);
  const float loss =
      chosen.count == 0 ? 0.0F : score_gradient(chosen, op.index_loss_weight, work.target, work.scores);
  for (std::int64_t h = 0; h < shape.index_heads; ++h) {
    float* product = d_products + h * slots;
    Vec d_weight = zero();
    for (std::int64_t s = 0; s < chosen.count; s += kLanes) {
      const Vec a = load(product + s), d_score = load(work.scores + s) * sizes.index_scale;
      d_weight += d_score * max(a, zero());
      store(product + s, a > 0.0F ? d_score * weight[h] : zero());
    }
    op.d_index_w[token * shape.index_heads + h] = sum(d_weight);
  }
  gather_sum({shape.index_heads, slots}, d_products, keys, chosen, op.d_index_q + token * row);
  return loss;
}

}  // namespace terrace::trainer::cpu
