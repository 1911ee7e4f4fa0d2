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
// Tokens go in turns, so that what is kept of them (P, da, do, dx) stays within 64 MiB. Sums over turns are
// fp32. The general form; dsa_backward_hopper.cu has the fast one of the attention.
#include <algorithm>
#include <type_traits>

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
};

template <typename T>
struct TokenBackward {
  DsaAttention<T> attention;
  DsaTurn turn;
  Kept kept;
  DsaRows<T> v;
  const T* gate;
  const T* d_y;  // null: P alone is wanted
  T* d_q;
  T* d_gate;
  float* sink_terms;  // (B T, H); null: no sink
};

template <typename T>
__global__ void __launch_bounds__(kDsaThreads) token_backward(TokenBackward<T> a) {
  const DsaSizes& sizes = a.attention.sizes;
  const std::int64_t token = a.turn.first + blockIdx.x / sizes.heads;
  const std::int64_t head = blockIdx.x % sizes.heads;
  const DsaChosen chosen = dsa_chosen(sizes, a.attention.selected, token);
  float* p = a.kept.p + std::int64_t{blockIdx.x} * sizes.slots;
  float* d_logit = a.kept.d_logit + std::int64_t{blockIdx.x} * sizes.slots;
  float* d_o = a.kept.d_o + std::int64_t{blockIdx.x} * sizes.value_width;
  const float sink_share = dsa_probabilities(a.attention, chosen, token, head, p).p_sink;
  if (a.d_y == nullptr) return;
  const std::int64_t row = (token * sizes.heads + head) * sizes.value_width;
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x; c < sizes.value_width; c += kDsaThreads) {
    const float o = dsa_weighted(sizes, chosen, p, a.v, c);
    const float s = a.gate == nullptr ? 1.0F : sigmoid(load_float(a.gate + row + c));
    const float d_y = load_float(a.d_y + row + c);
    if (a.gate != nullptr && a.d_gate != nullptr) store_float(a.d_gate + row + c, d_y * o * s * (1.0F - s));
    d_o[c] = d_y * s;
    product += d_y * s * o;
  }
  const float delta = block_sum<kDsaThreads>(product);  // d_o is visible to the block from here on
  if (a.sink_terms != nullptr && threadIdx.x == 0)
    a.sink_terms[token * sizes.heads + head] = -sink_share * delta;
  for (std::int64_t slot = threadIdx.x / kWarp; slot < sizes.slots; slot += kDsaThreads / kWarp) {
    const float d_p = dsa_dot(chosen, slot, d_o, a.v);
    if (threadIdx.x % kWarp == 0) d_logit[slot] = p[slot] * (d_p - delta) * sizes.scale;
  }
  __syncthreads();
  T* d_q = a.d_q + (token * sizes.heads + head) * sizes.key_width;
  for (std::int64_t c = threadIdx.x; c < sizes.key_width; c += kDsaThreads) {
    store_float(d_q + c, dsa_weighted(sizes, chosen, d_logit, a.attention.k, c));
  }
}

template <typename T>
struct IndexBackward {
  DsaSizes sizes;
  DsaTurn turn;
  const std::int32_t* selected;
  float* d_x;      // (n, HI, slots)
  float* share;    // (n, slots): the target, not yet divided by its sum
  float* d_score;  // (n, slots)
  const T* q;
  DsaRows<T> k;
  const T* w;
  float weight;
  T* d_q;
  T* d_w;
  float* losses;  // (B T)
};

