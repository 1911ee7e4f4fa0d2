// Sparse attention by wgmma: one block a token, all its heads (64 rows) against tiles of 64 gathered rows.
//
// A producing warpgroup copies Q once and the chosen rows tile by tile into two stages. Two consuming
// warpgroups share a tile: each scores half of its rows, S = Q K^T (64 x 32); they exchange the maxima of
// their rows, put their halves of P = 2^(S - m) into shared memory, and each adds P V for half of the value's
// columns. O stays in registers.
//   shared: Q | stages | P | maxima | barriers
#include "examples/moe_trainer/ops/cuda/dsa_forward_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/dsa_hopper.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Major;
using hopper::Start;

constexpr int kTileRows = 64;
constexpr int kStages = 2;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (kConsumers + 1) * hopper::kWarpgroup;
constexpr int kConsumerThreads = kConsumers * hopper::kWarpgroup;
constexpr int kBoxBytes = kTileRows * 128;
constexpr int kMaximaBarrier = 1, kProbabilityBarrier = 2;

template <typename Form>
struct Layout {
  static constexpr int kKeyBoxes = Form::kKey / kBoxColumns;
  static constexpr int kValueBoxes = Form::kValue / kBoxColumns;
  static constexpr int kStageBoxes = kKeyBoxes + (Form::kShared ? 0 : kValueBoxes);
  static constexpr int kFirstValueBox = Form::kShared ? 0 : kKeyBoxes;
  static constexpr int kStage = kKeyBoxes * kBoxBytes;  // after Q
  static constexpr int kProbabilities = kStage + kStages * kStageBoxes * kBoxBytes;
  static constexpr int kMaxima = kProbabilities + kBoxBytes;
  static constexpr int kBarriers = kMaxima + kConsumers * kDsaHeads * 4;
  static constexpr int kBytes = kBarriers + 64 + 1024;  // the start is rounded up to 1024
};

struct Barriers {
  hopper::Barrier q, full[kStages], empty[kStages];
  int cell;
};

template <typename Form>
__device__ void produce(const HopperForward& a, unsigned char* shared, Barriers& barriers, std::int64_t token,
                        int count) {
  using L = Layout<Form>;
  const Bf16* sequence_k = a.k + token / a.sizes.length * a.sizes.length * Form::kKey;
  const Bf16* sequence_v =
      Form::kShared ? nullptr : a.v + token / a.sizes.length * a.sizes.length * Form::kValue;
  const std::int32_t* positions = a.selected + token * a.sizes.slots;
  const int heads = static_cast<int>(a.sizes.heads);
  copy_tile<kDsaHeads, L::kKeyBoxes>(
      hopper::shared_address(shared),
      head_rows<kDsaHeads>(a.q + token * heads * Form::kKey, heads, Form::kKey), a.k);
  arrive_when_copied(barriers.q);
  const int tiles = (count + kTileRows - 1) / kTileRows;
  TilePositions<kTileRows> next = tile_positions<kTileRows>(positions, 0, count);
  for (int tile = 0; tile < tiles; ++tile) {
    const TilePositions<kTileRows> now = next;
    next = tile_positions<kTileRows>(positions, tile + 1, count);
    const int stage = tile % kStages;
    barriers.empty[stage].wait(static_cast<unsigned>(tile / kStages % 2) ^ 1U);
    const std::uint32_t at = hopper::shared_address(shared + L::kStage + stage * L::kStageBoxes * kBoxBytes);
    copy_tile<kTileRows, L::kKeyBoxes>(at, gathered_rows<kTileRows>(now, sequence_k, Form::kKey), a.k);
    if constexpr (!Form::kShared) {
      copy_tile<kTileRows, L::kValueBoxes>(at + L::kFirstValueBox * kBoxBytes,
                                           gathered_rows<kTileRows>(now, sequence_v, Form::kValue), a.k);
    }
    arrive_when_copied(barriers.full[stage]);
  }
  wait_all_copies();
}

// Of this thread's two rows: the running maximum in units of log 2, and its part of the sum.
struct Running {
  float top[2], sum[2];
};

