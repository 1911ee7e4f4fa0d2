// The indexer's scores by wgmma: a block keeps 192 keys in registers, 64 a warpgroup, and goes through the
// queries.
//
// Keys are the rows of the product and the heads of queries its columns, X = kI (64 x 128) qI_t^T (128 x 64):
// then the sum over heads of w relu(x) runs along a row, inside a thread and its quad. The 64 columns are a
// bundle: the heads of 8, 4 or 2 queries that follow one another where a query has 8, 16 or 32, else those of
// one and zeros. A warpgroup copies bundles, two a stage; while one of them is summed, the other's product
// runs.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/dsa_hopper.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"

namespace terrace::trainer::cuda {
namespace {

using hopper::Major;
using hopper::Start;

constexpr int kWidth = 128;  // DI
constexpr int kBoxes = kWidth / kBoxColumns;
constexpr int kSteps = kWidth / 16;
constexpr int kConsumerThreads = 3 * hopper::kWarpgroup;
constexpr int kThreads = kConsumerThreads + hopper::kWarpgroup;
constexpr int kKeys = 192;     // of a block
constexpr int kQueries = 128;  // of a block
constexpr int kStages = 4;
constexpr int kBoxBytes = kDsaHeads * 128;
constexpr int kWeights = kBoxes * kBoxBytes;  // after the heads
constexpr int kBundleBytes = kWeights + 1024;
constexpr int kStageBytes = 2 * kBundleBytes;
constexpr int kBarriers = kStages * kStageBytes;
constexpr int kSharedBytes = kBarriers + 16 * kStages + 1024;

struct Barriers {
  hopper::Barrier full[kStages], empty[kStages];
};

struct Scores {
  DsaSizes sizes;
  const Bf16* index_q;
  const Bf16* index_k;
  const Bf16* index_w;
  Packing packing;
  std::int64_t batch, first, rows;
  float* scores;  // (rows, T)
};

// Where the sequence of `position` ends.
__device__ inline std::int64_t sequence_end(const Packing& packing, std::int64_t position,
                                            std::int64_t length) {
  if (packing.starts == nullptr) return length;
  std::int64_t low = 0;
  std::int64_t high = packing.sequences;  // the first start after the position is among 1 .. sequences
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (packing.starts[middle] <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return packing.starts[low];
}

// By a warpgroup: the heads of `queries` queries from `query` on, and zeros to the end of the bundle.
__device__ inline void copy_bundle(const Scores& a, std::int64_t query, int queries, unsigned char* place) {
  const int heads = queries * static_cast<int>(a.sizes.index_heads);
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const std::int64_t token = a.batch * a.sizes.length + query;
  const Bf16* q = a.index_q + token * a.sizes.index_heads * kWidth;
  const std::uint32_t to = hopper::shared_address(place);
#pragma unroll
  for (int i = 0; i < kDsaHeads * kWidth / 8; i += hopper::kWarpgroup) {
    const int piece = i + thread, head = piece / 16, column = piece % 16;
    const std::uint32_t at =
        static_cast<std::uint32_t>(column / 8 * kBoxBytes + head * 128 + (column % 8 ^ head % 8) * 16);
    const bool there = head < heads;
    copy_piece(to + at, there ? q + std::int64_t{head} * kWidth + column * 8 : q, there ? 16 : 0);
  }
  if (thread < kDsaHeads / 8) {
    const int head = thread * 8;
    const Bf16* w = a.index_w + token * a.sizes.index_heads;
    copy_piece(to + kWeights + static_cast<std::uint32_t>(head * 2), head < heads ? w + head : w,
               head < heads ? 16 : 0);
  }
}

// This thread's part of its warpgroup's keys, as the left operand; keys past the end are zero.
__device__ inline void load_keys(const Scores& a, std::int64_t key0, std::uint32_t (&key)[kSteps][4]) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = key0 + thread / kWarp * 16 + thread % kWarp / 4 + 8 * half;
    const bool there = row < a.sizes.length;
    const Bf16* at = a.index_k + (a.batch * a.sizes.length + (there ? row : 0)) * kWidth + thread % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto* pairs = reinterpret_cast<const std::uint32_t*>(at + step * 16);
      key[step][half] = there ? __ldg(pairs) : 0U;
      key[step][2 + half] = there ? __ldg(pairs + 4) : 0U;
    }
  }
}