// relu(x_h) into d_x and I into d_score, a warp a slot.
template <typename T>
__device__ void index_forward(const IndexBackward<T>& a, const DsaChosen& chosen, std::int64_t token) {
  const DsaSizes& sizes = a.sizes;
  for (std::int64_t slot = threadIdx.x / kWarp; slot < sizes.slots; slot += kDsaThreads / kWarp) {
    float score = 0.0F;
    for (std::int64_t head = 0; head < sizes.index_heads; ++head) {
      const std::int64_t row = token * sizes.index_heads + head;
      const float x = fmaxf(dsa_dot(chosen, slot, a.q + row * sizes.index_width, a.k), 0.0F);
      score += load_float(a.w + row) * x;
      if (threadIdx.x % kWarp == 0) {
        a.d_x[(std::int64_t{blockIdx.x} * sizes.index_heads + head) * sizes.slots + slot] = x;
      }
    }
    if (threadIdx.x % kWarp == 0) {
      a.d_score[std::int64_t{blockIdx.x} * sizes.slots + slot] =
          chosen.positions[slot] >= 0 ? score * sizes.index_scale : -INFINITY;
    }
  }
  __syncthreads();
}

// I becomes dI; returns the token's KL.
template <typename T>
__device__ float index_loss(const IndexBackward<T>& a, const DsaChosen& chosen) {
  const DsaSizes& sizes = a.sizes;
  float* score = a.d_score + std::int64_t{blockIdx.x} * sizes.slots;
  const float* share = a.share + std::int64_t{blockIdx.x} * sizes.slots;
  float largest = -INFINITY;
  float mass = 0.0F;
  for (std::int64_t slot = threadIdx.x; slot < sizes.slots; slot += kDsaThreads) {
    largest = fmaxf(largest, score[slot]);
    mass += share[slot];
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

template <typename T>
__global__ void __launch_bounds__(kDsaThreads) index_backward(IndexBackward<T> a) {
  const DsaSizes& sizes = a.sizes;
  const std::int64_t token = a.turn.first + blockIdx.x;
  const DsaChosen chosen = dsa_chosen(sizes, a.selected, token);
  const float* d_score = a.d_score + std::int64_t{blockIdx.x} * sizes.slots;
  float* d_x = a.d_x + std::int64_t{blockIdx.x} * sizes.index_heads * sizes.slots;
  index_forward(a, chosen, token);
  const float loss = index_loss(a, chosen);
  if (threadIdx.x == 0) a.losses[token] = loss;
  __syncthreads();
  for (std::int64_t head = threadIdx.x / kWarp; head < sizes.index_heads; head += kDsaThreads / kWarp) {
    const float factor = sizes.index_scale * load_float(a.w + token * sizes.index_heads + head);
    float sum = 0.0F;
    for (std::int64_t slot = threadIdx.x % kWarp; slot < sizes.slots; slot += kWarp) {
      const float x = d_x[head * sizes.slots + slot];
      sum += d_score[slot] * x;
      d_x[head * sizes.slots + slot] = x > 0.0F ? factor * d_score[slot] : 0.0F;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) {
      store_float(a.d_w + token * sizes.index_heads + head, sizes.index_scale * sum);
    }
  }
  __syncthreads();
  const std::int64_t numbers = sizes.index_heads * sizes.index_width;
  for (std::int64_t i = threadIdx.x; i < numbers; i += kDsaThreads) {
    const float* factor = d_x + i / sizes.index_width * sizes.slots;
    store_float(a.d_q + token * numbers + i, dsa_weighted(sizes, chosen, factor, a.k, i % sizes.index_width));
  }
}

// out[key][c] += sum over the turn's tokens that chose the key, over heads: factor[token][head][slot]
// rows[token][head][c]
template <typename Row>
struct KeyGradient {
  std::int64_t length, slots, heads, width;
  DsaTurn turn;
  const std::int32_t* selected;
  const float* factor;  // (n, heads, slots)
  const Row* rows;      // (n, heads, width), of the turn's tokens
  std::int64_t first_key;
  float* out;  // (B T, stride), its first columns
  std::int64_t stride;
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

template <typename Row>
__global__ void __launch_bounds__(kDsaThreads) key_gradient(KeyGradient<Row> a) {
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
        sum += a.factor[(row + head) * a.slots + found_slot[i]] *
               load_float(a.rows + (row + head) * a.width + column);
      }
    }
    __syncthreads();  // before the lists are written again
  }
  if (column < a.width) a.out[key * a.stride + column] += sum;
}

