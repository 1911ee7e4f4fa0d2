// Attention, one block a token and head:
//   do = dy s, s = sigmoid(gate);  dgate = dy o s (1 - s);  delta = sum(do o)
//   dP = do V[S_t];  da = P (dP - delta) scale;  dQ = da K[S_t];  dsink = -sum over tokens of p_sink delta
// Indexer, one block a token; p = P summed over heads, L1-normalised; I = index_scale sum_h w_h relu(x_h),
// x_h = qI_h . kI:
//   KL = sum p (log p - log softmax(I));  dI = weight (softmax(I) - p);  dw_h = index_scale sum dI relu(x_h)
//   dx_h = index_scale dI w_h [x_h > 0];  dqI_h = dx_h kI[S_t]
// Keys, one block a key and some columns, the tokens that chose it in ascending order (a token's positions
// ascend, so each is found by bisection), their heads in order:
//   dK_s += da_th Q_th;  dV_s += P_th do_th;  dkI_s += dx_th qI_th
// Tokens go in turns, so that what is kept of them (P, da, do, dx) stays within 64 MiB.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/dsa.hpp"
#include "examples/moe_trainer/ops/cuda/dsa_attention.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

// What a turn keeps of its tokens, n = turn.count.
struct Kept {
  float* p;        // (n, H, slots)
  float* d_logit;  // (n, H, slots)
  float* d_o;      // (n, H, DV)
  float* d_x;      // (n, HI, slots)
  float* share;    // (n, slots): the indexer's target
  float* d_score;  // (n, slots)
};

struct TokenBackward {
  DsaAttention attention;
  DsaTurn turn;
  Kept kept;
  const float* v;
  const float* gate;
  const float* d_y;
  float* d_q;
  float* d_gate;
  float* sink_terms;  // (B T, H); null: no sink
};

__global__ void __launch_bounds__(kDsaThreads) token_backward(TokenBackward a) {
  const DsaSizes& sizes = a.attention.sizes;
  const std::int64_t token = a.turn.first + blockIdx.x / sizes.heads;
  const std::int64_t head = blockIdx.x % sizes.heads;
  const DsaChosen chosen = dsa_chosen(sizes, a.attention.selected, token);
  float* p = a.kept.p + std::int64_t{blockIdx.x} * sizes.slots;
  float* d_logit = a.kept.d_logit + std::int64_t{blockIdx.x} * sizes.slots;
  float* d_o = a.kept.d_o + std::int64_t{blockIdx.x} * sizes.value_width;
  const float sink_share = dsa_probabilities(a.attention, chosen, token, head, p);
  const std::int64_t row = (token * sizes.heads + head) * sizes.value_width;
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x; c < sizes.value_width; c += kDsaThreads) {
    const float o = dsa_weighted(sizes, chosen, p, a.v, sizes.value_width, c);
    const float s = a.gate == nullptr ? 1.0F : sigmoid(a.gate[row + c]);
    const float d_y = a.d_y[row + c];
    if (a.gate != nullptr && a.d_gate != nullptr) a.d_gate[row + c] = d_y * o * s * (1.0F - s);
    d_o[c] = d_y * s;
    product += d_y * s * o;
  }
  const float delta = block_sum<kDsaThreads>(product);  // d_o is visible to the block from here on
  if (a.sink_terms != nullptr && threadIdx.x == 0)
    a.sink_terms[token * sizes.heads + head] = -sink_share * delta;
  for (std::int64_t slot = threadIdx.x / kWarp; slot < sizes.slots; slot += kDsaThreads / kWarp) {
    const float d_p = dsa_dot(chosen, slot, d_o, a.v, sizes.value_width);
    if (threadIdx.x % kWarp == 0) d_logit[slot] = p[slot] * (d_p - delta) * sizes.scale;
  }
  __syncthreads();
  float* d_q = a.d_q + (token * sizes.heads + head) * sizes.key_width;
  for (std::int64_t c = threadIdx.x; c < sizes.key_width; c += kDsaThreads) {
    d_q[c] = dsa_weighted(sizes, chosen, d_logit, a.attention.k, sizes.key_width, c);
  }
}

struct IndexBackward {
  DsaSizes sizes;
  DsaTurn turn;
  Kept kept;
  const std::int32_t* selected;
  const float* q;
  const float* k;
  const float* w;
  float weight;
  float* d_q;
  float* d_w;
  float* losses;  // (B T)
};

