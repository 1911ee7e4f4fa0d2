// dK and dV of a turn for blocks of 256 keys: the fast way where the tokens look at a good part of their
// keys.
//
//   dK (256, DK) = sum over tokens of dA^T Q,   dV (256, DV) = sum over tokens of P^T dO
// is one long product whose inner index is (token, head). A thread block has 256 keys, some columns and some
// tokens, and keeps its sum in registers. For each token that chose one of its keys a producing warpgroup
// gathers the rows of dA or P, zeros for keys that the token did not choose, beside the columns of Q or dO;
// two consuming warpgroups multiply, 128 keys each. Which slot a key has comes from a map of the turn: 32
// keys a word. The sums of the shares of tokens are added in order afterwards. What zeros cost is the price
// of not writing and reading a row for every slot of every token.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/dsa_backward_hopper.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Major;
using hopper::Start;

constexpr int kBlockWords = kKeyBlock / 32;
constexpr int kStages = 4;
constexpr int kConsumerThreads = 2 * hopper::kWarpgroup;
constexpr int kThreads = kConsumerThreads + hopper::kWarpgroup;
constexpr int kKeyBytes = kKeyBlock * 128;  // of P or dA in a stage
constexpr int kRowsBytes = 64 * 128;        // 64 keys of that
constexpr int kBoxBytes = kDsaHeads * 128;
constexpr std::int64_t kMinShareTokens = 16;
constexpr std::int64_t kTilesWanted = 396;  // three for each multiprocessor of an H200

// Columns in groups, one a thread block. With the value in the key row both products go into one sum;
// otherwise the first group is dK and the second dV.
template <typename Form>
struct Work {
  static constexpr bool kBoth = Form::kShared && Form::kValue > 0;
  static constexpr int kProducts = kBoth ? 2 : 1;
  static constexpr int kGroups = kBoth ? 3 : Form::kValue > 0 ? 2 : 1;
  static constexpr int kBoxes = Form::kKey / kBoxColumns / (kBoth ? kGroups : 1);
  static constexpr int kColumns = kBoxes * kBoxColumns;
  // The value is narrower: what its last group lacks is zero.
  static constexpr int kLastValueBoxes = kBoth ? Form::kValue / kBoxColumns - (kGroups - 1) * kBoxes : kBoxes;
  static constexpr int kStage = kKeyBytes + kBoxes * kBoxBytes;
  static constexpr int kList = kStages * kStage;  // of tokens, 16 bits each
  static constexpr int kBarriers = kList + 2 * static_cast<int>(kTurnTokens);
  static constexpr int kBytes = kBarriers + 16 * kStages + 1024;
  static constexpr std::int64_t kTile = std::int64_t{kKeyBlock} * kColumns;
  static_assert(kStages % kProducts == 0);  // a stage is for one product
};

struct Barriers {
  hopper::Barrier full[kStages], empty[kStages];
};

struct Share {
  int key_block, group;
  int first, end;  // tokens of the turn
};

// How the work is cut: shares of tokens, so that all multiprocessors have some.
struct Cut {
  std::int64_t first_key, keys, blocks, units, shares;
};
template <typename Form>
Cut make_cut(const KeyBlocks& a) {
  Cut cut{};
  cut.first_key = first_key_of(a.sizes, a.turn);
  cut.keys = a.turn.first + a.turn.count - cut.first_key;
  cut.blocks = ceil_div(cut.keys, kKeyBlock);
  cut.units = cut.blocks * Work<Form>::kGroups;
  cut.shares = std::clamp<std::int64_t>(kTilesWanted / cut.units, 1, ceil_div(a.turn.count, kMinShareTokens));
  return cut;
}

// The share's tokens that chose one of the block's keys, in order; by all threads.
template <typename Form>
__device__ int list_tokens(const KeyBlocks& a, const Share& share, std::int64_t words, std::uint16_t* list) {
  int listed = 0;
  for (int base = share.first; base < share.end; base += kThreads) {
    const int token = base + static_cast<int>(threadIdx.x);
    bool looks = false;
    if (token < share.end) {
      const KeyWord* from = a.words + token * words + share.key_block * kBlockWords;
#pragma unroll
      for (int i = 0; i < kBlockWords; ++i) looks = looks || from[i].bits != 0;
    }
    int here = 0;
    const int rank = block_rank<kThreads>(looks, &here);
    if (looks) list[listed + rank] = static_cast<std::uint16_t>(token);
    listed += here;
  }
  return listed;
}