template <typename Row>
void launch_key_gradient(OpCall& call, KeyGradient<Row> gradient) {
  // From the start of the turn's first sequence: earlier keys can't be chosen by its tokens.
  gradient.first_key = gradient.turn.first / gradient.length * gradient.length;
  const std::int64_t keys = gradient.turn.first + gradient.turn.count - gradient.first_key;
  call.launch(key_gradient<Row>,
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

// One number a thread.
template <typename T>
__global__ void store_sums(const float* sums, std::int64_t count, T* out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) store_float(out + i, sums[i]);
}

// A gradient of the keys that grows from turn to turn: fp32 in place, another type beside.
template <typename T>
class KeySums {
 public:
  KeySums(OpCall& call, Out out, std::int64_t count) : out_(out), count_(out ? count : 0) {
    if (!out) return;
    sums_ = std::is_same_v<T, float> ? out.as<float>() : call.scratch<float>(count);
    call.zero(sums_, count);
  }
  [[nodiscard]] float* sums() const { return sums_; }
  void finish(OpCall& call) const {
    if (std::is_same_v<T, float> || sums_ == nullptr) return;
    call.launch(store_sums<T>, grid_for(count_), static_cast<const float*>(sums_), count_, out_.as<T>());
  }

 private:
  Out out_;
  std::int64_t count_;
  float* sums_ = nullptr;
};

// share[token][slot] = sum over heads of p.
__global__ void sum_heads(const float* p, std::int64_t heads, std::int64_t slots, std::int64_t count,
                          float* share) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float* from = p + i / slots * heads * slots + i % slots;
  float sum = 0.0F;
  for (std::int64_t head = 0; head < heads; ++head) sum += from[head * slots];
  share[i] = sum;
}

// One turn of tokens through the attention's kernels.
struct TurnArguments {
  DsaSizes sizes;
  Kept kept;
  float* sink_terms;
  float* d_k;  // sums
  float* d_v;  // null: the value is part of the key row
};

template <typename T>
void run_attention_turn(OpCall& call, const DsaBackward& op, const TurnArguments& a, const DsaTurn& turn,
                        const std::int32_t* selected) {
  const DsaSizes& sizes = a.sizes;
  const DsaAttention<T> attention{.sizes = sizes,
                                  .q = op.in.q.as<T>(),
                                  .k = dsa_key_rows<T>(sizes, op.in),
                                  .sink = op.in.sink,
                                  .selected = selected};
  call.launch(token_backward<T>, Grid{.x = turn.count * sizes.heads, .threads = kDsaThreads},
              TokenBackward<T>{.attention = attention,
                               .turn = turn,
                               .kept = a.kept,
                               .v = dsa_value_rows<T>(sizes, op.in),
                               .gate = op.in.gate.as<T>(),
                               .d_y = op.d_y.as<T>(),
                               .d_q = op.d_q.as<T>(),
                               .d_gate = op.d_gate.as<T>(),
                               .sink_terms = a.sink_terms});
  if (!op.d_y) return;
  launch_key_gradient(call,
                      KeyGradient<T>{.length = sizes.length,
                                     .slots = sizes.slots,
                                     .heads = sizes.heads,
                                     .width = sizes.key_width,
                                     .turn = turn,
                                     .selected = selected,
                                     .factor = a.kept.d_logit,
                                     .rows = op.in.q.as<T>() + turn.first * sizes.heads * sizes.key_width,
                                     .first_key = 0,
                                     .out = a.d_k,
                                     .stride = sizes.key_width});
  const bool own = a.d_v != nullptr;
  launch_key_gradient(call, KeyGradient<float>{.length = sizes.length,
                                               .slots = sizes.slots,
                                               .heads = sizes.heads,
                                               .width = sizes.value_width,
                                               .turn = turn,
                                               .selected = selected,
                                               .factor = a.kept.p,
                                               .rows = a.kept.d_o,
                                               .first_key = 0,
                                               .out = own ? a.d_v : a.d_k,
                                               .stride = own ? sizes.value_width : sizes.key_width});
}

