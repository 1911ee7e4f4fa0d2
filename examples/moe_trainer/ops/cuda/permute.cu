// Rows by expert, by counting. Slots are cut into blocks: each counts its slots by expert; one block turns
// the counts into every block's first rank of every expert, and into offsets; then each block ranks its own
// slots in order and places them. Integers are counted in shared memory by atomics: their order does not
// change a sum.
//   expert, row, source: (T * k)    offsets: (places + 1)    counts (scratch): (blocks, E)
// Nothing is read back by the host. With a capacity, slots go to scratch by expert first, and a block an
// expert finds its capacity-th weight, digit by digit, and places what is kept.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/router_scores.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPlanThreads = 1024;
constexpr std::int64_t kSlotsPerBlock = 1024;
constexpr std::int64_t kMostBlocks = 512;
constexpr int kBatch = 8;
constexpr int kDigit = 256;

__device__ bool valid(const Permute& op, std::int32_t expert) { return expert >= 0 && expert < op.experts; }

// The row of the slot that is the rank-th kept one of its expert.
__device__ std::int32_t row_of(const Permute& op, std::int32_t expert, std::int32_t rank) {
  if (op.places == 0) return op.offsets[expert] + rank;
  const std::int32_t first = op.replica_starts[expert];
  const std::int32_t replicas = op.replica_starts[expert + 1] - first;
  return op.offsets[op.replicas[first + rank % replicas]] + rank / replicas;
}

__global__ void count_slots(Permute op, std::int64_t slots_per_block, std::int32_t* counts) {
  extern __shared__ std::int32_t histogram[];  // (E)
  for (int e = static_cast<int>(threadIdx.x); e < op.experts; e += kThreads) histogram[e] = 0;
  __syncthreads();
  const std::int64_t begin = blockIdx.x * slots_per_block;
  const std::int64_t end = min(begin + slots_per_block, op.tokens * op.top_k);
  for (std::int64_t slot = begin + threadIdx.x; slot < end; slot += kThreads) {
    const std::int32_t expert = op.expert[slot];
    if (valid(op, expert)) atomicAdd(histogram + expert, 1);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < op.experts; e += kThreads) {
    counts[blockIdx.x * op.experts + e] = histogram[e];
  }
}

// starts[i] = values[0] + .. + values[i - 1] for i in [0, count]; values in shared memory. One block.
__device__ void write_starts(const std::int32_t* values, int count, std::int32_t* starts) {
  __shared__ std::int32_t warp_totals[kPlanThreads / kWarp];
  const int each = (count + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(count, static_cast<int>(threadIdx.x) * each);
  const int end = min(count, begin + each);
  std::int32_t own = 0;
  for (int i = begin; i < end; ++i) own += values[i];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  std::int32_t through = own;  // of this warp, to this lane
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const std::int32_t below = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += below;
  }
  __syncthreads();  // the last call's readers are done
  if (lane == kWarp - 1) warp_totals[threadIdx.x / kWarp] = through;
  __syncthreads();
  std::int32_t next = through - own;
  for (int w = 0; w < static_cast<int>(threadIdx.x) / kWarp; ++w) next += warp_totals[w];
  for (int i = begin; i < end; ++i) {
    starts[i] = next;
    next += values[i];
  }
  if (threadIdx.x == 0) {
    std::int32_t all = 0;
    for (int w = 0; w < kPlanThreads / kWarp; ++w) all += warp_totals[w];
    starts[count] = all;
  }
}

