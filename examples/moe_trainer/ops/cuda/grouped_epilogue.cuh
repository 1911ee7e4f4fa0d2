// From a warp's sums to device memory, 16 rows by themselves: no warp waits for another. bf16 goes through
// two boxes of shared memory, 16 rows by 128 bytes, and leaves it as whole lines of 128 bytes. fp32 goes
// straight from registers, 64 bytes of a row at a time. Rows that belong to another group are left alone.
#pragma once

#include "examples/moe_trainer/ops/cuda/grouped_product.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/stmatrix.cuh"

namespace terrace::trainer::cuda {

inline constexpr int kWarpRows = 16;

// The warp's two boxes, and whose turn it is. Between the reads of a box and its next turn lies the close()
// of the other.
struct Staging {
  std::byte* boxes;
  int lane;
  int turn = 0;

  [[nodiscard]] __device__ std::byte* open() {
    turn ^= 1;
    return boxes + turn * kWarpBoxBytes;
  }
  // Every lane has written.
  __device__ void close() const { __syncwarp(); }
};

// value(group of 8 columns, upper 8 rows or lower) gives this thread's two numbers there.
template <typename Value>
__device__ void stage_bf16(std::byte* box, int lane, Value&& value) {
  const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    std::uint32_t matrices[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = value(j + i / 2, i % 2);
      matrices[i] = as_pair(pair.x, pair.y);
    }
    hopper::store_matrices(box + hopper::swizzled_offset(row, j + lane / 16), matrices);
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

// A closed box of 16 by 64 bf16 to C. Width is a multiple of 8: a piece of 8 is in or out.
__device__ inline void put_box(const Staging& staging, const std::byte* box, const RowsOut& out,
                               const BoxPlace& place, Accumulate into) {
  constexpr int kRowsAtOnce = 4;
  constexpr int kTurns = kWarpRows / kRowsAtOnce;
  const int row = staging.lane / 8;
  const int piece = staging.lane % 8;
  if (place.column + piece * 8 >= out.width) return;
  const std::int64_t step = std::int64_t{kRowsAtOnce} * out.halves * out.width;
  Bf16* first = out.at + ((std::int64_t{place.row} + row) * out.halves + place.half) * out.width +
                place.column + piece * 8;
  uint4 pieces[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const std::byte* at = box + hopper::swizzled_offset(row + i * kRowsAtOnce, piece);
    pieces[i] = *reinterpret_cast<const uint4*>(at);
  }
  if (into == Accumulate::kAdd) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (row + i * kRowsAtOnce >= place.rows) continue;
      pieces[i] = add_bf16(*reinterpret_cast<const uint4*>(first + i * step), pieces[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (row + i * kRowsAtOnce < place.rows) *reinterpret_cast<uint4*>(first + i * step) = pieces[i];
  }
}

template <typename Shape>
__device__ void store_rows(const ProductParameters& p, const GroupedTile& tile, const Part<Shape>& part,
                           Staging& staging, const float (&sum)[Shape::kGroupN / 2]) {
  const int rows = tile.rows_left - part.warp_row;
  if (rows <= 0) return;
#pragma unroll
  for (int c = 0; c < Shape::kGroupColumns / 64; ++c) {
    const int column = tile.first_column + part.column + c * 64;
    if (column >= p.width) break;
    std::byte* box = staging.open();
    stage_bf16(box, staging.lane, [&](int j, int half) {
      const int at = (c * 8 + j) * 4 + half * 2;
      return float2{sum[at], sum[at + 1]};
    });
    staging.close();
    put_box(staging, box, p.c, {tile.first_row + part.warp_row, column, 0, rows}, p.into);
  }
}

template <GluActivation kActivation, typename Shape>
__device__ void store_glu(const ProductParameters& p, const GroupedTile& tile, const Part<Shape>& part,
                          Staging& staging, const float (&sum)[Shape::kGroupN / 2]) {
  constexpr int kUp = Shape::kGroupN / 4;  // registers of the gate half
  const int rows = tile.rows_left - part.warp_row;
  if (rows <= 0) return;
#pragma unroll
  for (int c = 0; c < Shape::kGroupColumns / 64; ++c) {
    const int column = tile.first_column + part.column + c * 64;
    if (column >= p.width) break;
    BoxPlace place{tile.first_row + part.warp_row, column, 0, rows};
    if (p.gu.at != nullptr) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        std::byte* box = staging.open();
        stage_bf16(box, staging.lane, [&](int j, int half) {
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
    stage_bf16(box, staging.lane, [&](int j, int half) {
      const int at = (c * 8 + j) * 4 + half * 2;
      const GluFactors x = glu_factors<kActivation, GluMath::kFast>(sum[at], sum[kUp + at]);
      const GluFactors y = glu_factors<kActivation, GluMath::kFast>(sum[at + 1], sum[kUp + at + 1]);
      return float2{x.gate * x.up, y.gate * y.up};
    });
    staging.close();
    put_box(staging, box, p.c, place, Accumulate::kOverwrite);
  }
}

template <Accumulate kInto>
__device__ void put_floats(float* at, const float4& four) {
  if constexpr (kInto == Accumulate::kAdd) {
    // Every number is added once: the same bits again.
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(four.x),
                 "f"(four.y), "f"(four.z), "f"(four.w)
                 : "memory");
  } else {
    __stcs(reinterpret_cast<float4*>(at), four);  // not read again here: operands keep their place in L2
  }
}

// Of two groups of 8 columns a lane has two numbers each. With its neighbour it makes four of one group: the
// even lane of the first, the odd lane of the second. So a quad of lanes writes 64 bytes of a row at once.
template <Accumulate kInto, typename Shape>
__device__ void store_weights(const ProductParameters& p, const GroupedTile& tile, const Part<Shape>& part,
                              const float (&sum)[Shape::kGroupN / 2]) {
  if (kInto == Accumulate::kAdd && tile.depth_begin == tile.depth_end) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool odd = lane % 2 != 0;
  const int row = part.warp_row + lane / 4;
  const int column = tile.first_column + part.column + (odd ? 8 : 0) + lane % 4 / 2 * 4;
  const std::int64_t line = std::int64_t{tile.group} * p.depth + tile.first_row + row;
  float* first = p.d_w + line * p.width + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool row_is_ours = row + 8 * half < tile.rows_left;
    float* to = first + std::int64_t{8 * half} * p.width;
#pragma unroll
    for (int j = 0; j < Shape::kGroupColumns / 8; j += 2) {
      const float* mine = sum + j * 4 + half * 2;  // of the first group; of the second four on
      const float x = __shfl_xor_sync(0xffffffff, odd ? mine[0] : mine[4], 1);
      const float y = __shfl_xor_sync(0xffffffff, odd ? mine[1] : mine[5], 1);
      const float4 four = odd ? float4{x, y, mine[4], mine[5]} : float4{mine[0], mine[1], x, y};
      // Width is a multiple of 8: four numbers are in or out.
      if (row_is_ours && column + j * 8 < p.width) put_floats<kInto>(to + j * 8, four);
    }
  }
}

template <typename Shape>
__device__ void store_tile(const ProductParameters& p, const GroupedTile& tile, const Part<Shape>& part,
                           Staging& staging, const float (&sum)[Shape::kGroupN / 2]) {
  if constexpr (Shape::kProduct == Product::kWeightGradient) {
    if (p.into == Accumulate::kAdd) {
      store_weights<Accumulate::kAdd, Shape>(p, tile, part, sum);
    } else {
      store_weights<Accumulate::kOverwrite, Shape>(p, tile, part, sum);
    }
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

template <typename Shape>
__device__ void consume(const ProductParameters& p, const ProductRing& ring, std::byte* staging_boxes) {
  const Part<Shape> part;
  const int warp = static_cast<int>(threadIdx.x) / 32 - hopper::kWarpgroup / 32;
  HeadStart<Shape> head_start(part.warpgroup);
  Staging staging{.boxes = staging_boxes + warp * 2 * kWarpBoxBytes,
                  .lane = static_cast<int>(threadIdx.x) % 32};
  typename TilesOf<Shape>::type tiles(tile_walk<Shape>(p));
  GroupedTile tile{}, next{};
  RingPlace<Shape::kStages> place;
  float sum[Shape::kGroupN / 2];
  const int step = number_step<Shape>();
  int number = first_number<Shape>();
  bool more = tiles.find(number, &tile);
  const auto find_next = [&] {
    number += step;
    more = tiles.find(number, &next);
  };
  while (more) {
    sum_tile<Shape>(ring, tile, part, place, head_start, find_next, sum);
    store_tile<Shape>(p, tile, part, staging, sum);
    tile = next;
  }
  head_start.end();
}

// Barriers are ready in every block of the cluster; or all of its blocks have done with them.
template <typename Shape>
__device__ void sync_blocks() {
  if constexpr (Shape::kBlocks == 1) {
    __syncthreads();
  } else {
    hopper::cluster_sync();
  }
}

template <typename Shape>
__global__ void __cluster_dims__(Shape::kBlocks, 1, 1) __launch_bounds__(kProductThreads, 1)
    grouped_product(const __grid_constant__ ProductParameters p) {
#if TERRACE_SM90A
  extern __shared__ std::byte product_shared[];
  // Boxes with the 128-byte swizzle start at multiples of 1024.
  const std::uint32_t misplaced = hopper::shared_address(product_shared) % 1024;
  std::byte* stages = product_shared + (misplaced == 0 ? 0 : 1024 - misplaced);
  std::byte* staging = stages + Shape::kStages * Shape::kStageBytes;
  auto* full = reinterpret_cast<hopper::Barrier*>(staging + Shape::kStagingBytes);
  const ProductRing ring{stages, full, full + Shape::kStages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      ring.full[i].init(1);
      ring.empty[i].init(kConsumerWarps * Shape::kBlocks);
    }
    hopper::fence_barrier_init();
    hopper::prefetch_map(&p.a);
    hopper::prefetch_map(&p.b);
  }
  sync_blocks<Shape>();
  if (threadIdx.x < hopper::kWarpgroup) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) produce<Shape>(p, ring);
  } else {
    hopper::take_registers<232>();
    consume<Shape>(p, ring, staging);
  }
  sync_blocks<Shape>();
#endif
}

}  // namespace terrace::trainer::cuda
