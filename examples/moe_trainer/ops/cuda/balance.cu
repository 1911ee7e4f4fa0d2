// The balance of the experts' load: the bias in its two forms, and the loss of each sequence.
//   L = alpha sum_e f_e P_e = alpha / n sum_t u_t,   u_t = sum_e f_e p_te,   p_te = score_te / sum of scores
//   sigmoid: dl_te = alpha / n (f_e - u_t) p_te (1 - s_te);   softmax: alpha / n (f_e - u_t) p_te
// f_e = E / (k n) times the slots that chose e, n the sequence's tokens. Slots are counted by integer
// atomics: their order does not change a sum. Quantile form: a token's cutoff is its (k + 1)-th best score +
// bias; the bias is the ceil(k T / E)-th smallest cutoff - score over tokens, found digit by digit, less the
// mean over experts.          logits: (T, E)
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/packing.cuh"
#include "examples/moe_trainer/ops/cuda/router_scores.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kTokensPerBlock = 4;
constexpr int kThreads = kTokensPerBlock * kWarp;
constexpr int kSumThreads = 1024;
constexpr int kExpertsPerBlock = 8;  // a sector of a row of logits
constexpr int kDigit = 256;

__global__ void balance_bias(BalanceBias op) {
  const std::int64_t e = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const auto count = [&](std::int64_t i) {
    return std::int64_t{op.counts != nullptr ? op.counts[i] : op.offsets[i + 1] - op.offsets[i]};
  };
  if (e >= op.experts) return;
  std::int64_t total = 0;
  if (op.counts != nullptr) {
    for (std::int64_t i = 0; i < op.experts; ++i) total += op.counts[i];
  } else {
    total = std::int64_t{op.offsets[op.experts]} - op.offsets[0];
  }
  const std::int64_t own = count(e) * op.experts;
  if (total > own) op.bias[e] += op.gamma;
  if (total < own) op.bias[e] -= op.gamma;
}

struct Sequence {
  std::int64_t index, tokens;
};
__device__ Sequence sequence_of(const SequenceLoss& op, std::int64_t token) {
  if (!op.packing) return {token / op.length, op.length};
  const std::int64_t index = sequence_index(op.packing, token);
  return {index, op.packing.starts[index + 1] - op.packing.starts[index]};
}

__global__ void count_choices(SequenceLoss op, std::int32_t* counts) {
  const std::int64_t slot = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (slot >= op.tokens * op.top_k) return;
  const std::int32_t expert = op.expert[slot];
  if (expert < 0 || expert >= op.experts) return;
  atomicAdd(counts + sequence_of(op, slot / op.top_k).index * op.experts + expert, 1);
}

// One warp a token: its part of the loss, and its gradient.
__global__ void sequence_tokens(SequenceLoss op, const std::int32_t* counts, float* token_loss) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarp;
  if (token >= op.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int experts = static_cast<int>(op.experts);
  const float* logits = op.logits + token * op.experts;
  const Sequence sequence = sequence_of(op, token);
  const std::int32_t* chosen = counts + sequence.index * op.experts;
  const auto tokens = static_cast<float>(sequence.tokens);
  const float whole = static_cast<float>(op.experts) / (tokens * static_cast<float>(op.top_k));
  const ScoreBase base = score_base(op.score, true, experts, [=](int e) { return logits[e]; });
  float along = 0.0F;
  for (int e = lane; e < experts; e += kWarp) {
    along += whole * static_cast<float>(chosen[e]) * share_of(op.score, logits[e], base);
  }
  const float u = warp_sum(along);
  const float rate = op.alpha / tokens;
  if (lane == 0) token_loss[token] = rate * u;
  if (op.d_logits == nullptr) return;
  for (int e = lane; e < experts; e += kWarp) {
    const float slope = op.score == RouterScore::kSoftmax ? 1.0F : 1.0F / (1.0F + expf(logits[e]));
    op.d_logits[token * op.experts + e] +=
        rate * (whole * static_cast<float>(chosen[e]) - u) * share_of(op.score, logits[e], base) * slope;
  }
}

__global__ void __launch_bounds__(kSumThreads) add_sum(const float* values, std::int64_t count, float* sum) {
  float own = 0.0F;
  for (std::int64_t i = threadIdx.x; i < count; i += kSumThreads) own += values[i];
  const float total = block_sum<kSumThreads>(own);
  if (threadIdx.x == 0) *sum += total;
}