// The queries of a block.
struct Queries {
  std::int64_t first, end;
};

// Over the quad, the sums of a bundle's queries: lane `quad` gets those of its share, kBundle / 4 neighbours;
// where a share would be less than one query, two or four lanes get the same.
template <int kBundle>
constexpr int kShare = kBundle < 4 ? 1 : kBundle / 4;
template <int kBundle>
__device__ inline void sum_quad(const float (&part)[kBundle], int quad, float (&sum)[kShare<kBundle>]) {
  constexpr int kPairShare = kBundle < 2 ? 1 : kBundle / 2;
  float pair[kPairShare];
#pragma unroll
  for (int i = 0; i < kPairShare; ++i) {
    const bool upper = (quad & 2) != 0;
    const float low = part[i], high = part[kBundle < 2 ? i : i + kPairShare];
    pair[i] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, 2);
  }
#pragma unroll
  for (int i = 0; i < kShare<kBundle>; ++i) {
    const bool upper = (quad & 1) != 0;
    const float low = pair[i], high = pair[kBundle < 4 ? i : i + kShare<kBundle>];
    sum[i] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, 1);
  }
}

// score = c sum over heads of w relu(x), for the keys that each query sees.
template <int kBundle>
__device__ inline void write_scores(const Scores& a, const float (&x)[32], const unsigned char* w_pairs,
                                    std::int64_t query, std::int64_t end, std::int64_t key0) {
  constexpr int kGroups = 8 / kBundle;  // of 8 columns, a query
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup, quad = thread % 4;
  const auto* weights = reinterpret_cast<const std::uint32_t*>(w_pairs);
  // The first of a lane's queries; lanes that have the same one leave it to the first of them.
  const int own = kBundle >= 4 ? quad * kShare<kBundle> : kBundle == 2 ? quad / 2 : 0;
  const bool speaks = kBundle >= 4 || quad % (4 / min(kBundle, 4)) == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float part[kBundle] = {};
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      const std::uint32_t w = weights[group * 4 + quad];
      float& to = part[group / kGroups];
      to += low_half(w) * fmaxf(x[group * 4 + half * 2], 0.0F);
      to += high_half(w) * fmaxf(x[group * 4 + half * 2 + 1], 0.0F);
    }
    float score[kShare<kBundle>];
    sum_quad<kBundle>(part, quad, score);
    const std::int64_t key = key0 + thread / kWarp * 16 + thread % kWarp / 4 + 8 * half;
#pragma unroll
    for (int i = 0; i < kShare<kBundle>; ++i) {
      const std::int64_t mine = query + own + i;
      if (speaks && mine < end && key <= mine)
        a.scores[(mine - a.first) * a.sizes.length + key] = score[i] * a.sizes.index_scale;
    }
  }
}

// Starts the product of the warpgroup's keys with a bundle.
__device__ inline void start_product(float (&x)[32], const std::uint32_t (&key)[kSteps][4],
                                     const unsigned char* place) {
  const hopper::Operand q = hopper::k_major(place);
  hopper::keep_registers(x);
  hopper::fence_wgmma();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    hopper::wgmma_bf16<kDsaHeads, Major::kK>(
        x, key[step], q.advanced(step / 4 * kBoxBytes + step % 4 * hopper::kKMajorStepBytes),
        step == 0 ? Start::kZero : Start::kAccumulate);
  }
  hopper::commit_wgmma();
}

template <int kBundle>
__device__ inline void produce(const Scores& a, const Queries& queries, unsigned char* shared,
                               Barriers& barriers) {
  int turn = 0;
  for (std::int64_t query = queries.first; query < queries.end; query += 2 * kBundle, ++turn) {
    const int stage = turn % kStages;
    unsigned char* place = shared + stage * kStageBytes;
    const auto left = static_cast<int>(queries.end - query);
    barriers.empty[stage].wait(static_cast<unsigned>(turn / kStages % 2) ^ 1U);
    copy_bundle(a, query, min(left, kBundle), place);
    if (left > kBundle) copy_bundle(a, query + kBundle, min(left - kBundle, kBundle), place + kBundleBytes);
    arrive_when_copied(barriers.full[stage]);
  }
  wait_all_copies();
}

