// Tensor maps: what the bulk copy engine (TMA) needs to know of an array in device memory, made on the host.
//
// A map is a kernel parameter, `const __grid_constant__ CUtensorMap` (or a member of such a struct).
// Coordinates and extents count elements, innermost dimension first. A load outside the array gives zeros, a
// store outside is dropped, so edges need no care; what lies in the array but past the caller's rows is read
// as it is.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda::hopper {

enum class ElementType : std::uint8_t { kBf16, kF32, kE4m3 };
// How a box lies in shared memory: rows of box[0] elements one behind the other. With k128 a row is at most
// 128 bytes, the box starts at a multiple of 1024 bytes, and the 16-byte piece p of row r is found at place
// p ^ (r % 8) of its row: what wgmma's 128-byte swizzle expects.
enum class Swizzle : std::uint8_t { kNone, k128 };

inline constexpr int kMaxTensorRank = 4;

struct TensorView {
  const void* at;
  ElementType type;
  int rank;                             // 2 to 4
  std::int64_t extent[kMaxTensorRank];  // of the whole array, in elements; each at least 1
  std::int64_t stride[kMaxTensorRank];  // elements; stride[0] is 1
  int box[kMaxTensorRank];              // what one copy moves; each at most 256
  Swizzle swizzle = Swizzle::k128;
};

// The engine's terms: 16-byte aligned address and strides, extents within 2^32, a box within 256 each way and
// within the swizzle.
[[nodiscard]] bool takes_tensor_map(const TensorView& view);
// Precondition: takes_tensor_map. Throws what OpCall throws when the driver refuses.
[[nodiscard]] CUtensorMap make_tensor_map(OpCall& call, const TensorView& view);

struct DeviceTraits {
  bool hopper;     // compute capability 9.0: code for sm_90a runs here
  int processors;  // streaming multiprocessors
};
[[nodiscard]] DeviceTraits device_traits(OpCall& call);

}  // namespace terrace::trainer::cuda::hopper