bool index_learns(const DsaBackward& op) { return op.d_index_q && op.d_index_k && op.d_index_w; }

template <typename T>
void launch_general(OpCall& call, const DsaBackward& op, const DsaSizes& sizes) {
  const std::int64_t tokens = sizes.tokens();
  const std::int64_t token_floats = sizes.heads * (2 * sizes.slots + sizes.value_width) +
                                    (index_learns(op) ? (sizes.index_heads + 2) * sizes.slots : 0);
  const std::int64_t per_turn = dsa_tokens_per_turn(sizes, token_floats);
  TurnArguments a{};
  a.sizes = sizes;
  a.kept.p = call.scratch<float>(per_turn * sizes.heads * sizes.slots);
  a.kept.d_logit = call.scratch<float>(per_turn * sizes.heads * sizes.slots);
  a.kept.d_o = call.scratch<float>(per_turn * sizes.heads * sizes.value_width);
  const bool sink_wanted = op.d_y && op.in.sink != nullptr && op.d_sink != nullptr;
  if (sink_wanted) a.sink_terms = call.scratch<float>(tokens * sizes.heads);
  const KeySums<T> d_k(call, op.d_k, tokens * sizes.key_width);
  const KeySums<T> d_v(call, op.d_v, tokens * sizes.value_width);
  a.d_k = d_k.sums();
  a.d_v = d_v.sums();
  const IndexLearner indexer(call, op, sizes, per_turn, IndexWork::kGeneral);
  const DsaLists lists(call, op.shape, sizes, op.selected, per_turn);
  for (std::int64_t first = 0; first < tokens; first += per_turn) {
    const DsaTurn turn{first, std::min(per_turn, tokens - first)};
    const std::int32_t* selected = lists.of(call, turn);
    run_attention_turn<T>(call, op, a, turn, selected);
    if (indexer.share() == nullptr) continue;
    const std::int64_t count = turn.count * sizes.slots;
    call.launch(sum_heads, grid_for(count), static_cast<const float*>(a.kept.p), sizes.heads, sizes.slots,
                count, indexer.share());
    indexer.run(call, turn, selected);
  }
  d_k.finish(call);
  d_v.finish(call);
  indexer.finish(call);
  if (sink_wanted) add_dsa_sink(call, a.sink_terms, sizes, op.d_sink);
}

}  // namespace

void add_dsa_sink(OpCall& call, const float* terms, const DsaSizes& sizes, float* d_sink) {
  add_column_sums(call, SinkTerm{terms, sizes.heads}, sizes.tokens(), sizes.heads, d_sink);
}
void store_dsa_sums(OpCall& call, const float* sums, std::int64_t count, Bf16* out) {
  call.launch(store_sums<Bf16>, grid_for(count), sums, count, out);
}

IndexLearner::IndexLearner(OpCall& call, const DsaBackward& op, const DsaSizes& sizes, std::int64_t per_turn,
                           IndexWork work)
    : op_(op), sizes_(sizes) {
  if (!index_learns(op)) return;
  share_ = call.scratch<float>(per_turn * sizes.slots);
  if (work == IndexWork::kGeneral) {
    d_score_ = call.scratch<float>(per_turn * sizes.slots);
    d_x_ = call.scratch<float>(per_turn * sizes.index_heads * sizes.slots);
  }
  losses_ = call.scratch<float>(sizes.tokens());
  const std::int64_t count = sizes.tokens() * sizes.index_width;
  d_index_k_ = op.d_index_k.dtype() == Dtype::kF32 ? op.d_index_k.as<float>() : call.scratch<float>(count);
  call.zero(d_index_k_, count);
}