template <int kBundle>
__device__ inline void consume(const Scores& a, const Queries& queries, std::int64_t key0,
                               unsigned char* shared, Barriers& barriers) {
  std::uint32_t key[kSteps][4];
  load_keys(a, key0, key);
  float even[32] = {};
  float odd[32] = {};
  int turn = 0;
  for (std::int64_t query = queries.first; query < queries.end; query += 2 * kBundle, ++turn) {
    const int stage = turn % kStages;
    unsigned char* place = shared + stage * kStageBytes;
    barriers.full[stage].wait(static_cast<unsigned>(turn / kStages % 2));
    hopper::fence_shared_for_async();  // what ordinary copies wrote
    start_product(even, key, place);
    start_product(odd, key, place + kBundleBytes);  // past the last query: of no use, and no harm
    hopper::wait_wgmma<1>();
    hopper::keep_registers(even);
    write_scores<kBundle>(a, even, place + kWeights, query, queries.end, key0);
    hopper::wait_wgmma<0>();
    hopper::keep_registers(odd);
    write_scores<kBundle>(a, odd, place + kBundleBytes + kWeights, query + kBundle, queries.end, key0);
    barriers.empty[stage].arrive_as_warp();
  }
}

template <int kBundle>
__global__ void __launch_bounds__(kThreads, 1) index_scores(const __grid_constant__ Scores a) {
#if TERRACE_SM90A
  extern __shared__ unsigned char raw[];
  unsigned char* shared = raw + ((1024U - hopper::shared_address(raw) % 1024U) % 1024U);
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + kBarriers);
  const std::int64_t length = a.sizes.length, block_key = std::int64_t{blockIdx.x} * kKeys;
  const std::int64_t last_key = block_key + kKeys - 1 < length ? block_key + kKeys - 1 : length - 1;
  // Queries that see one of the keys.
  std::int64_t query = a.first + std::int64_t{blockIdx.y} * kQueries;
  std::int64_t end = a.first + a.rows < query + kQueries ? a.first + a.rows : query + kQueries;
  if (query < block_key) query = block_key;
  if (query >= end) return;
  const std::int64_t seen_until = sequence_end(a.packing, last_key, length);
  if (end > seen_until) end = seen_until;
  if (query >= end) return;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barriers.full[stage].init(hopper::kWarpgroup);
      barriers.empty[stage].init_for_warps(kConsumerThreads / kWarp);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads) {
    produce<kBundle>(a, {query, end}, shared, barriers);
  } else {
    consume<kBundle>(a, {query, end}, block_key + threadIdx.x / hopper::kWarpgroup * 64, shared, barriers);
  }
#endif
}

}  // namespace

bool scores_fit_hopper(OpCall& call, const DsaSelect& op) {
  const DsaShape& shape = op.shape;
  return op.in.index_q.dtype() == Dtype::kBf16 && shape.index_width == kWidth && shape.index_heads >= 8 &&
         shape.index_heads <= kDsaHeads && shape.index_heads % 8 == 0 && fits_pieces(op.in.index_q) &&
         fits_pieces(op.in.index_k) && fits_pieces(op.in.index_w) && hopper::device_traits(call).hopper;
}

void launch_hopper_scores(OpCall& call, const DsaScoreRows& rows) {
  // No query of the block sees later keys.
  const std::int64_t keys = rows.first + rows.rows;
  const Grid grid{.x = ceil_div(keys, kKeys),
                  .y = ceil_div(rows.rows, kQueries),
                  .threads = kThreads,
                  .shared_bytes = kSharedBytes};
  const Scores scores{.sizes = rows.sizes,
                      .index_q = rows.index_q.as<Bf16>(),
                      .index_k = rows.index_k.as<Bf16>(),
                      .index_w = rows.index_w.as<Bf16>(),
                      .packing = rows.packing,
                      .batch = rows.batch,
                      .first = rows.first,
                      .rows = rows.rows,
                      .scores = rows.scores};
  switch (rows.sizes.index_heads) {
    case 8:
      return call.launch(index_scores<8>, grid, scores);
    case 16:
      return call.launch(index_scores<4>, grid, scores);
    case 32:
      return call.launch(index_scores<2>, grid, scores);
    default:
      return call.launch(index_scores<1>, grid, scores);
  }
}

}  // namespace terrace::trainer::cuda
