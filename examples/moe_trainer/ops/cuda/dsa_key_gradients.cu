// dK and dV from P and dA where tokens look at few of their keys, without atomics on sums. The other way is
// dsa_key_blocks.cu.
//
// First, token by token, what each of its keys gets from it: a block of 64 slots is
//   rows (64, DK) = dA^T Q + [P^T dO in the first DV columns]      one key row, or
//   rows (64, DK | DV) = [dA^T Q | P^T dO]                         values of their own
// by wgmma and rounded to bf16. Then, key by key, the rows of
// the tokens that chose it are summed in the order of tokens in fp32. A 64-bit mask a key says which tokens
// those are: bits set in any order make one mask. The slot is found by bisection.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/dsa_backward_hopper.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Major;
using hopper::Start;

constexpr int kBoxBytes = kDsaHeads * 128;
constexpr int kStages = 2;

// Columns of the result, by warpgroups of `kColumns` each.
template <typename Form>
struct Layout {
  static constexpr int kKeyBoxes = Form::kKey / kBoxColumns;
  static constexpr int kValueBoxes = Form::kValue / kBoxColumns;
  static constexpr int kWidth = Form::kShared ? Form::kKey : Form::kKey + Form::kValue;
  static constexpr bool kOne = Form::kValue == 0;
  static constexpr int kGroups = kOne ? 1 : Form::kShared ? 3 : 2;
  static constexpr int kThreads = kGroups * hopper::kWarpgroup;
  static constexpr int kColumns = kWidth / kGroups;
  // dO has as many boxes as Q where both are added: the last is zero.
  static constexpr int kDoBoxes = kOne ? 0 : Form::kShared ? kKeyBoxes : kValueBoxes;
  static constexpr int kDo = kKeyBoxes * kBoxBytes;  // after Q
  static constexpr int kStage = kDo + kDoBoxes * kBoxBytes;
  static constexpr int kBytes = kStage + kStages * 2 * kBoxBytes + 1024;
};

// One block of P and of dA into a stage.
template <typename Form>
__device__ inline void copy_block(const KeyContributions& a, std::int64_t block, unsigned char* stage) {
  const std::uint32_t at = hopper::shared_address(stage);
  constexpr int kPieces = kDsaHeads * 8;
  constexpr int kAll = Layout<Form>::kOne ? kPieces : 2 * kPieces;  // P follows dA
  const std::int64_t first = block * kDsaHeads * kBlockSlots;
#pragma unroll
  for (int i = 0; i < kAll; i += Layout<Form>::kThreads) {
    const int piece = i + static_cast<int>(threadIdx.x);
    if (piece >= kAll) break;
    const Bf16* from = (piece < kPieces ? a.blocks.d_logit : a.blocks.p) + first + piece % kPieces * 8;
    const int row = piece % kPieces / 8;
    copy_piece(
        at + static_cast<std::uint32_t>(piece / kPieces * kBoxBytes + row * 128 + (piece % 8 ^ row % 8) * 16),
        from, 16);
  }
}