// A token's words for the block: 64 keys each.
struct BlockWords {
  uint4 two[kBlockWords / 2];
};
__device__ inline BlockWords block_words(const KeyBlocks& a, std::int64_t words, int key_block, int token) {
  BlockWords result;
  const auto* from = reinterpret_cast<const uint4*>(a.words + token * words + key_block * kBlockWords);
#pragma unroll
  for (int i = 0; i < kBlockWords / 2; ++i) result.two[i] = __ldg(from + i);
  return result;
}

// The slots of this thread's keys, t / 8 + 16 i, or -1.
constexpr int kThreadKeys = kKeyBlock / kRowsAtOnce;
__device__ inline void find_slots(const BlockWords& words, int (&slot)[kThreadKeys]) {
  const unsigned row0 = threadIdx.x % hopper::kWarpgroup / 8;
#pragma unroll
  for (int i = 0; i < kThreadKeys; ++i) {
    const uint4& two = words.two[i / 4];
    const unsigned bits = i % 4 < 2 ? two.x : two.z, before = i % 4 < 2 ? two.y : two.w;
    const unsigned bit = row0 + (i % 2 == 0 ? 0U : 16U);
    slot[i] = (bits >> bit & 1U) != 0U ? static_cast<int>(before) + __popc(bits & ((1U << bit) - 1U)) : -1;
  }
}

// Rows of P or dA, 64 heads each, to the block's keys.
__device__ inline void copy_keys(const Bf16* token_rows, const int (&slot)[kThreadKeys], std::uint32_t to) {
  const unsigned thread = threadIdx.x % hopper::kWarpgroup, piece = thread % 8, row0 = thread / 8;
  to += row0 * 128 + (piece ^ row0 % 8) * 16;
#pragma unroll
  for (int i = 0; i < kThreadKeys; ++i) {
    const int there = slot[i] >= 0 ? slot[i] : 0;
    copy_piece(to + static_cast<std::uint32_t>(i) * kRowsAtOnce * 128,
               token_rows + std::int64_t{there} * kDsaHeads + piece * 8, slot[i] >= 0 ? 16 : 0);
  }
}

template <typename Form>
__device__ void produce(const KeyBlocks& a, const Share& share, std::int64_t words, unsigned char* shared,
                        Barriers& barriers, const std::uint16_t* list, int listed) {
  using W = Work<Form>;
  if (listed == 0) return;
  const int heads = static_cast<int>(a.sizes.heads);
  const std::int64_t token_numbers = a.blocks.blocks * kBlockSlots * kDsaHeads;
  BlockWords next = block_words(a, words, share.key_block, list[0]);
  int round = 0;
  for (int n = 0; n < listed; ++n) {
    const int token = list[n];
    int slot[kThreadKeys];
    find_slots(next, slot);
    if (n + 1 < listed) next = block_words(a, words, share.key_block, list[n + 1]);
#pragma unroll
    for (int product = 0; product < W::kProducts; ++product, ++round) {
      const bool of_value = W::kBoth ? product == 1 : share.group == 1;
      const int stage = round % kStages;
      barriers.empty[stage].wait(static_cast<unsigned>(round / kStages % 2) ^ 1U);
      const std::uint32_t at = hopper::shared_address(shared + stage * W::kStage);
      copy_keys((of_value ? a.blocks.p : a.blocks.d_logit) + token * token_numbers, slot, at);
      const int column = W::kBoth ? share.group * W::kColumns : 0;
      const std::uint32_t columns_at = at + kKeyBytes;
      if (!of_value) {
        const Bf16* q = a.q + (a.turn.first + token) * heads * Form::kKey + column;
        copy_tile<kDsaHeads, W::kBoxes>(columns_at, head_rows<kDsaHeads>(q, heads, Form::kKey), a.q);
      } else {
        const Bf16* d_o = a.d_o + std::int64_t{token} * heads * Form::kValue + column;
        const auto rows = head_rows<kDsaHeads>(d_o, heads, Form::kValue);
        if (W::kLastValueBoxes < W::kBoxes && share.group == W::kGroups - 1) {
          copy_tile<kDsaHeads, W::kLastValueBoxes>(columns_at, rows, a.q);
        } else {
          copy_tile<kDsaHeads, W::kBoxes>(columns_at, rows, a.q);
        }
      }
      arrive_when_copied(barriers.full[stage]);
    }
  }
  wait_all_copies();
}

