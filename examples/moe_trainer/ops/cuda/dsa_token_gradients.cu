// dQ of a token, and the blocks of P and dA that its keys need, by wgmma: one block a token.
//
// A producing warpgroup copies Q and dO once and the chosen rows in tiles of 32. Of two consuming warpgroups
// the first makes S = Q K^T and P = e^(S - lse), the second dP = dO V^T and, with P handed over in fp32, dA =
// P (dP - delta) scale. Both then add dA K for a part of the columns of dQ, which stays in registers.
//   shared: Q | dO | stages | dA | P in passing | barriers
#include "examples/moe_trainer/ops/cuda/dsa_backward_hopper.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Major;
using hopper::Start;

constexpr int kTileRows = 32;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (kConsumers + 1) * hopper::kWarpgroup;
constexpr int kConsumerThreads = kConsumers * hopper::kWarpgroup;
constexpr int kHeadBoxBytes = kDsaHeads * 128;
constexpr int kTileBoxBytes = kTileRows * 128;
constexpr int kTilesPerBlock = kBlockSlots / kTileRows;
constexpr int kProbabilityBarrier = 1, kGradientBarrier = 2;

template <typename Form>
struct Layout {
  static constexpr int kKeyBoxes = Form::kKey / kBoxColumns;
  static constexpr int kValueBoxes = Form::kValue / kBoxColumns;
  // The wide form fills a multiprocessor's shared memory and registers; of the other two blocks fit.
  static constexpr int kStages = Form::kShared ? 2 : 3;
  static constexpr int kPerProcessor = Form::kShared ? 1 : 2;
  static constexpr int kStageBoxes = kKeyBoxes + (Form::kShared ? 0 : kValueBoxes);
  static constexpr int kFirstValueBox = Form::kShared ? 0 : kKeyBoxes;
  static constexpr int kDo = kKeyBoxes * kHeadBoxBytes;  // after Q
  static constexpr int kStage = kDo + kValueBoxes * kHeadBoxBytes;
  static constexpr int kGradient = kStage + kStages * kStageBoxes * kTileBoxBytes;
  static constexpr int kPassing = kGradient + kHeadBoxBytes;
  static constexpr int kBarriers = kPassing + 16 * hopper::kWarpgroup * 4;
  static constexpr int kBytes = kBarriers + 64 + 1024;
  // dQ's boxes of each consumer.
  static constexpr int kBoxes[kConsumers] = {(kKeyBoxes + 1) / 2, kKeyBoxes / 2};
};

template <typename Form>
struct Barriers {
  hopper::Barrier heads, full[Layout<Form>::kStages], empty[Layout<Form>::kStages];
  int cell;
};

__device__ inline int tiles_of(int count) { return (count + kBlockSlots - 1) / kBlockSlots * kTilesPerBlock; }

template <typename Form>
__device__ void produce(const TokenGradients& a, unsigned char* shared, Barriers<Form>& barriers,
                        std::int64_t token, int count) {
  using L = Layout<Form>;
  const std::int64_t sequence = token / a.sizes.length * a.sizes.length;
  const Bf16* sequence_k = a.k + sequence * Form::kKey;
  const Bf16* sequence_v = Form::kShared ? nullptr : a.v + sequence * Form::kValue;
  const std::int32_t* positions = a.selected + token * a.sizes.slots;
  const int heads = static_cast<int>(a.sizes.heads);
  copy_tile<kDsaHeads, L::kKeyBoxes>(
      hopper::shared_address(shared),
      head_rows<kDsaHeads>(a.q + token * heads * Form::kKey, heads, Form::kKey), a.k);
  copy_tile<kDsaHeads, L::kValueBoxes>(
      hopper::shared_address(shared + L::kDo),
      head_rows<kDsaHeads>(a.d_o + (token - a.turn.first) * heads * Form::kValue, heads, Form::kValue), a.k);
  arrive_when_copied(barriers.heads);
  const int tiles = tiles_of(count);
  TilePositions<kTileRows> next = tile_positions<kTileRows>(positions, 0, count);
  for (int tile = 0; tile < tiles; ++tile) {
    const TilePositions<kTileRows> now = next;
    next = tile_positions<kTileRows>(positions, tile + 1, count);
    const int stage = tile % L::kStages;
    barriers.empty[stage].wait(static_cast<unsigned>(tile / L::kStages % 2) ^ 1U);
    const std::uint32_t at =
        hopper::shared_address(shared + L::kStage + stage * L::kStageBoxes * kTileBoxBytes);
    copy_tile<kTileRows, L::kKeyBoxes>(at, gathered_rows<kTileRows>(now, sequence_k, Form::kKey), a.k);
    if constexpr (!Form::kShared) {
      copy_tile<kTileRows, L::kValueBoxes>(at + L::kFirstValueBox * kTileBoxBytes,
                                           gathered_rows<kTileRows>(now, sequence_v, Form::kValue), a.k);
    }
    arrive_when_copied(barriers.full[stage]);
  }
  wait_all_copies();
}

