// From a warpgroup's sums to device memory: 64 rows by 128 bytes at a time through two boxes of shared
// memory, one being written while the copy engine reads the other. Rows that belong to another group are left
// alone: a box with such rows is stored by ordinary 16-byte stores, row by row.
#pragma once

#include "examples/moe_trainer/ops/cuda/grouped_product.cuh"

namespace terrace::trainer::cuda {

// The warpgroup's two boxes, and whose turn it is.
struct Staging {
  std::byte* boxes;
  int barrier;  // named, of this warpgroup
  int thread;   // 0 to 127
  int turn = 0;

  __device__ void sync() const {
    __syncwarp();
    hopper::named_barrier_sync(barrier, hopper::kWarpgroup);
  }
  // The box to write next; what was stored from it has been read.
  [[nodiscard]] __device__ std::byte* open() {
    if (thread == 0) hopper::wait_stores_read<1>();
    sync();
    std::byte* box = boxes + turn * kBoxBytes;
    turn ^= 1;
    return box;
  }
  // Everybody has written.
  __device__ void close() const {
    hopper::fence_shared_for_async();
    sync();
  }
};

// value(group of 8 columns, lower row half or upper) gives this thread's two numbers there.
template <typename Value>
__device__ void stage_bf16(std::byte* box, int thread, Value&& value) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = value(j, half);
      std::byte* at = box + hopper::swizzled_offset(row + 8 * half, j) + thread % 4 * 4;
      *reinterpret_cast<std::uint32_t*>(at) = as_pair(pair.x, pair.y);
    }
  }
}
template <typename Value>
__device__ void stage_f32(std::byte* box, int thread, Value&& value) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int pair = thread % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::byte* at = box + hopper::swizzled_offset(row + 8 * half, 2 * j + pair / 2) + pair % 2 * 8;
      *reinterpret_cast<float2*>(at) = value(j, half);
    }
  }
}

__device__ inline uint4 add_bf16(const uint4& a, const uint4& b) {
  const auto add = [](std::uint32_t x, std::uint32_t y) {
    return as_pair(low_half(x) + low_half(y), high_half(x) + high_half(y));
  };
  return {add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w)};
}

struct BoxPlace {
  int row, column, half;  // in C
  int rows;               // that are ours
};

// A closed box of 64 by 64 bf16 to C. Width is a multiple of 8: a piece of 8 is in or out. A group of stores
// is committed either way, if an empty one: open() counts one group a box.
__device__ inline void put_box(const Staging& staging, const std::byte* box, const RowsOut& out,
                               const BoxPlace& place, Accumulate into) {
  const bool whole = into == Accumulate::kOverwrite && place.rows >= 64;
  if (staging.thread == 0) {
    if (whole) hopper::store_box(&out.map, box, hopper::At3{place.column, place.half, place.row});
    hopper::commit_stores();
  }
  if (whole) return;
  for (int i = staging.thread; i < 64 * 8; i += hopper::kWarpgroup) {
    const int row = i / 8;
    const int piece = i % 8;
    if (row >= place.rows || place.column + piece * 8 >= out.width) continue;
    const uint4 mine = *reinterpret_cast<const uint4*>(box + hopper::swizzled_offset(row, piece));
    const std::int64_t line = (std::int64_t{place.row} + row) * out.halves + place.half;
    auto* to = reinterpret_cast<uint4*>(out.at + line * out.width + place.column + piece * 8);
    *to = into == Accumulate::kAdd ? add_bf16(*to, mine) : mine;
  }
}

template <typename Shape>
__device__ void store_rows(const ProductParameters& p, const GroupedTile& tile, const Part<Shape>& part,
                           Staging& staging, const float (&sum)[Shape::kGroupN / 2]) {
  const int rows = tile.rows_left - part.row;
  if (rows <= 0) return;
#pragma unroll
  for (int c = 0; c < Shape::kGroupColumns / 64; ++c) {
    const int column = tile.first_column + part.column + c * 64;
    if (column >= p.width) break;
    std::byte* box = staging.open();
    stage_bf16(box, staging.thread, [&](int j, int half) {
      const int at = (c * 8 + j) * 4 + half * 2;
      return float2{sum[at], sum[at + 1]};
    });
    staging.close();
    put_box(staging, box, p.c, {tile.first_row + part.row, column, 0, rows}, p.into);
  }
}