// What no copy ever writes.
template <typename Form>
__device__ void zero_missing_boxes(unsigned char* shared) {
  using W = Work<Form>;
  constexpr int kMissing = (W::kBoxes - W::kLastValueBoxes) * kBoxBytes / 16;
  for (int stage = 1; stage < kStages; stage += 2) {
    auto* zeros =
        reinterpret_cast<uint4*>(shared + stage * W::kStage + kKeyBytes + W::kLastValueBoxes * kBoxBytes);
    for (int i = static_cast<int>(threadIdx.x); i < kMissing; i += kThreads)
      zeros[i] = make_uint4(0, 0, 0, 0);
  }
  hopper::fence_shared_for_async();
}

// sum (64, kColumns) += a (64 keys, 64 heads) b (64 heads, kColumns)
template <int kColumns>
__device__ inline void add_product(float (&sum)[kColumns / 2], hopper::Operand a, hopper::Operand b) {
#pragma unroll
  for (int step = 0; step < kDsaHeads / 16; ++step) {
    hopper::wgmma_bf16<kColumns, Major::kK, Major::kMN>(sum, a.advanced(step * hopper::kKMajorStepBytes),
                                                        b.advanced(step * hopper::kMnMajorStepBytes),
                                                        Start::kAccumulate);
  }
}

template <int kColumns>
__device__ inline void store_sum(const float (&sum)[kColumns / 2], float* rows) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  float* at = rows + (thread / kWarp * 16 + thread % kWarp / 4) * kColumns + thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 2) {
    *reinterpret_cast<float2*>(at + i / 2 % 2 * 8 * kColumns + i / 4 * 8) = make_float2(sum[i], sum[i + 1]);
  }
}

// One round's products are in flight while the next one's are issued.
template <typename Form>
__device__ void consume(const unsigned char* shared, Barriers& barriers, int rounds, float* tile) {
  using W = Work<Form>;
  const int half = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  float low[W::kColumns / 2];
  float high[W::kColumns / 2];
#pragma unroll
  for (float& value : low) value = 0.0F;
#pragma unroll
  for (float& value : high) value = 0.0F;
  hopper::keep_registers(low);
  hopper::keep_registers(high);
  for (int round = 0; round < rounds; ++round) {
    const int stage = round % kStages;
    const unsigned char* at = shared + stage * W::kStage;
    barriers.full[stage].wait(static_cast<unsigned>(round / kStages % 2));
    hopper::fence_shared_for_async();  // what ordinary copies wrote
    hopper::fence_wgmma();
    const hopper::Operand keys = hopper::k_major(at + half * 2 * kRowsBytes);
    const hopper::Operand columns = hopper::mn_major(at + kKeyBytes, kBoxBytes);
    add_product<W::kColumns>(low, keys, columns);
    add_product<W::kColumns>(high, keys.advanced(kRowsBytes), columns);
    hopper::commit_wgmma();
    if (round == 0) continue;
    hopper::wait_wgmma<1>();
    barriers.empty[(round - 1) % kStages].arrive_as_warp();
  }
  hopper::wait_wgmma<0>();
  hopper::keep_registers(low);
  hopper::keep_registers(high);
  store_sum<W::kColumns>(low, tile + half * 2 * 64 * W::kColumns);
  store_sum<W::kColumns>(high, tile + (half * 2 + 1) * 64 * W::kColumns);
}

