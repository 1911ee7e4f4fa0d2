// out_t = table[ids_t];  d_table[id] += sum over t with ids_t = id of d_out_t, t ascending
//   table, d_table: (V, D)   out, d_out: (T, D)   ids: (T)
// Backward has one block an id and 256 columns. Ids are found from whichever list is shorter: the vocabulary,
// or the tokens, where the first token of an id sums for all later ones.
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void embed(Embedding op) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= op.tokens * op.width) return;
  op.out[at] = op.table[std::int64_t{op.ids[at / op.width]} * op.width + at % op.width];
}

enum class BlockIs : std::uint8_t { kId, kToken };

__global__ void embed_backward(EmbeddingBackward op, BlockIs block_is) {
  __shared__ std::int32_t found[kThreads];
  const std::int64_t block = blockIdx.x;
  const std::int64_t begin = block_is == BlockIs::kToken ? block : 0;
  const auto id = block_is == BlockIs::kToken ? op.ids[block] : static_cast<std::int32_t>(block);
  for (std::int64_t base = 0; base < begin; base += kThreads) {
    const std::int64_t t = base + threadIdx.x;
    if (__syncthreads_or(static_cast<int>(t < begin && op.ids[t] == id)) != 0)
      return;  // an earlier block's id
  }
  const std::int64_t column = std::int64_t{blockIdx.y} * kThreads + threadIdx.x;
  float sum = 0.0F;
  bool any = false;
  for (std::int64_t base = begin; base < op.tokens; base += kThreads) {
    const std::int64_t t = base + threadIdx.x;
    const bool here = t < op.tokens && op.ids[t] == id;
    int count = 0;
    const int rank = block_rank<kThreads>(here, &count);
    if (here) found[rank] = static_cast<std::int32_t>(t);
    __syncthreads();
    if (column < op.width) {
      for (int i = 0; i < count; ++i) sum += op.d_out[std::int64_t{found[i]} * op.width + column];
    }
    any = any || count > 0;
    __syncthreads();  // before `found` is written again
  }
  if (any && column < op.width) op.d_table[std::int64_t{id} * op.width + column] += sum;
}

}  // namespace

void launch(OpCall& call, const Embedding& op) {
  call.set_shape({op.tokens, op.width, op.vocabulary});
  call.launch(embed, grid_for(op.tokens * op.width, kThreads), op);
}

void launch(OpCall& call, const EmbeddingBackward& op) {
  call.set_shape({op.tokens, op.width, op.vocabulary});
  if (op.tokens <= 0) return;
  const bool by_token = op.tokens < op.vocabulary;
  call.launch(
      embed_backward,
      Grid{.x = by_token ? op.tokens : op.vocabulary, .y = ceil_div(op.width, kThreads), .threads = kThreads},
      op, by_token ? BlockIs::kToken : BlockIs::kId);
}

}  // namespace terrace::trainer::cuda