template <typename T>
void IndexLearner::run_typed(OpCall& call, const DsaTurn& turn, const std::int32_t* selected) const {
  call.launch(index_backward<T>, Grid{.x = turn.count, .threads = kDsaThreads},
              IndexBackward<T>{.sizes = sizes_,
                               .turn = turn,
                               .selected = selected,
                               .d_x = d_x_,
                               .share = share_,
                               .d_score = d_score_,
                               .q = op_.in.index_q.as<T>(),
                               .k = {op_.in.index_k.as<T>(), sizes_.index_width, sizes_.index_width},
                               .w = op_.in.index_w.as<T>(),
                               .weight = op_.index_loss_weight,
                               .d_q = op_.d_index_q.as<T>(),
                               .d_w = op_.d_index_w.as<T>(),
                               .losses = losses_});
  const T* rows = op_.in.index_q.as<T>() + turn.first * sizes_.index_heads * sizes_.index_width;
  launch_key_gradient(call, KeyGradient<T>{.length = sizes_.length,
                                           .slots = sizes_.slots,
                                           .heads = sizes_.index_heads,
                                           .width = sizes_.index_width,
                                           .turn = turn,
                                           .selected = selected,
                                           .factor = d_x_,
                                           .rows = rows,
                                           .first_key = 0,
                                           .out = d_index_k_,
                                           .stride = sizes_.index_width});
}

void IndexLearner::run(OpCall& call, const DsaTurn& turn, const std::int32_t* selected) const {
  if (share_ == nullptr) return;
  if (op_.in.index_q.dtype() == Dtype::kF32) return run_typed<float>(call, turn, selected);
  run_typed<Bf16>(call, turn, selected);
}

void IndexLearner::finish(OpCall& call) const {
  if (share_ == nullptr) return;
  if (op_.d_index_k.dtype() == Dtype::kBf16) {
    store_dsa_sums(call, d_index_k_, sizes_.tokens() * sizes_.index_width, op_.d_index_k.as<Bf16>());
  }
  if (op_.index_loss == nullptr) return;
  call.launch(sum_of, Grid{.threads = kDsaThreads}, static_cast<const float*>(losses_), sizes_.tokens(),
              op_.index_loss);
}

void launch(OpCall& call, const DsaBackward& op) {
  const DsaSizes sizes = dsa_sizes(call, op.shape);
  check_attention(call, op.shape, op.in);
  const Dtype type = op.in.q.dtype();
  if (op.d_y) {
    call.require(op.d_y.dtype() == type && op.d_q.dtype() == type && op.d_k.dtype() == type &&
                     (!op.d_v || op.d_v.dtype() == type) && (!op.d_gate || op.d_gate.dtype() == type),
                 "gradients are of the type of q");
    call.require(op.d_q && op.d_k && bool(op.d_v) == bool(op.in.v), "d_v is given where v is");
  } else {
    call.require(index_learns(op) && !op.d_q && !op.d_k && !op.d_v && !op.d_gate && op.d_sink == nullptr,
                 "without d_y the indexer's gradients alone are computed");
  }
  call.require(!index_learns(op) || (op.in.index_q.dtype() == type && op.in.index_k.dtype() == type &&
                                     op.in.index_w.dtype() == type && op.d_index_q.dtype() == type &&
                                     op.d_index_k.dtype() == type && op.d_index_w.dtype() == type),
               "the indexer's arrays are of the type of q");
  if (sizes.tokens() <= 0) return;
  const bool aligned =
      fits_pieces(op.d_y) && fits_pieces(op.d_q) && fits_pieces(op.d_gate) && fits_pieces(op.attention);
  if (aligned && attention_fits_hopper(call, op.shape, op.in)) return launch_hopper_backward(call, op, sizes);
  if (type == Dtype::kF32) return launch_general<float>(call, op, sizes);
  launch_general<Bf16>(call, op, sizes);
}

}  // namespace terrace::trainer::cuda
