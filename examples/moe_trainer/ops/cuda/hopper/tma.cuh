// The bulk copy engine on the device: boxes of a tensor map to shared memory and back. Compute
// capability 9.0.
//
// Each call is made by one thread. Loads complete on a barrier (`bytes` of a whole box count even where it
// reaches over the array's edge). Stores: write shared memory, fence_shared_for_async by each writer, a
// barrier of the writers, then one thread stores, commits and waits; the same thread must do all three.
// Coordinates: elements, innermost first. Shared addresses: multiples of 128, of 1024 with the 128-byte
// swizzle.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/hopper/mbarrier.cuh"

namespace terrace::trainer::cuda::hopper {

// How long a load's lines should stay in L2: the cache policies that the hardware knows by these numbers.
enum class Keep : std::uint64_t {
  kNormal = 0x1000000000000000ULL,
  kFirstOut = 0x12F0000000000000ULL,  // read once
  kLastOut = 0x14F0000000000000ULL,   // read again soon
};

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(map)) : "memory");
}

struct At2 {
  std::int32_t x, y;
};
struct At3 {
  std::int32_t x, y, z;
};
struct At4 {
  std::int32_t x, y, z, w;
};

__device__ inline void load_box(void* shared, const CUtensorMap* map, Barrier* full, At2 at,
                                Keep keep = Keep::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(&full->state)), "r"(at.x), "r"(at.y),
      "l"(static_cast<std::uint64_t>(keep))
      : "memory");
}
__device__ inline void load_box(void* shared, const CUtensorMap* map, Barrier* full, At3 at,
                                Keep keep = Keep::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(&full->state)), "r"(at.x), "r"(at.y),
      "r"(at.z), "l"(static_cast<std::uint64_t>(keep))
      : "memory");
}

__device__ inline void load_box(void* shared, const CUtensorMap* map, Barrier* full, At4 at,
                                Keep keep = Keep::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(&full->state)), "r"(at.x), "r"(at.y),
      "r"(at.z), "r"(at.w), "l"(static_cast<std::uint64_t>(keep))
      : "memory");
}
// A plain run of bytes: both addresses and the count are multiples of 16.
__device__ inline void load_bytes(void* shared, const void* global, std::uint32_t bytes, Barrier* full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(global)), "r"(bytes), "r"(shared_address(&full->state))
      : "memory");
}

__device__ inline void store_box(const CUtensorMap* map, const void* shared, At2 at) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(shared_address(shared)), "r"(at.x), "r"(at.y)
               : "memory");
}
__device__ inline void store_box(const CUtensorMap* map, const void* shared, At3 at) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(shared_address(shared)), "r"(at.x), "r"(at.y), "r"(at.z)
               : "memory");
}
// Adds the box to what is there, element by element in the map's type.
__device__ inline void add_box(const CUtensorMap* map, const void* shared, At2 at) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(shared_address(shared)), "r"(at.x), "r"(at.y)
               : "memory");
}
__device__ inline void add_box(const CUtensorMap* map, const void* shared, At3 at) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(shared)), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}

// Ends a group of this thread's stores.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's groups still read shared memory: it may be written again.
template <int kPending>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until at most kPending are unfinished: the others are in global memory.
template <int kPending>
__device__ inline void wait_stores_done() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where 16-byte piece `piece` (0 to 7) of row `row` lies in a box with the 128-byte swizzle, in bytes from
// the box's start.
__device__ inline int swizzled_offset(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

}  // namespace terrace::trainer::cuda::hopper