// counts become, for every block, how many slots of the expert come before it. expert_starts (E + 1): the
// same as offsets, before anything is dropped or dealt; null where nothing is dropped.
__global__ void __launch_bounds__(kPlanThreads)
    plan_rows(Permute op, std::int64_t blocks, std::int32_t* counts, std::int32_t* expert_starts) {
  extern __shared__ std::int32_t plan_memory[];  // (E), (places)
  std::int32_t* totals = plan_memory;
  std::int32_t* place_rows = op.places == 0 ? totals : plan_memory + op.experts;
  for (int e = static_cast<int>(threadIdx.x); e < op.experts; e += kPlanThreads) {
    std::int32_t total = 0;
    std::int32_t* const column = counts + e;
    for (std::int64_t first = 0; first < blocks; first += kBatch) {
      std::int32_t here[kBatch];  // read before any is written: one wait for all
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        here[i] = first + i < blocks ? column[(first + i) * op.experts] : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < blocks) column[(first + i) * op.experts] = total;
        total += here[i];
      }
    }
    totals[e] = total;
    if (op.counts != nullptr) op.counts[e] = total;
  }
  for (int p = static_cast<int>(threadIdx.x); p < op.places; p += kPlanThreads) place_rows[p] = 0;
  __syncthreads();
  if (expert_starts != nullptr) {
    write_starts(totals, static_cast<int>(op.experts), expert_starts);
    __syncthreads();
  }
  for (int e = static_cast<int>(threadIdx.x); e < op.experts; e += kPlanThreads) {
    const std::int32_t kept =
        op.capacity > 0 ? static_cast<std::int32_t>(min(std::int64_t{totals[e]}, op.capacity)) : totals[e];
    if (op.places == 0) {
      totals[e] = kept;
      continue;
    }
    const std::int32_t first = op.replica_starts[e];
    const std::int32_t replicas = op.replica_starts[e + 1] - first;
    for (std::int32_t i = 0; i < replicas; ++i) {
      place_rows[op.replicas[first + i]] = (kept - i + replicas - 1) / replicas;
    }
  }
  __syncthreads();
  write_starts(place_rows, static_cast<int>(op.places == 0 ? op.experts : op.places), op.offsets);
}

// Each warp takes a run of its block's slots, 32 at a time; ranks[warp][e] is the expert's next rank there.
// by_expert, where given, gets the slots instead of op.row and op.source.
__global__ void place_slots(Permute op, std::int64_t slots_per_block, const std::int32_t* before,
                            const std::int32_t* expert_starts, std::int32_t* by_expert) {
  extern __shared__ std::int32_t ranks[];  // (warps, E)
  const int experts = static_cast<int>(op.experts);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t slots = op.tokens * op.top_k;
  const std::int64_t run = slots_per_block / kWarps;
  const std::int64_t begin = blockIdx.x * slots_per_block + warp * run;
  std::int32_t* const own = ranks + warp * experts;
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * experts; i += kThreads) ranks[i] = 0;
  __syncthreads();
  for (std::int64_t slot = begin + lane; slot < min(begin + run, slots); slot += kWarp) {
    const std::int32_t expert = op.expert[slot];
    if (valid(op, expert)) atomicAdd(own + expert, 1);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    std::int32_t next = before[blockIdx.x * op.experts + e];
    for (int w = 0; w < kWarps; ++w) {
      const std::int32_t here = ranks[w * experts + e];
      ranks[w * experts + e] = next;
      next += here;
    }
  }
  __syncthreads();
  for (std::int64_t base = begin; base < begin + run; base += kWarp) {
    const std::int64_t slot = base + lane;
    std::int32_t expert = slot < slots ? op.expert[slot] : -1;
    if (!valid(op, expert)) expert = -1;
    const unsigned peers = __match_any_sync(kFullWarp, expert);
    const int leader = __ffs(static_cast<int>(peers)) - 1;
    std::int32_t rank = 0;
    if (lane == leader && expert >= 0) {
      rank = own[expert];
      own[expert] = rank + __popc(peers);
    }
    rank = __shfl_sync(kFullWarp, rank, leader) + __popc(peers & ((1U << lane) - 1U));
    __syncwarp();  // the next round's leaders see the ranks
    if (slot >= slots) continue;
    if (expert < 0) {
      op.row[slot] = -1;
    } else if (by_expert != nullptr) {
      by_expert[expert_starts[expert] + rank] = static_cast<std::int32_t>(slot);
    } else {
      const std::int32_t row = row_of(op, expert, rank);
      op.row[slot] = row;
      op.source[row] = static_cast<std::int32_t>(slot);
    }
  }
}

struct Cutoff {
  unsigned key;       // slots above it are kept
  std::int32_t ties;  // and so many of those at it, the earliest
};

// The capacity-th largest key of an expert's slots, by its four digits. More slots than the capacity.
__device__ Cutoff find_cutoff(const Permute& op, const std::int32_t* slots, std::int32_t count) {
  __shared__ std::int32_t histogram[kDigit];
  __shared__ Cutoff found;
  if (threadIdx.x == 0) found = {0U, static_cast<std::int32_t>(op.capacity)};
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = static_cast<int>(threadIdx.x); i < kDigit; i += kThreads) histogram[i] = 0;
    __syncthreads();
    const unsigned known = shift == 24 ? 0U : ~0U << (shift + 8);
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
      const unsigned key = order_key(op.weight[slots[i]]);
      if ((key & known) == found.key) atomicAdd(histogram + ((key >> shift) & 0xffU), 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigit - 1;
      while (digit > 0 && histogram[digit] < found.ties) found.ties -= histogram[digit--];
      found.key |= static_cast<unsigned>(digit) << shift;
    }
    __syncthreads();
  }
  return found;
}