// relu(x_h) into kept.d_x and I into kept.d_score, a warp a slot.
__device__ void index_forward(const IndexBackward& a, const DsaChosen& chosen, std::int64_t token) {
  const DsaSizes& sizes = a.sizes;
  for (std::int64_t slot = threadIdx.x / kWarp; slot < sizes.slots; slot += kDsaThreads / kWarp) {
    float score = 0.0F;
    for (std::int64_t head = 0; head < sizes.index_heads; ++head) {
      const std::int64_t row = token * sizes.index_heads + head;
      const float x =
          fmaxf(dsa_dot(chosen, slot, a.q + row * sizes.index_width, a.k, sizes.index_width), 0.0F);
      score += a.w[row] * x;
      if (threadIdx.x % kWarp == 0) {
        a.kept.d_x[(std::int64_t{blockIdx.x} * sizes.index_heads + head) * sizes.slots + slot] = x;
      }
    }
    if (threadIdx.x % kWarp == 0) {
      a.kept.d_score[std::int64_t{blockIdx.x} * sizes.slots + slot] =
          chosen.positions[slot] >= 0 ? score * sizes.index_scale : -INFINITY;
    }
  }
  __syncthreads();
}

// I becomes dI; returns the token's KL.
__device__ float index_loss(const IndexBackward& a, const DsaChosen& chosen) {
  const DsaSizes& sizes = a.sizes;
  float* score = a.kept.d_score + std::int64_t{blockIdx.x} * sizes.slots;
  float* share = a.kept.share + std::int64_t{blockIdx.x} * sizes.slots;
  const float* p = a.kept.p + std::int64_t{blockIdx.x} * sizes.heads * sizes.slots;
  float largest = -INFINITY;
  float mass = 0.0F;
  for (std::int64_t slot = threadIdx.x; slot < sizes.slots; slot += kDsaThreads) {
    largest = fmaxf(largest, score[slot]);
    float over_heads = 0.0F;
    for (std::int64_t head = 0; head < sizes.heads; ++head) over_heads += p[head * sizes.slots + slot];
    share[slot] = over_heads;
    mass += over_heads;
  }
  const float top = block_max<kDsaThreads>(largest);
  const float all_mass = block_sum<kDsaThreads>(mass);
  float sum = 0.0F;
  for (std::int64_t slot = threadIdx.x; slot < sizes.slots; slot += kDsaThreads) {
    if (chosen.positions[slot] >= 0) sum += expf(score[slot] - top);
  }
  const float log_sum = logf(block_sum<kDsaThreads>(sum));
  const float inverse = all_mass > 0.0F ? 1.0F / all_mass : all_mass;
  const float whole = all_mass > 0.0F ? 1.0F : all_mass;  // what the target sums to
  float loss = 0.0F;
  for (std::int64_t slot = threadIdx.x; slot < sizes.slots; slot += kDsaThreads) {
    if (chosen.positions[slot] < 0) {
      score[slot] = 0.0F;
      continue;
    }
    const float target = share[slot] * inverse;
    const float log_softmax = score[slot] - top - log_sum;
    if (target > 0.0F) loss += target * (logf(target) - log_softmax);
    score[slot] = a.weight * (expf(log_softmax) * whole - target);
  }
  return block_sum<kDsaThreads>(loss);
}

__global__ void __launch_bounds__(kDsaThreads) index_backward(IndexBackward a) {
  const DsaSizes& sizes = a.sizes;
  const std::int64_t token = a.turn.first + blockIdx.x;
  const DsaChosen chosen = dsa_chosen(sizes, a.selected, token);
  const float* d_score = a.kept.d_score + std::int64_t{blockIdx.x} * sizes.slots;
  float* d_x = a.kept.d_x + std::int64_t{blockIdx.x} * sizes.index_heads * sizes.slots;
  index_forward(a, chosen, token);
  const float loss = index_loss(a, chosen);
  if (threadIdx.x == 0) a.losses[token] = loss;
  __syncthreads();
  for (std::int64_t head = threadIdx.x / kWarp; head < sizes.index_heads; head += kDsaThreads / kWarp) {
    const float factor = sizes.index_scale * a.w[token * sizes.index_heads + head];
    float sum = 0.0F;
    for (std::int64_t slot = threadIdx.x % kWarp; slot < sizes.slots; slot += kWarp) {
      const float x = d_x[head * sizes.slots + slot];
      sum += d_score[slot] * x;
      d_x[head * sizes.slots + slot] = x > 0.0F ? factor * d_score[slot] : 0.0F;
    }
    sum = warp_sum(sum);
    if (a.d_w != nullptr && threadIdx.x % kWarp == 0) {
      a.d_w[token * sizes.index_heads + head] = sizes.index_scale * sum;
    }
  }
  __syncthreads();
  if (a.d_q == nullptr) return;
  const std::int64_t numbers = sizes.index_heads * sizes.index_width;
  for (std::int64_t i = threadIdx.x; i < numbers; i += kDsaThreads) {
    const float* factor = d_x + i / sizes.index_width * sizes.slots;
    a.d_q[token * numbers + i] =
        dsa_weighted(sizes, chosen, factor, a.k, sizes.index_width, i % sizes.index_width);
  }
}