template <GluActivation kActivation, typename Shape>
__device__ void store_glu(const ProductParameters& p, const GroupedTile& tile, const Part<Shape>& part,
                          Staging& staging, const float (&sum)[Shape::kGroupN / 2]) {
  constexpr int kUp = Shape::kGroupN / 4;  // registers of the gate half
  const int rows = tile.rows_left - part.row;
  if (rows <= 0) return;
#pragma unroll
  for (int c = 0; c < Shape::kGroupColumns / 64; ++c) {
    const int column = tile.first_column + part.column + c * 64;
    if (column >= p.width) break;
    BoxPlace place{tile.first_row + part.row, column, 0, rows};
    if (p.gu.at != nullptr) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        std::byte* box = staging.open();
        stage_bf16(box, staging.thread, [&](int j, int half) {
          const int at = which * kUp + (c * 8 + j) * 4 + half * 2;
          return float2{sum[at], sum[at + 1]};
        });
        staging.close();
        place.half = which;
        put_box(staging, box, p.gu, place, Accumulate::kOverwrite);
      }
      place.half = 0;
    }
    std::byte* box = staging.open();
    stage_bf16(box, staging.thread, [&](int j, int half) {
      const int at = (c * 8 + j) * 4 + half * 2;
      const GluFactors x = glu_factors<kActivation, GluMath::kFast>(sum[at], sum[kUp + at]);
      const GluFactors y = glu_factors<kActivation, GluMath::kFast>(sum[at + 1], sum[kUp + at + 1]);
      return float2{x.gate * x.up, y.gate * y.up};
    });
    staging.close();
    put_box(staging, box, p.c, place, Accumulate::kOverwrite);
  }
}

template <typename Shape>
__device__ void store_weights(const ProductParameters& p, const GroupedTile& tile, const Part<Shape>& part,
                              Staging& staging, const float (&sum)[Shape::kGroupN / 2]) {
  if (p.into == Accumulate::kAdd && tile.depth_begin == tile.depth_end) return;
  if (tile.rows_left <= part.row) return;
#pragma unroll
  for (int c = 0; c < Shape::kGroupColumns / 32; ++c) {
    const int column = tile.first_column + part.column + c * 32;
    if (column >= p.width) break;
    std::byte* box = staging.open();
    stage_f32(box, staging.thread, [&](int j, int half) {
      const int at = (c * 4 + j) * 4 + half * 2;
      return float2{sum[at], sum[at + 1]};
    });
    staging.close();
    if (staging.thread == 0) {
      // Past the edge of (n, k) nothing is stored. Every number is added once: the same bits again.
      const hopper::At3 at{column, tile.first_row + part.row, tile.group};
      if (p.into == Accumulate::kAdd) {
        hopper::add_box(&p.d_w, box, at);
      } else {
        hopper::store_box(&p.d_w, box, at);
      }
      hopper::commit_stores();
    }
  }
}

template <typename Shape>
__device__ void consume(const ProductParameters& p, const ProductRing& ring, std::byte* staging_boxes) {
  const Part<Shape> part;
  Staging staging{.boxes = staging_boxes + part.warpgroup * Shape::kStagingBytes,
                  .barrier = 2 + part.warpgroup,
                  .thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup};
  typename TilesOf<Shape>::type tiles(p.offsets, p.groups, p.width, p.depth);
  GroupedTile tile;
  RingPlace<Shape::kStages> place;
  float sum[Shape::kGroupN / 2];
  for (int number = first_tile(); tiles.find(number, &tile); number += tile_step()) {
    sum_tile<Shape>(ring, tile, part, place, sum);
    if constexpr (Shape::kProduct == Product::kWeightGradient) {
      store_weights<Shape>(p, tile, part, staging, sum);
    } else if constexpr (Shape::kProduct == Product::kGlu) {
      if (p.activation == GluActivation::kSitu) {
        store_glu<GluActivation::kSitu, Shape>(p, tile, part, staging, sum);
      } else {
        store_glu<GluActivation::kSwi, Shape>(p, tile, part, staging, sum);
      }
    } else {
      store_rows<Shape>(p, tile, part, staging, sum);
    }
  }
  if (staging.thread == 0) hopper::wait_stores_read<0>();
}

template <typename Shape>
__global__ void __launch_bounds__(kProductThreads, 1)
    grouped_product(const __grid_constant__ ProductParameters p) {
#if TERRACE_SM90A
  extern __shared__ std::byte product_shared[];
  // Boxes with the 128-byte swizzle start at multiples of 1024.
  const std::uint32_t misplaced = hopper::shared_address(product_shared) % 1024;
  std::byte* stages = product_shared + (misplaced == 0 ? 0 : 1024 - misplaced);
  std::byte* staging = stages + Shape::kStages * Shape::kStageBytes;
  auto* full = reinterpret_cast<hopper::Barrier*>(staging + 2 * Shape::kStagingBytes);
  const ProductRing ring{stages, full, full + Shape::kStages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      ring.full[i].init(1);
      ring.empty[i].init(kConsumerWarps);
    }
    hopper::fence_barrier_init();
    hopper::prefetch_map(&p.a);
    hopper::prefetch_map(&p.b);
  }
  __syncthreads();
  if (threadIdx.x < hopper::kWarpgroup) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) produce<Shape>(p, ring);
  } else {
    hopper::take_registers<232>();
    consume<Shape>(p, ring, staging);
  }
#endif
}

}  // namespace terrace::trainer::cuda