// What a thread knows of its two heads.
struct HeadPair {
  float lse[2], delta[2];  // lse in units of log 2
  bool real[2];
};
__device__ inline HeadPair head_pair(const TokenGradients& a, std::int64_t token) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  HeadPair pair;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = thread / kWarp * 16 + thread % kWarp / 4 + 8 * half;
    pair.real[half] = head < a.sizes.heads;
    const std::int64_t at = (token - a.turn.first) * a.sizes.heads + head;
    pair.lse[half] = pair.real[half] ? a.lse[at] * kLog2e : 0.0F;
    pair.delta[half] = pair.real[half] ? a.delta[at] : 0.0F;
  }
  return pair;
}

// The first consumer's part: S becomes P, handed over in `passing`.
__device__ inline void make_probabilities(float (&s)[16], const HeadPair& heads, float scale, int left,
                                          float* passing) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int half = i / 2 % 2, column = 8 * (i / 4) + 2 * (thread % 4) + i % 2;
    const bool there = heads.real[half] && column < left;
    s[i] = there ? exp2f(s[i] * scale - heads.lse[half]) : 0.0F;
    passing[i * hopper::kWarpgroup + thread] = s[i];
  }
  hopper::named_barrier_sync(kProbabilityBarrier, kConsumerThreads);
}

// The second consumer's: dP becomes dA, rounded into shared memory as an operand.
__device__ inline void make_logit_gradients(float (&d)[16], const HeadPair& heads, float scale,
                                            const float* passing, unsigned char* gradient) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const int row = thread / kWarp * 16 + thread % kWarp / 4, quad = thread % 4;
  hopper::named_barrier_sync(kProbabilityBarrier, kConsumerThreads);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float p = passing[i * hopper::kWarpgroup + thread];
    d[i] = p * (d[i] - heads.delta[i / 2 % 2]) * scale;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = row + 8 * half;
      *reinterpret_cast<std::uint32_t*>(gradient + r * 128 + (j ^ (r % 8)) * 16 + quad * 4) =
          as_pair(d[j * 4 + half * 2], d[j * 4 + half * 2 + 1]);
    }
  }
  hopper::fence_shared_for_async();
}

template <int kCount>
__device__ inline void store_query_gradient(const float (&d)[kCount], Bf16* rows, int heads, int width) {
  for_row_pieces(d, [&](int row, int column, uint4 pieces) {
    if (row < heads) *reinterpret_cast<uint4*>(rows + std::int64_t{row} * width + column) = pieces;
  });
}

// d += dA (64 x 32) times the tile's rows, from box `box` on.
template <int kColumns>
__device__ inline void add_product(float (&d)[kColumns / 2], const unsigned char* gradient,
                                   const unsigned char* rows, int box) {
  const hopper::Operand left = hopper::k_major(gradient);
  const hopper::Operand right = hopper::mn_major(rows + box * kTileBoxBytes, kTileBoxBytes);
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
    hopper::wgmma_bf16<kColumns, Major::kK, Major::kMN>(d, left.advanced(step * hopper::kKMajorStepBytes),
                                                        right.advanced(step * hopper::kMnMajorStepBytes),
                                                        Start::kAccumulate);
  }
}