// out[key][c] += sum over the turn's tokens that chose the key, over heads: factor[token][head][slot]
// rows[token][head][c]
struct KeyGradient {
  std::int64_t length, slots, heads, width;
  DsaTurn turn;
  const std::int32_t* selected;
  const float* factor;  // (n, heads, slots)
  const float* rows;    // (n, heads, width), of the turn's tokens
  std::int64_t first_key;
  float* out;  // (B T, width)
};

// The slot at which `position` stands, or -1. Padding is larger than any position as an unsigned number.
__device__ std::int64_t find_slot(const std::int32_t* positions, std::int64_t slots, std::int32_t position) {
  std::int64_t low = 0;
  std::int64_t high = slots;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (static_cast<unsigned>(positions[middle]) < static_cast<unsigned>(position)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < slots && positions[low] == position ? low : -1;
}

__global__ void __launch_bounds__(kDsaThreads) key_gradient(KeyGradient a) {
  __shared__ std::int64_t found_token[kDsaThreads];
  __shared__ std::int64_t found_slot[kDsaThreads];
  const std::int64_t key = a.first_key + blockIdx.x;  // among all tokens
  const std::int64_t column = std::int64_t{blockIdx.y} * kDsaThreads + threadIdx.x;
  const auto position = static_cast<std::int32_t>(key % a.length);
  const std::int64_t sequence_end = (key / a.length + 1) * a.length;
  const std::int64_t turn_end = a.turn.first + a.turn.count;
  const std::int64_t begin = key > a.turn.first ? key : a.turn.first;
  const std::int64_t end = sequence_end < turn_end ? sequence_end : turn_end;
  float sum = 0.0F;
  for (std::int64_t base = begin; base < end; base += kDsaThreads) {
    const std::int64_t token = base + threadIdx.x;
    const std::int64_t slot = token < end ? find_slot(a.selected + token * a.slots, a.slots, position) : -1;
    int count = 0;
    const int rank = block_rank<kDsaThreads>(slot >= 0, &count);
    if (slot >= 0) {
      found_token[rank] = token - a.turn.first;
      found_slot[rank] = slot;
    }
    __syncthreads();
    for (int i = 0; i < count && column < a.width; ++i) {
      const std::int64_t row = found_token[i] * a.heads;
      for (std::int64_t head = 0; head < a.heads; ++head) {
        sum += a.factor[(row + head) * a.slots + found_slot[i]] * a.rows[(row + head) * a.width + column];
      }
    }
    __syncthreads();  // before the lists are written again
  }
  if (column < a.width) a.out[key * a.width + column] += sum;
}

void launch_key_gradient(OpCall& call, KeyGradient gradient) {
  // From the start of the turn's first sequence: earlier keys can't be chosen by its tokens.
  gradient.first_key = gradient.turn.first / gradient.length * gradient.length;
  const std::int64_t keys = gradient.turn.first + gradient.turn.count - gradient.first_key;
  call.launch(key_gradient,
              Grid{.x = keys, .y = ceil_div(gradient.width, kDsaThreads), .threads = kDsaThreads}, gradient);
}

// out = sum of x, by one block.
__global__ void sum_of(const float* x, std::int64_t count, float* out) {
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < count; i += kDsaThreads) sum += x[i];
  const float total = block_sum<kDsaThreads>(sum);
  if (threadIdx.x == 0) *out = total;
}

struct SinkTerm {
  const float* terms;
  std::int64_t heads;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    return terms[row * heads + column];
  }
};

enum class Indexer : std::uint8_t { kOff, kLearns };

// One turn of tokens through all kernels.
struct TurnArguments {
  DsaSizes sizes;
  Kept kept;
  Indexer indexer;
  float* sink_terms;
  float* losses;
};

