// Rows by expert, without a sort and without atomics: the row of slot (t, j) is the number of slots of lower
// experts plus the number of earlier slots of its own.   expert, row, source: (T * k)   offsets: (E + 1) One
// block an expert; within an expert slots stay in ascending order t * k + j.
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void place_rows(Permute op) {
  const auto mine = static_cast<std::int32_t>(blockIdx.x);  // op.experts: the block of the last offset
  const std::int64_t slots = op.tokens * op.top_k;
  int lower = 0;
  for (std::int64_t base = 0; base < slots; base += kThreads) {
    const std::int64_t slot = base + threadIdx.x;
    lower += __syncthreads_count(static_cast<int>(slot < slots && op.expert[slot] < mine));
  }
  if (threadIdx.x == 0) op.offsets[mine] = lower;
  if (mine == op.experts) return;
  int next = lower;
  for (std::int64_t base = 0; base < slots; base += kThreads) {
    const std::int64_t slot = base + threadIdx.x;
    const bool here = slot < slots && op.expert[slot] == mine;
    int found = 0;
    const int row = next + block_rank<kThreads>(here, &found);
    if (here) {
      op.row[slot] = row;
      op.source[row] = static_cast<std::int32_t>(slot);
    }
    next += found;
  }
}

}  // namespace

void launch(OpCall& call, const Permute& op) {
  call.set_shape({op.tokens, op.experts, op.top_k});
  call.require(op.tokens * op.top_k <= 0x7fffffff, "more slots than 32 bits count");
  call.launch(place_rows, Grid{.x = op.experts + 1, .threads = kThreads}, op);
}

}  // namespace terrace::trainer::cuda