// Block x: a block of keys and a group of columns; block y: a share of the tokens.
template <typename Form>
__global__ void __launch_bounds__(kThreads, 1)
    key_blocks(const __grid_constant__ KeyBlocks a, std::int64_t words) {
#if TERRACE_SM90A
  using W = Work<Form>;
  extern __shared__ unsigned char raw[];
  unsigned char* shared = raw + ((1024U - hopper::shared_address(raw) % 1024U) % 1024U);
  auto* list = reinterpret_cast<std::uint16_t*>(shared + W::kList);
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + W::kBarriers);
  const int count = static_cast<int>(a.turn.count), shares = static_cast<int>(gridDim.y);
  const int per_share = (count + shares - 1) / shares, first = static_cast<int>(blockIdx.y) * per_share;
  const Share share{.key_block = static_cast<int>(blockIdx.x) / W::kGroups,
                    .group = static_cast<int>(blockIdx.x) % W::kGroups,
                    .first = min(first, count),
                    .end = min(first + per_share, count)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barriers.full[stage].init(hopper::kWarpgroup);
      barriers.empty[stage].init_for_warps(kConsumerThreads / kWarp);
    }
    hopper::fence_barrier_init();
  }
  if (W::kLastValueBoxes < W::kBoxes && share.group == W::kGroups - 1) zero_missing_boxes<Form>(shared);
  const int listed = list_tokens<Form>(a, share, words, list);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= kConsumerThreads) {
    hopper::give_registers<56>();
    produce<Form>(a, share, words, shared, barriers, list, listed);
  } else {
    hopper::take_registers<224>();
    const std::int64_t tile = std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    consume<Form>(shared, barriers, listed * W::kProducts, a.partial + tile * W::kTile);
  }
#endif
}

// Four columns of a key a thread: the shares' sums, in order.
template <typename Form>
__global__ void add_shares(const KeyBlocks a, const Cut cut) {
  using W = Work<Form>;
  constexpr int kFours = W::kGroups * W::kColumns / 4;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= cut.keys * kFours) return;
  const std::int64_t key = i / kFours;
  const int column = static_cast<int>(i % kFours) * 4, group = column / W::kColumns,
            in_group = column % W::kColumns;
  const std::int64_t unit = key / kKeyBlock * W::kGroups + group;
  const float* from = a.partial + unit * W::kTile + key % kKeyBlock * W::kColumns + in_group;
  const bool of_value = !W::kBoth && group == 1;
  auto* to = reinterpret_cast<float4*>(of_value ? a.d_v + (cut.first_key + key) * Form::kValue + in_group
                                                : a.d_k + (cut.first_key + key) * Form::kKey +
                                                      (W::kBoth ? column : in_group));
  float4 sum = *to;
  for (std::int64_t share = 0; share < cut.shares; ++share) {
    const float4 more = __ldcs(reinterpret_cast<const float4*>(from + share * cut.units * W::kTile));
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
  }
  *to = sum;
}

template <typename Form>
void launch_form(OpCall& call, const KeyBlocks& a) {
  const Cut cut = make_cut<Form>(a);
  call.launch(key_blocks<Form>,
              Grid{.x = cut.units,
                   .y = cut.shares,
                   .threads = kThreads,
                   .shared_bytes = static_cast<std::size_t>(Work<Form>::kBytes)},
              a, a.token_words);
  call.launch(add_shares<Form>, grid_for(cut.keys * Work<Form>::kGroups * Work<Form>::kColumns / 4), a, cut);
}

}  // namespace

std::int64_t key_partial_numbers(const DsaSizes& sizes, const DsaTurn& turn) {
  KeyBlocks a{};
  a.sizes = sizes;
  a.turn = turn;
  const auto numbers = [&]<typename Form>(Form) {
    const Cut cut = make_cut<Form>(a);
    return cut.units * cut.shares * Work<Form>::kTile;
  };
  const std::int64_t of_index = numbers(IndexForm{});
  return std::max(of_index, sizes.key_width == MlaForm::kKey ? numbers(MlaForm{}) : numbers(SplitForm{}));
}

std::int64_t key_words(const DsaSizes& sizes, const DsaTurn& turn) {
  const std::int64_t keys = turn.first + turn.count - first_key_of(sizes, turn);
  return turn.count * ceil_div(keys, kKeyBlock) * kBlockWords;
}

void launch_key_blocks(OpCall& call, const KeyBlocks& a) {
  if (a.sizes.key_width == MlaForm::kKey) return launch_form<MlaForm>(call, a);
  launch_form<SplitForm>(call, a);
}

void launch_index_key_blocks(OpCall& call, const KeyBlocks& a) { launch_form<IndexForm>(call, a); }

}  // namespace terrace::trainer::cuda