void run_index_turn(OpCall& call, const DsaBackward& op, const TurnArguments& a, const DsaTurn& turn) {
  const DsaSizes& sizes = a.sizes;
  call.launch(index_backward, Grid{.x = turn.count, .threads = kDsaThreads},
              IndexBackward{.sizes = sizes,
                            .turn = turn,
                            .kept = a.kept,
                            .selected = op.selected,
                            .q = op.in.index_q,
                            .k = op.in.index_k,
                            .w = op.in.index_w,
                            .weight = op.index_loss_weight,
                            .d_q = op.d_index_q,
                            .d_w = op.d_index_w,
                            .losses = a.losses});
  if (op.d_index_k == nullptr) return;
  launch_key_gradient(call,
                      KeyGradient{.length = sizes.length,
                                  .slots = sizes.slots,
                                  .heads = sizes.index_heads,
                                  .width = sizes.index_width,
                                  .turn = turn,
                                  .selected = op.selected,
                                  .factor = a.kept.d_x,
                                  .rows = op.in.index_q + turn.first * sizes.index_heads * sizes.index_width,
                                  .first_key = 0,
                                  .out = op.d_index_k});
}

void run_turn(OpCall& call, const DsaBackward& op, const TurnArguments& a, const DsaTurn& turn) {
  const DsaSizes& sizes = a.sizes;
  const DsaAttention attention{
      .sizes = sizes, .q = op.in.q, .k = op.in.k, .sink = op.in.sink, .selected = op.selected};
  call.launch(token_backward, Grid{.x = turn.count * sizes.heads, .threads = kDsaThreads},
              TokenBackward{.attention = attention,
                            .turn = turn,
                            .kept = a.kept,
                            .v = op.in.v,
                            .gate = op.in.gate,
                            .d_y = op.d_y,
                            .d_q = op.d_q,
                            .d_gate = op.d_gate,
                            .sink_terms = a.sink_terms});
  KeyGradient gradient{.length = sizes.length,
                       .slots = sizes.slots,
                       .heads = sizes.heads,
                       .width = sizes.key_width,
                       .turn = turn,
                       .selected = op.selected,
                       .factor = a.kept.d_logit,
                       .rows = op.in.q + turn.first * sizes.heads * sizes.key_width,
                       .first_key = 0,
                       .out = op.d_k};
  launch_key_gradient(call, gradient);
  gradient.width = sizes.value_width;
  gradient.factor = a.kept.p;
  gradient.rows = a.kept.d_o;
  gradient.out = op.d_v;
  launch_key_gradient(call, gradient);
  if (a.indexer == Indexer::kLearns) run_index_turn(call, op, a, turn);
}

}  // namespace

void launch(OpCall& call, const DsaBackward& op) {
  const DsaSizes sizes = dsa_sizes(call, op.shape);
  const std::int64_t tokens = sizes.batch * sizes.length;
  if (tokens <= 0) return;
  const bool index_wanted = op.d_index_q != nullptr || op.d_index_k != nullptr || op.d_index_w != nullptr ||
                            op.index_loss != nullptr;
  const std::int64_t token_floats = sizes.heads * (2 * sizes.slots + sizes.value_width) +
                                    (index_wanted ? (sizes.index_heads + 2) * sizes.slots : 0);
  const std::int64_t per_turn = dsa_tokens_per_turn(sizes, token_floats);
  TurnArguments a{};
  a.sizes = sizes;
  a.indexer = index_wanted ? Indexer::kLearns : Indexer::kOff;
  a.kept.p = call.scratch<float>(per_turn * sizes.heads * sizes.slots);
  a.kept.d_logit = call.scratch<float>(per_turn * sizes.heads * sizes.slots);
  a.kept.d_o = call.scratch<float>(per_turn * sizes.heads * sizes.value_width);
  if (index_wanted) {
    a.kept.d_x = call.scratch<float>(per_turn * sizes.index_heads * sizes.slots);
    a.kept.share = call.scratch<float>(per_turn * sizes.slots);
    a.kept.d_score = call.scratch<float>(per_turn * sizes.slots);
    a.losses = call.scratch<float>(tokens);
  }
  const bool sink_wanted = op.in.sink != nullptr && op.d_sink != nullptr;
  if (sink_wanted) a.sink_terms = call.scratch<float>(tokens * sizes.heads);
  call.zero(op.d_k, tokens * sizes.key_width);
  call.zero(op.d_v, tokens * sizes.value_width);
  if (op.d_index_k != nullptr) call.zero(op.d_index_k, tokens * sizes.index_width);
  for (std::int64_t first = 0; first < tokens; first += per_turn) {
    run_turn(call, op, a, DsaTurn{first, std::min(per_turn, tokens - first)});
  }
  if (sink_wanted) add_column_sums(call, SinkTerm{a.sink_terms, sizes.heads}, tokens, sizes.heads, op.d_sink);
  if (op.index_loss != nullptr) {
    call.launch(sum_of, Grid{.threads = kDsaThreads}, a.losses, tokens, op.index_loss);
  }
}

}  // namespace terrace::trainer::cuda