// S becomes P, rounded into shared memory; returns by how much earlier sums shrink.
__device__ inline float2 soften(float (&s)[16], float scale, int columns_left, Running& running,
                                float* maxima, unsigned char* probabilities, int group) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const int row = thread / kWarp * 16 + thread % kWarp / 4, quad = thread % 4;
  float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int column = 8 * (i / 4) + 2 * quad + i % 2;
    s[i] = column < columns_left ? s[i] * scale : -INFINITY;
    largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(kFullWarp, largest[half], 1));
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(kFullWarp, largest[half], 2));
    if (quad == 0) maxima[group * kDsaHeads + row + 8 * half] = largest[half];
  }
  hopper::named_barrier_sync(kMaximaBarrier, kConsumerThreads);
  float shrink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float others = maxima[(1 - group) * kDsaHeads + row + 8 * half];
    const float top = fmaxf(running.top[half], fmaxf(largest[half], others));
    shrink[half] = exp2f(running.top[half] - top);
    running.top[half] = top;
    running.sum[half] *= shrink[half];
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    s[i] = exp2f(s[i] - running.top[i / 2 % 2]);
    running.sum[i / 2 % 2] += s[i];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = row + 8 * half, piece = (group * 4 + j) ^ (r % 8);
      *reinterpret_cast<std::uint32_t*>(probabilities + r * 128 + piece * 16 + quad * 4) =
          as_pair(s[j * 4 + half * 2], s[j * 4 + half * 2 + 1]);
    }
  }
  hopper::fence_shared_for_async();
  hopper::named_barrier_sync(kProbabilityBarrier, kConsumerThreads);
  return make_float2(shrink[0], shrink[1]);
}

template <int kCount>
__device__ inline void shrink_rows(float (&o)[kCount], float2 by) {
  if (!__any_sync(kFullWarp, by.x != 1.0F || by.y != 1.0F)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= i / 2 % 2 == 0 ? by.x : by.y;
}

template <typename Form, int kCount>
__device__ void write_out(const HopperForward& a, float (&o)[kCount], Running& running, float* sums,
                          std::int64_t token, int group) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const int first_row = thread / kWarp * 16 + thread % kWarp / 4;
  const int heads = static_cast<int>(a.sizes.heads);
  // The maxima's readers are done: the last of them passed the barrier of the probabilities.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    running.sum[half] += __shfl_xor_sync(kFullWarp, running.sum[half], 1);
    running.sum[half] += __shfl_xor_sync(kFullWarp, running.sum[half], 2);
    if (thread % 4 == 0) sums[group * kDsaHeads + first_row + 8 * half] = running.sum[half];
  }
  hopper::named_barrier_sync(kMaximaBarrier, kConsumerThreads);
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = first_row + 8 * half;
    const float total = sums[head] + sums[kDsaHeads + head];
    factor[half] = total > 0.0F ? 1.0F / total : total;  // a NaN passes on
    if (a.lse != nullptr && group == 0 && thread % 4 == 0 && head < heads) {
      a.lse[(token - a.first_out) * heads + head] =
          running.top[half] == -INFINITY ? -INFINITY : (running.top[half] + log2f(total)) * kLn2;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[i / 2 % 2];
  for_row_pieces(o, [&](int row, int column, uint4 pieces) {
    if (row >= heads) return;
    const std::int64_t in_token = std::int64_t{row} * Form::kValue + group * (Form::kValue / 2) + column;
    const std::int64_t at = (token - a.first_out) * heads * Form::kValue + in_token;
    if (a.attention != nullptr) *reinterpret_cast<uint4*>(a.attention + at) = pieces;
    if (a.y == nullptr) return;
    if (a.gate != nullptr) {
      const uint4 gate =
          __ldg(reinterpret_cast<const uint4*>(a.gate + token * heads * Form::kValue + in_token));
      const auto open = [](std::uint32_t o_pair, std::uint32_t gate_pair) {
        return as_pair(low_half(o_pair) * sigmoid(low_half(gate_pair)),
                       high_half(o_pair) * sigmoid(high_half(gate_pair)));
      };
      pieces = make_uint4(open(pieces.x, gate.x), open(pieces.y, gate.y), open(pieces.z, gate.z),
                          open(pieces.w, gate.w));
    }
    *reinterpret_cast<uint4*>(a.y + at) = pieces;
  });
}

template <typename Form>
__device__ void consume(const HopperForward& a, unsigned char* shared, Barriers& barriers, std::int64_t token,
                        int count, int group) {
  using L = Layout<Form>;
  constexpr int kColumns = Form::kValue / 2;
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const int first_row = thread / kWarp * 16 + thread % kWarp / 4;
  unsigned char* probabilities = shared + L::kProbabilities;
  auto* maxima = reinterpret_cast<float*>(shared + L::kMaxima);
  float o[kColumns / 2];
#pragma unroll
  for (float& value : o) value = 0.0F;
  Running running{{-INFINITY, -INFINITY}, {0.0F, 0.0F}};
  if (a.sink != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = first_row + 8 * half;
      running.top[half] = head < a.sizes.heads ? a.sink[head] * kLog2e : 0.0F;
      // It counts once among the threads of a row.
      running.sum[half] = group == 0 && thread % 4 == 0 ? 1.0F : 0.0F;
    }
  }
  const float scale = a.sizes.scale * kLog2e;
  const hopper::Operand q = hopper::k_major(shared);
  const hopper::Operand p = hopper::k_major(probabilities);
  barriers.q.wait(0);
  const int tiles = (count + kTileRows - 1) / kTileRows;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    unsigned char* rows = shared + L::kStage + stage * L::kStageBoxes * kBoxBytes;
    barriers.full[stage].wait(static_cast<unsigned>(tile / kStages % 2));
    hopper::fence_shared_for_async();  // what ordinary copies wrote
    float s[16];