// One block an expert: drops what is beyond the capacity and places the rest.
__global__ void place_kept(Permute op, const std::int32_t* expert_starts, const std::int32_t* by_expert) {
  const auto expert = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t* slots = by_expert + expert_starts[expert];
  const std::int32_t count = expert_starts[expert + 1] - expert_starts[expert];
  const bool all = count <= op.capacity;
  const Cutoff cutoff = all ? Cutoff{0U, 0} : find_cutoff(op, slots, count);
  std::int32_t next = 0;
  std::int32_t ties = 0;
  for (std::int32_t base = 0; base < count; base += kThreads) {
    const std::int32_t i = base + static_cast<std::int32_t>(threadIdx.x);
    const bool here = i < count;
    const std::int32_t slot = here ? slots[i] : 0;
    const unsigned key = here && !all ? order_key(op.weight[slot]) : 0U;
    int found = 0;
    const bool at_cutoff = here && !all && key == cutoff.key;
    const int tie = ties + block_rank<kThreads>(at_cutoff, &found);
    ties += found;
    const bool kept = here && (all || key > cutoff.key || (at_cutoff && tie < cutoff.ties));
    const int rank = next + block_rank<kThreads>(kept, &found);
    next += found;
    if (kept) {
      const std::int32_t row = row_of(op, expert, rank);
      op.row[slot] = row;
      op.source[row] = slot;
    } else if (here) {
      op.row[slot] = -1;
    }
  }
}

}  // namespace

void launch(OpCall& call, const Permute& op) {
  call.set_shape({op.tokens, op.experts, op.top_k, op.capacity, op.places});
  const std::int64_t slots = op.tokens * op.top_k;
  const std::int64_t places = op.places > 0 ? op.places : op.experts;
  call.require(slots <= 0x7fffffff, "more slots than 32 bits count");
  call.require(op.experts >= 1 && op.experts <= Permute::kMostExperts && places <= Permute::kMostExperts,
               "1 to 4096 experts, and as many places");
  call.require(op.capacity <= 0 || op.weight != nullptr, "a capacity needs weights to choose by");
  const std::int64_t slots_per_block =
      std::max(kSlotsPerBlock, ceil_div(ceil_div(slots, kMostBlocks), kThreads) * kThreads);
  const std::int64_t blocks = ceil_div(slots, slots_per_block);
  auto* counts = call.scratch<std::int32_t>(blocks * op.experts);
  const bool drops = op.capacity > 0;
  std::int32_t* expert_starts = drops ? call.scratch<std::int32_t>(op.experts + 1) : nullptr;
  std::int32_t* by_expert = drops ? call.scratch<std::int32_t>(slots) : nullptr;
  const auto bytes_of_ints = [](std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(std::int32_t);
  };
  if (slots > 0) {
    call.check(cudaMemsetAsync(op.source, 0xff, bytes_of_ints(slots), call.stream()), "cudaMemsetAsync");
  }
  call.launch(count_slots, Grid{.x = blocks, .threads = kThreads, .shared_bytes = bytes_of_ints(op.experts)},
              op, slots_per_block, counts);
  call.launch(plan_rows, Grid{.threads = kPlanThreads, .shared_bytes = bytes_of_ints(op.experts + op.places)},
              op, blocks, counts, expert_starts);
  call.launch(place_slots,
              Grid{.x = blocks, .threads = kThreads, .shared_bytes = bytes_of_ints(kWarps * op.experts)}, op,
              slots_per_block, static_cast<const std::int32_t*>(counts),
              static_cast<const std::int32_t*>(expert_starts), by_expert);
  if (drops) {
    call.launch(place_kept, Grid{.x = slots > 0 ? op.experts : 0, .threads = kThreads}, op,
                static_cast<const std::int32_t*>(expert_starts), static_cast<const std::int32_t*>(by_expert));
  }
}

}  // namespace terrace::trainer::cuda
