// Which sequence a token is in, where several are packed into one.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer::cuda {

// The last sequence that starts at or before the token: empty ones before it are passed over. Precondition:
// there is a packing.
__device__ inline std::int64_t sequence_index(const Packing& packing, std::int64_t token) {
  std::int64_t low = 0;
  std::int64_t high = packing.sequences;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (packing.starts[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The position at which the sequence of a position starts; without a packing, 0.
__device__ inline std::int64_t sequence_start(const Packing& packing, std::int64_t position) {
  return packing ? packing.starts[sequence_index(packing, position)] : 0;
}

}  // namespace terrace::trainer::cuda