struct TokenCut {
  float cutoff;
  ScoreBase base;
};
__global__ void find_cutoffs(QuantileBias op, TokenCut* cuts) {
  extern __shared__ unsigned cut_memory[];  // (tokens a block, E)
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarp;
  if (token >= op.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int experts = static_cast<int>(op.experts);
  unsigned* choice = cut_memory + (threadIdx.x / kWarp) * op.experts;
  const float* logits = op.logits + token * op.experts;
  const ScoreBase base = score_base(op.score, false, experts, [=](int e) { return logits[e]; });
  for (int e = lane; e < experts; e += kWarp) {
    choice[e] = order_key(share_of(op.score, logits[e], base) + op.bias[e]);
  }
  WarpSelection best(choice, experts);
  for (std::int64_t j = 0; j <= op.top_k; ++j) (void)best.take();
  if (lane == 0) cuts[token] = {value_of_key(best.key()), base};
}

// Eight experts a block; threads of one token's eight lie side by side. required (E): not yet centred.
__global__ void __launch_bounds__(kSumThreads)
    find_quantiles(QuantileBias op, const TokenCut* cuts, float* required) {
  __shared__ std::int32_t histogram[kExpertsPerBlock][kDigit];
  __shared__ unsigned prefix[kExpertsPerBlock];
  __shared__ std::int64_t rank[kExpertsPerBlock];  // among the values of that prefix, from 1
  const int own = static_cast<int>(threadIdx.x) % kExpertsPerBlock;
  const std::int64_t expert = std::int64_t{blockIdx.x} * kExpertsPerBlock + own;
  if (threadIdx.x < kExpertsPerBlock) {
    prefix[own] = 0;
    rank[own] = (op.top_k * op.tokens + op.experts - 1) / op.experts;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = static_cast<int>(threadIdx.x); i < kExpertsPerBlock * kDigit; i += kSumThreads) {
      histogram[i / kDigit][i % kDigit] = 0;
    }
    __syncthreads();
    const unsigned known = shift == 24 ? 0U : ~0U << (shift + 8);
    if (expert < op.experts) {
#pragma unroll 4
      for (std::int64_t token = threadIdx.x / kExpertsPerBlock; token < op.tokens;
           token += kSumThreads / kExpertsPerBlock) {
        const TokenCut cut = cuts[token];
        const unsigned key =
            order_key(cut.cutoff - share_of(op.score, op.logits[token * op.experts + expert], cut.base));
        if ((key & known) == prefix[own]) atomicAdd(&histogram[own][(key >> shift) & 0xffU], 1);
      }
    }
    __syncthreads();
    if (threadIdx.x < kExpertsPerBlock) {
      int digit = 0;
      while (digit < kDigit - 1 && histogram[own][digit] < rank[own]) rank[own] -= histogram[own][digit++];
      prefix[own] |= static_cast<unsigned>(digit) << shift;
    }
    __syncthreads();
  }
  if (threadIdx.x < kExpertsPerBlock && expert < op.experts) required[expert] = value_of_key(prefix[own]);
}

__global__ void __launch_bounds__(kSumThreads) centre(QuantileBias op, const float* required) {
  float own = 0.0F;
  for (std::int64_t e = threadIdx.x; e < op.experts; e += kSumThreads) own += required[e];
  const float mean = block_sum<kSumThreads>(own) / static_cast<float>(op.experts);
  for (std::int64_t e = threadIdx.x; e < op.experts; e += kSumThreads) op.bias[e] = required[e] - mean;
}

}  // namespace

void launch(OpCall& call, const BalanceBias& op) {
  call.set_shape({op.experts});
  call.launch(balance_bias, grid_for(op.experts), op);
}

void launch(OpCall& call, const SequenceLoss& op) {
  call.set_shape({op.tokens, op.experts, op.top_k, op.length});
  call.require(op.experts >= 1 && op.experts <= Permute::kMostExperts, "1 to 4096 experts");
  call.require(op.packing || (op.length >= 1 && op.tokens % op.length == 0), "the length divides the tokens");
  const std::int64_t sequences = op.packing ? op.packing.sequences : op.tokens / op.length;
  if (op.tokens == 0 || sequences == 0) return;
  auto* counts = call.scratch<std::int32_t>(sequences * op.experts);
  auto* token_loss = call.scratch<float>(op.tokens);
  call.zero(reinterpret_cast<float*>(counts), sequences * op.experts);
  call.launch(count_choices, grid_for(op.tokens * op.top_k), op, counts);
  call.launch(sequence_tokens, Grid{.x = ceil_div(op.tokens, kTokensPerBlock), .threads = kThreads}, op,
              static_cast<const std::int32_t*>(counts), token_loss);
  if (op.loss == nullptr) return;
  call.launch(add_sum, Grid{.threads = kSumThreads}, static_cast<const float*>(token_loss), op.tokens,
              op.loss);
}

void launch(OpCall& call, const QuantileBias& op) {
  call.set_shape({op.tokens, op.experts, op.top_k});
  call.require(op.top_k >= 1 && op.top_k < op.experts, "top_k is 1 to experts - 1");
  call.require(op.experts <= Permute::kMostExperts, "at most 4096 experts");
  if (op.tokens == 0) return;
  auto* cuts = call.scratch<TokenCut>(op.tokens);
  auto* required = call.scratch<float>(op.experts);
  call.launch(find_cutoffs,
              Grid{.x = ceil_div(op.tokens, kTokensPerBlock),
                   .threads = kThreads,
                   .shared_bytes = kTokensPerBlock * static_cast<std::size_t>(op.experts) * sizeof(unsigned)},
              op, cuts);
  call.launch(find_quantiles, Grid{.x = ceil_div(op.experts, kExpertsPerBlock), .threads = kSumThreads}, op,
              static_cast<const TokenCut*>(cuts), required);
  call.launch(centre, Grid{.threads = kSumThreads}, op, static_cast<const float*>(required));
}

}  // namespace terrace::trainer::cuda