template <typename Form, int kGroup>
__device__ void consume(const TokenGradients& a, unsigned char* shared, Barriers<Form>& barriers,
                        std::int64_t token, int count) {
  using L = Layout<Form>;
  constexpr int kFirstBox = kGroup == 0 ? 0 : L::kBoxes[0];
  constexpr int kWide = L::kBoxes[kGroup] >= 4 ? 4 : L::kBoxes[kGroup];
  constexpr int kRest = L::kBoxes[kGroup] - kWide;
  static_assert(kRest <= 1);
  unsigned char* gradient = shared + L::kGradient;
  auto* passing = reinterpret_cast<float*>(shared + L::kPassing);
  float wide[kWide * 32];
  float rest[32];
#pragma unroll
  for (float& value : wide) value = 0.0F;
#pragma unroll
  for (float& value : rest) value = 0.0F;
  const HeadPair heads = head_pair(a, token);
  const hopper::Operand left = hopper::k_major(kGroup == 0 ? shared : shared + L::kDo);
  barriers.heads.wait(0);
  hopper::fence_shared_for_async();
  Bf16* rows_out = (kGroup == 0 ? a.out.p : a.out.d_logit) +
                   (token - a.turn.first) * a.out.blocks * kBlockSlots * kDsaHeads;
  const int tiles = tiles_of(count);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % L::kStages;
    unsigned char* rows = shared + L::kStage + stage * L::kStageBoxes * kTileBoxBytes;
    barriers.full[stage].wait(static_cast<unsigned>(tile / L::kStages % 2));
    hopper::fence_shared_for_async();  // what ordinary copies wrote
    float s[16];
#pragma unroll
    for (float& value : s) value = 0.0F;
    if constexpr (kGroup == 0) {
      multiply_64x32<L::kKeyBoxes, kHeadBoxBytes, kTileBoxBytes>(s, left, hopper::k_major(rows));
    } else {
      multiply_64x32<L::kValueBoxes, kHeadBoxBytes, kTileBoxBytes>(
          s, left, hopper::k_major(rows + L::kFirstValueBox * kTileBoxBytes));
    }
    hopper::wait_wgmma<0>();
    hopper::keep_registers(s);
    if constexpr (kGroup == 0) {
      make_probabilities(s, heads, a.sizes.scale * kLog2e, count - tile * kTileRows, passing);
    } else {
      make_logit_gradients(s, heads, a.sizes.scale, passing, gradient);
    }
    hopper::named_barrier_sync(kGradientBarrier, kConsumerThreads);
    hopper::keep_registers(wide);
    hopper::keep_registers(rest);
    hopper::fence_wgmma();
    add_product<kWide * kBoxColumns>(wide, gradient, rows, kFirstBox);
    if constexpr (kRest > 0) add_product<kBoxColumns>(rest, gradient, rows, kFirstBox + kWide);
    hopper::commit_wgmma();
    store_slot_rows(s, rows_out + std::int64_t{tile} * kTileRows * kDsaHeads);
    hopper::keep_registers(wide);
    hopper::keep_registers(rest);
    hopper::wait_wgmma<0>();
    hopper::keep_registers(wide);
    hopper::keep_registers(rest);
    barriers.empty[stage].arrive_as_warp();
  }
  const int heads_there = static_cast<int>(a.sizes.heads);
  Bf16* d_q = a.d_q + token * a.sizes.heads * Form::kKey + kFirstBox * kBoxColumns;
  store_query_gradient(wide, d_q, heads_there, Form::kKey);
  if constexpr (kRest > 0) store_query_gradient(rest, d_q + kWide * kBoxColumns, heads_there, Form::kKey);
}

template <typename Form>
__global__ void __launch_bounds__(kThreads, Layout<Form>::kPerProcessor)
    token_gradients(const __grid_constant__ TokenGradients a) {
#if TERRACE_SM90A
  extern __shared__ unsigned char raw[];
  unsigned char* shared = raw + ((1024U - hopper::shared_address(raw) % 1024U) % 1024U);
  Barriers<Form>& barriers = *reinterpret_cast<Barriers<Form>*>(shared + Layout<Form>::kBarriers);
  const std::int64_t token = a.turn.first + (a.turn.count - 1 - blockIdx.x);
  if (threadIdx.x == 0) {
    barriers.heads.init(hopper::kWarpgroup);
    for (int stage = 0; stage < Layout<Form>::kStages; ++stage) {
      barriers.full[stage].init(hopper::kWarpgroup);
      barriers.empty[stage].init_for_warps(kConsumerThreads / kWarp);
    }
    hopper::fence_barrier_init();
  }
  const int count =
      chosen_count(a.selected + token * a.sizes.slots, static_cast<int>(a.sizes.slots), &barriers.cell);
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (group == kConsumers) {
    if constexpr (Layout<Form>::kPerProcessor == 1) hopper::give_registers<40>();
    produce<Form>(a, shared, barriers, token, count);
  } else if (group == 0) {
    if constexpr (Layout<Form>::kPerProcessor == 1) hopper::take_registers<232>();
    consume<Form, 0>(a, shared, barriers, token, count);
  } else {
    if constexpr (Layout<Form>::kPerProcessor == 1) hopper::take_registers<232>();
    consume<Form, 1>(a, shared, barriers, token, count);
  }
#endif
}

template <typename Form>
void launch_form(OpCall& call, const TokenGradients& a) {
  call.launch(token_gradients<Form>,
              Grid{.x = a.turn.count, .threads = kThreads, .shared_bytes = Layout<Form>::kBytes}, a);
}

}  // namespace

void launch_token_gradients(OpCall& call, const TokenGradients& a) {
  if (a.sizes.key_width == MlaForm::kKey) return launch_form<MlaForm>(call, a);
  launch_form<SplitForm>(call, a);
}

}  // namespace terrace::trainer::cuda