#pragma unroll
    for (float& value : s) value = 0.0F;
    multiply_64x32<L::kKeyBoxes, kDsaHeads * 128, kBoxBytes>(s, q,
                                                             hopper::k_major(rows + group * (kBoxBytes / 2)));
    hopper::wait_wgmma<0>();
    hopper::keep_registers(s);
    const float2 shrink =
        soften(s, scale, count - tile * kTileRows - group * 32, running, maxima, probabilities, group);
    shrink_rows(o, shrink);
    const hopper::Operand v =
        hopper::mn_major(rows + (L::kFirstValueBox + group * (L::kValueBoxes / 2)) * kBoxBytes, kBoxBytes);
    hopper::keep_registers(o);
    hopper::fence_wgmma();
#pragma unroll
    for (int step = 0; step < kTileRows / 16; ++step) {
      hopper::wgmma_bf16<kColumns, Major::kK, Major::kMN>(o, p.advanced(step * hopper::kKMajorStepBytes),
                                                          v.advanced(step * hopper::kMnMajorStepBytes),
                                                          Start::kAccumulate);
    }
    hopper::commit_wgmma();
    hopper::keep_registers(o);
    hopper::wait_wgmma<0>();
    hopper::keep_registers(o);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barriers.empty[stage].arrive();
  }
  write_out<Form>(a, o, running, maxima, token, group);
}

template <typename Form>
__global__ void __launch_bounds__(kThreads, 1) hopper_forward(const __grid_constant__ HopperForward a) {
#if TERRACE_SM90A
  extern __shared__ unsigned char raw[];
  unsigned char* shared = raw + ((1024U - hopper::shared_address(raw) % 1024U) % 1024U);
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + Layout<Form>::kBarriers);
  // The last tokens have most to do.
  const std::int64_t token = a.first + (a.count - 1 - blockIdx.x);
  if (threadIdx.x == 0) {
    barriers.q.init(hopper::kWarpgroup);
    for (int stage = 0; stage < kStages; ++stage) {
      barriers.full[stage].init(hopper::kWarpgroup);
      barriers.empty[stage].init(kConsumerThreads / kWarp);
    }
    hopper::fence_barrier_init();
  }
  const int count =
      chosen_count(a.selected + token * a.sizes.slots, static_cast<int>(a.sizes.slots), &barriers.cell);
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (group == kConsumers) {
    hopper::give_registers<40>();
    produce<Form>(a, shared, barriers, token, count);
  } else {
    hopper::take_registers<232>();
    consume<Form>(a, shared, barriers, token, count, group);
  }
#endif
}

template <typename Form>
void launch_form(OpCall& call, const HopperForward& forward) {
  call.launch(hopper_forward<Form>,
              Grid{.x = forward.count, .threads = kThreads, .shared_bytes = Layout<Form>::kBytes}, forward);
}

}  // namespace

void launch_hopper_forward(OpCall& call, const HopperForward& forward) {
  if (forward.sizes.key_width == MlaForm::kKey) return launch_form<MlaForm>(call, forward);
  launch_form<SplitForm>(call, forward);
}

void launch_hopper_forward(OpCall& call, const Dsa& op, const DsaSizes& sizes) {
  launch_hopper_forward(call, HopperForward{.sizes = sizes,
                                            .q = op.in.q.as<Bf16>(),
                                            .k = op.in.k.as<Bf16>(),
                                            .v = op.in.v.as<Bf16>(),
                                            .gate = op.in.gate.as<Bf16>(),
                                            .sink = op.in.sink,
                                            .selected = op.selected,
                                            .first = 0,
                                            .count = sizes.tokens(),
                                            .first_out = 0,
                                            .y = op.y.as<Bf16>(),
                                            .lse = op.lse,
                                            .attention = op.attention.as<Bf16>()});
}

}  // namespace terrace::trainer::cuda