template <typename Form>
__device__ void copy_heads(const KeyContributions& a, unsigned char* shared, std::int64_t token, int group) {
  using L = Layout<Form>;
  const int heads = static_cast<int>(a.sizes.heads);
  if (group == 0) {
    copy_tile<kDsaHeads, L::kKeyBoxes>(
        hopper::shared_address(shared),
        head_rows<kDsaHeads>(a.q + token * heads * Form::kKey, heads, Form::kKey), a.q);
  } else if (group == 1) {
    copy_tile<kDsaHeads, L::kValueBoxes>(
        hopper::shared_address(shared + L::kDo),
        head_rows<kDsaHeads>(a.d_o + (token - a.turn.first) * heads * Form::kValue, heads, Form::kValue),
        a.q);
  } else {
    // What dO lacks to the width of Q.
    auto* zeros = reinterpret_cast<uint4*>(shared + L::kDo + L::kValueBoxes * kBoxBytes);
    for (int i = static_cast<int>(threadIdx.x) % hopper::kWarpgroup; i < kBoxBytes / 16;
         i += hopper::kWarpgroup) {
      zeros[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// sum (64, kColumns) += a b: 64 slots of 64 heads, 64 heads of columns.
template <int kColumns>
__device__ inline void add_product(float (&sum)[kColumns / 2], const unsigned char* a, const unsigned char* b,
                                   Start first) {
  const hopper::Operand left = hopper::k_major(a);
  const hopper::Operand right = hopper::mn_major(b, kBoxBytes);
#pragma unroll
  for (int step = 0; step < kDsaHeads / 16; ++step) {
    hopper::wgmma_bf16<kColumns, Major::kK, Major::kMN>(sum, left.advanced(step * hopper::kKMajorStepBytes),
                                                        right.advanced(step * hopper::kMnMajorStepBytes),
                                                        step == 0 ? first : Start::kAccumulate);
  }
}

// Block x: a token of the part; block y: every gridDim.y-th of its slot blocks.
template <typename Form>
__global__ void __launch_bounds__(Layout<Form>::kThreads, 1)
    slot_rows(const __grid_constant__ KeyContributions a) {
#if TERRACE_SM90A
  using L = Layout<Form>;
  extern __shared__ unsigned char raw[];
  __shared__ int cell;
  unsigned char* shared = raw + ((1024U - hopper::shared_address(raw) % 1024U) % 1024U);
  const std::int64_t token = a.part.first + blockIdx.x;
  const int group = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  const int count = chosen_count(a.selected + token * a.sizes.slots, static_cast<int>(a.sizes.slots), &cell);
  const int blocks = (count + kBlockSlots - 1) / kBlockSlots, step = static_cast<int>(gridDim.y);
  const std::int64_t first_block = (token - a.turn.first) * a.blocks.blocks;
  int block = static_cast<int>(blockIdx.y);
  if (block >= blocks) return;
  copy_heads<Form>(a, shared, token, group);
  copy_block<Form>(a, first_block + block, shared + L::kStage);
  commit_copies();
  const unsigned char* q = shared + group * (L::kColumns / kBoxColumns) * kBoxBytes;
  const unsigned char* d_o =
      shared + L::kDo + (Form::kShared ? group * (L::kColumns / kBoxColumns) * kBoxBytes : 0);
  for (int turn = 0; block < blocks; ++turn, block += step) {
    if (block + step < blocks) {
      copy_block<Form>(a, first_block + block + step,
                       shared + L::kStage + (turn + 1) % kStages * 2 * kBoxBytes);
    }
    commit_copies();
    wait_copies<1>();
    hopper::fence_shared_for_async();
    __syncthreads();
    const unsigned char* d_logit = shared + L::kStage + turn % kStages * 2 * kBoxBytes;
    const unsigned char* p = d_logit + kBoxBytes;
    float sum[L::kColumns / 2];
#pragma unroll
    for (float& value : sum) value = 0.0F;
    hopper::keep_registers(sum);
    hopper::fence_wgmma();
    if constexpr (L::kOne) {
      add_product<L::kColumns>(sum, d_logit, q, Start::kZero);
    } else if constexpr (Form::kShared) {
      add_product<L::kColumns>(sum, d_logit, q, Start::kZero);
      add_product<L::kColumns>(sum, p, d_o, Start::kAccumulate);
    } else {
      add_product<L::kColumns>(sum, group == 0 ? d_logit : p, group == 0 ? q : d_o, Start::kZero);
    }
    hopper::commit_wgmma();
    hopper::keep_registers(sum);
    hopper::wait_wgmma<0>();
    hopper::keep_registers(sum);
    __syncthreads();  // the stage may be filled again
    Bf16* rows = a.rows + (std::int64_t{blockIdx.x} * a.blocks.blocks + block) * kBlockSlots * L::kWidth;
    for_row_pieces(sum, [&](int row, int column, uint4 pieces) {
      if (block * kBlockSlots + row >= count) return;
      *reinterpret_cast<uint4*>(rows + std::int64_t{row} * L::kWidth + group * L::kColumns + column) = pieces;
    });
  }
#endif
}

__global__ void mark_chosen(const KeyContributions a) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.part.count * a.sizes.slots) return;
  const std::int64_t index = i / a.sizes.slots, token = a.part.first + index;
  const std::int32_t position = a.selected[token * a.sizes.slots + i % a.sizes.slots];
  if (position < 0) return;
  atomicOr(a.chosen + token / a.sizes.length * a.sizes.length + position, 1ULL << index);
}

constexpr int kKeysPerBlock = 8;
constexpr int kReduceThreads = 192;

__device__ inline void add_pieces(float (&sum)[8], uint4 row) {
  sum[0] += low_half(row.x);
  sum[1] += high_half(row.x);
  sum[2] += low_half(row.y);
  sum[3] += high_half(row.y);
  sum[4] += low_half(row.z);
  sum[5] += high_half(row.z);
  sum[6] += low_half(row.w);
  sum[7] += high_half(row.w);
}

__global__ void __launch_bounds__(kReduceThreads)
    add_rows(const KeyContributions a, std::int64_t first_key, std::int64_t end_key) {
  __shared__ unsigned long long mask[kKeysPerBlock];
  __shared__ int row_of[kKeysPerBlock][kPartTokens];
  const std::int64_t key0 = first_key + std::int64_t{blockIdx.x} * kKeysPerBlock;
  const int thread = static_cast<int>(threadIdx.x);
  unsigned long long mine = 0;
  if (thread < kKeysPerBlock) {
    mine = key0 + thread < end_key ? a.chosen[key0 + thread] : 0;
    mask[thread] = mine;
  }
  if (!__syncthreads_or(mine != 0)) return;
  const std::int64_t length = a.sizes.length;
  for (int i = thread; i < kKeysPerBlock * kPartTokens; i += kReduceThreads) {
    const int key = i / kPartTokens, index = i % kPartTokens;
    if ((mask[key] >> index & 1U) == 0) continue;
    const auto position = static_cast<std::int32_t>((key0 + key) % length);
    const std::int32_t* positions = a.selected + (a.part.first + index) * a.sizes.slots;
    const int slot = slot_of(positions, static_cast<int>(a.sizes.slots), position);
    const int rank = __popcll(mask[key] & ((1ULL << index) - 1));
    row_of[key][rank] = index * static_cast<int>(a.blocks.blocks) * kBlockSlots + slot;
  }
  __syncthreads();
  const int width = static_cast<int>(dsa_row_width(a.sizes)), pieces = width / 8;
  for (int i = thread; i < kKeysPerBlock * pieces; i += kReduceThreads) {
    const int key = i / pieces, column = i % pieces * 8, count = __popcll(mask[key]);
    if (count == 0) continue;
    float sum[8] = {};
    int n = 0;
    for (; n + 4 <= count; n += 4) {
      uint4 row[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        row[j] = __ldcs(
            reinterpret_cast<const uint4*>(a.rows + std::int64_t{row_of[key][n + j]} * width + column));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) add_pieces(sum, row[j]);
    }
    for (; n < count; ++n) {
      add_pieces(sum,
                 *reinterpret_cast<const uint4*>(a.rows + std::int64_t{row_of[key][n]} * width + column));
    }
    const bool of_key = column < a.sizes.key_width;
    float* to = of_key ? a.d_k + (key0 + key) * a.sizes.key_width + column
                       : a.d_v + (key0 + key) * a.sizes.value_width + column - a.sizes.key_width;
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] += sum[j];
  }
}

template <typename Form>
void launch_slot_rows(OpCall& call, const KeyContributions& a) {
  // Few tokens: several blocks each, so that all multiprocessors have work.
  const std::int64_t shares = std::min<std::int64_t>(a.blocks.blocks, ceil_div(128, a.part.count));
  call.launch(slot_rows<Form>,
              Grid{.x = a.part.count,
                   .y = shares,
                   .threads = Layout<Form>::kThreads,
                   .shared_bytes = Layout<Form>::kBytes},
              a);
}

void launch_add_rows(OpCall& call, const KeyContributions& a) {
  // Keys of the batch rows that the part touches, up to its last token.
  const std::int64_t first_key = a.part.first / a.sizes.length * a.sizes.length;
  const std::int64_t keys = a.part.first + a.part.count - first_key;
  call.check(cudaMemsetAsync(a.chosen + first_key, 0, static_cast<std::size_t>(keys) * sizeof *a.chosen,
                             call.stream()),
             "cudaMemsetAsync");
  call.launch(mark_chosen, grid_for(a.part.count * a.sizes.slots), a);
  call.launch(add_rows, Grid{.x = ceil_div(keys, kKeysPerBlock), .threads = kReduceThreads}, a, first_key,
              first_key + keys);
}

}  // namespace

void launch_key_contributions(OpCall& call, const KeyContributions& a) {
  if (a.sizes.key_width == MlaForm::kKey) {
    launch_slot_rows<MlaForm>(call, a);
  } else {
    launch_slot_rows<SplitForm>(call, a);
  }
  launch_add_rows(call, a);
}

void launch_index_key_contributions(OpCall& call, const KeyContributions& a) {
  launch_slot_rows<IndexForm>(call, a);
  launch_add_rows(call, a);
}

}  // namespace terrace::trainer::cuda
