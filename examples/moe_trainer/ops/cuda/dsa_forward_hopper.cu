// Sparse attention by wgmma: a block takes one token after the other, all its heads (64 rows) against tiles
// of 64 gathered rows. One warpgroup only gathers, through a ring of stages that goes on from token to token;
// two warpgroups compute. The warpgroup whose turn a tile is scores it, S = Q K^T, and makes P = 2^(S - top)
// of it.
//
// Where the value is the start of the key row (512 columns), O fills the registers of both warpgroups, half
// of the columns each, and a tile's rows fill half of the shared memory. Its owner adds P V from registers
// while it still computes exponentials; the other waits for P and the tops in shared memory. The owner of the
// next tile is the other: it ends last, and goes on to score.
//   shared: Q | 2 stages | P | tops | sums | barriers
// With values of their own (128 columns) each warpgroup has an O, tops and sums of its own, of every other
// tile, and they meet at the token's end only.
//   shared: Q | 4 stages | halves of O | tops | sums | barriers
//
// At 64 heads, S takes 1152 cycles a tile of the latent form and P V 1024; gathering takes 72 KiB out of L2,
// about 25 bytes a cycle and multiprocessor when all of them do: 2900. Rows come back to the gatherer by
// halves of a tile, and S starts on the first columns.
#include "examples/moe_trainer/ops/cuda/dsa_forward_gather.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"

#include <algorithm>
#include <type_traits>

namespace terrace::trainer::cuda {
namespace {

using hopper::Major;
using hopper::Operand;
using hopper::Start;

using namespace dsa_forward;

// The first: one a warpgroup.
[[maybe_unused]] constexpr int kProbabilityBarrier = 1, kTotalsBarrier = 3;
constexpr float kSlack = 8.0F;  // sums are not rescaled until a logit is 2^8 above their base

// Of this thread's two rows: the base of the exponents in units of log 2, and its part of the sum.
struct Running {
  float top[2], sum[2];
};
__device__ inline int first_row() {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  return thread / kWarp * 16 + thread % kWarp / 4;
}
// The sink counts once among the threads of a row.
[[maybe_unused]] __device__ inline Running start_running(const HopperForward& a) {
  Running running{{-INFINITY, -INFINITY}, {0.0F, 0.0F}};
  if (a.sink == nullptr) return running;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = first_row() + 8 * half;
    running.top[half] = head < a.sizes.heads ? a.sink[head] * kLog2e : 0.0F;
    running.sum[half] = threadIdx.x % 4 == 0 ? 1.0F : 0.0F;
  }
  return running;
}
// Returns by how much earlier sums shrink.
__device__ inline float move_top(Running& running, int half, float top) {
  const float shrink = exp2_approx(running.top[half] - top);
  running.top[half] = top;
  running.sum[half] *= shrink;
  return shrink;
}
// S in units of log 2, nothing from `columns_left` on, and tops that it is near to.
[[maybe_unused]] __device__ inline float2 raise_tops(float (&s)[kTileRows / 2], float scale, int columns_left,
                                                     Running& running) {
#pragma unroll
  for (float& each : s) each *= scale;
  if (columns_left < kTileRows) {
#pragma unroll
    for (int i = 0; i < kTileRows / 2; ++i) {
      const int column = 8 * (i / 4) + 2 * (static_cast<int>(threadIdx.x) % 4) + i % 2;
      if (column >= columns_left) s[i] = -INFINITY;
    }
  }
  float shrink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kTileRows / 4; ++i) largest = fmaxf(largest, s[i / 2 * 4 + half * 2 + i % 2]);
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    shrink[half] =
        move_top(running, half, largest > running.top[half] + kSlack ? largest : running.top[half]);
  }
  return make_float2(shrink[0], shrink[1]);
}

template <int kCount>
__device__ inline void shrink_rows(float (&o)[kCount], float2 by) {
  if (!__any_sync(kFullWarp, by.x != 1.0F || by.y != 1.0F)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= i / 2 % 2 == 0 ? by.x : by.y;
}

// A 16 x 16 fragment of P to shared memory, eight numbers of a row a lane's address.
[[maybe_unused]] __device__ inline void store_matrices(std::uint32_t to, const std::uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// P, 16 columns at a time, and O += P V as they are ready. Enqueues a group a half of V's rows; keep(step, p)
// may store them. The products read p until they are waited for.
template <int kColumns, typename Keep>
__device__ inline void add_values(float (&o)[kColumns / 2], const float (&s)[kTileRows / 2], Running& running,
                                  std::uint32_t (&p)[kTileRows / 16][4], Operand v, Keep&& keep) {
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      e[i] = exp2_approx(s[step * 8 + i] - running.top[i / 2 % 2]);
      running.sum[i / 2 % 2] += e[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) p[step][i] = as_pair(e[2 * i], e[2 * i + 1]);
    keep(step, p[step]);
    hopper::fence_wgmma();
    hopper::wgmma_bf16<kColumns, Major::kMN>(o, p[step], v.advanced(step * hopper::kMnMajorStepBytes),
                                             Start::kAccumulate);
    if (step % 2 == 1) hopper::commit_wgmma();
  }
}
[[maybe_unused]] __device__ inline void keep_words(std::uint32_t (&p)[kTileRows / 16][4]) {
#pragma unroll
  for (auto& words : p) {
#pragma unroll
    for (std::uint32_t& word : words) asm volatile("" : "+r"(word)::"memory");
  }
}

// What a consuming thread knows.
template <typename Form>
struct Reader {
  using L = Layout<Form>;
  const HopperForward& a;
  unsigned char* shared;
  Barriers& barriers;
  int group;
  unsigned tile = 0;  // of all tokens
  Running running;

  __device__ unsigned char* stage_at(const Place<Form>& place) const {
    return shared + L::kStage + place.stage * L::kStageBytes;
  }
  __device__ float* tops() const { return reinterpret_cast<float*>(shared + L::kTops); }
  __device__ float* sums(int turn) const {
    return reinterpret_cast<float*>(shared + L::kSums) + turn % 2 * kConsumers * kDsaHeads;
  }
  __device__ void wait_part(const Place<Form>& place, int part) const {
    barriers.full[place.stage][part].wait(place.parity);
    hopper::fence_shared_for_async();  // what ordinary copies wrote
  }
  // The tile's half rows are free as the products with them end.
  template <int kCount>
  __device__ void release(const Place<Form>& place, float (&o)[kCount]) const {
    hopper::wait_wgmma<1>();
    barriers.empty[place.stage][0].arrive_as_warp();
    hopper::wait_wgmma<0>();
    hopper::keep_registers(o);
    barriers.empty[place.stage][1].arrive_as_warp();
  }
  __device__ void score(float (&s)[kTileRows / 2], const Place<Form>& place) const {
    const Operand q = hopper::k_major(shared), k = hopper::k_major(stage_at(place));
    constexpr int kFirstSteps = L::kFirstBoxes * 4, kSteps = L::kKeyBoxes * 4;
    const auto step = [&](int i) {
      const int at = i / 4 * kBoxBytes + i % 4 * hopper::kKMajorStepBytes;
      hopper::wgmma_bf16<kTileRows, Major::kK, Major::kK>(s, q.advanced(at), k.advanced(at),
                                                          i == 0 ? Start::kZero : Start::kAccumulate);
    };
    wait_part(place, 0);
    hopper::keep_registers(s);
    hopper::fence_wgmma();
#pragma unroll
    for (int i = 0; i < kFirstSteps; ++i) step(i);
    if constexpr (kSteps > kFirstSteps) {
      wait_part(place, 1);
      hopper::fence_wgmma();
#pragma unroll
      for (int i = kFirstSteps; i < kSteps; ++i) step(i);
    }
    hopper::commit_wgmma();
    hopper::keep_registers(s);
    hopper::wait_wgmma<0>();
    hopper::keep_registers(s);
  }
  __device__ int own_tiles(int tiles) const {
    return (tiles + ((tile % 2 == static_cast<unsigned>(group)) ? 1 : 0)) / 2;
  }
};

// o sigmoid(gate), pair by pair; far in the negative the exponential is infinite and its inverse zero.
[[maybe_unused]] __device__ inline uint4 open_gate(const uint4& o, const uint4& gate) {
  const auto sigmoid_of = [](float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0F + exp2_approx(-kLog2e * x)));
    return inverse;
  };
  const auto open = [&](std::uint32_t pair, std::uint32_t by) {
    return as_pair(low_half(pair) * sigmoid_of(low_half(by)), high_half(pair) * sigmoid_of(high_half(by)));
  };
  return make_uint4(open(o.x, gate.x), open(o.y, gate.y), open(o.z, gate.z), open(o.w, gate.w));
}
// To memory, the normalised rows of this thread: columns of the value from `first_column` on. Several pieces
// at a time, so that their loads and their arithmetic overlap.
template <typename Form, int kCount>
__device__ void store_rows(const HopperForward& a, const float (&o)[kCount], std::int64_t token,
                           int first_column) {
  const int row0 = first_row(), quad = static_cast<int>(threadIdx.x) % 4;
  const int heads = static_cast<int>(a.sizes.heads);
  const bool there[2] = {row0 < heads, row0 + 8 < heads};
  const std::int64_t start = token * heads * Form::kValue + row0 * Form::kValue + first_column + quad * 8;
  const std::int64_t shift = a.first_out * heads * Form::kValue;
  constexpr int kGroups = kCount / 16, kBatch = 2 * (kGroups < 4 ? kGroups : 4);
#pragma unroll
  for (int first = 0; first < 2 * kGroups; first += kBatch) {
    const auto offset = [&](int i) { return i % 2 * 8 * Form::kValue + (first + i) / 2 * 32; };
    const auto store = [&](Bf16* to, const uint4(&pieces)[kBatch]) {
      if (to == nullptr) return;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (there[i % 2]) __stcs(reinterpret_cast<uint4*>(to + start - shift + offset(i)), pieces[i]);
      }
    };
    uint4 gate[kBatch], pieces[kBatch];
    const bool gated = a.y != nullptr && a.gate != nullptr;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      gate[i] = make_uint4(0, 0, 0, 0);
      if (gated && there[i % 2]) {
        gate[i] = __ldg(reinterpret_cast<const uint4*>(a.gate + start + offset(i)));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = (first + i) / 2 * 16 + i % 2 * 2;
      std::uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) word[j] = as_pair(o[at + j * 4], o[at + j * 4 + 1]);
      pieces[i] = transpose_quad(word);
    }
    store(a.attention, pieces);
    if (gated) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) pieces[i] = open_gate(pieces[i], gate[i]);
    }
    store(a.y, pieces);
  }
}
[[maybe_unused]] __device__ inline void store_lse(const HopperForward& a, std::int64_t token, int head,
                                                  float top, float total) {
  if (a.lse == nullptr || threadIdx.x % 4 != 0 || head >= a.sizes.heads) return;
  a.lse[(token - a.first_out) * a.sizes.heads + head] =
      top == -INFINITY ? -INFINITY : (top + log2f(total)) * kLn2;
}
[[maybe_unused]] __device__ inline float share_of(float total) {
  return total > 0.0F ? 1.0F / total : total;
}  // NaN stays
[[maybe_unused]] __device__ inline float sum_of_row(float part) {
  part += __shfl_xor_sync(kFullWarp, part, 1);
  return part + __shfl_xor_sync(kFullWarp, part, 2);
}

// The forms with O across both warpgroups.
template <typename Form>
struct SharedRows {
  using L = Layout<Form>;
  static constexpr int kColumns = Form::kValue / 2;
  using Sums = float[kColumns / 2];

  __device__ static Operand values(const Reader<Form>& r, const Place<Form>& place) {
    const int box = L::kFirstValueBox + r.group * (L::kValueBoxes / 2);
    return hopper::mn_major(r.stage_at(place) + box * kBoxBytes, kBoxBytes);
  }
  // `left` positions from this tile on.
  __device__ static void own_tile(Reader<Form>& r, Sums& o, int left) {
    const Place<Form> place(r.tile);
    float s[kTileRows / 2];
    r.score(s, place);
    if (left <= kConsumers * kTileRows) r.barriers.q_empty.arrive_as_warp();  // this warpgroup's last
    const float2 shrink = raise_tops(s, r.a.sizes.scale * kLog2e, left, r.running);
    if (threadIdx.x % 4 == 0) {
      r.tops()[first_row()] = r.running.top[0];
      r.tops()[first_row() + 8] = r.running.top[1];
    }
    shrink_rows(o, shrink);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int row = static_cast<int>(threadIdx.x) % hopper::kWarpgroup / kWarp * 16 + lane % 16;
    const std::uint32_t to =
        hopper::shared_address(r.shared + L::kExchange) + static_cast<unsigned>(row) * 128;
    std::uint32_t p[kTileRows / 16][4];
    hopper::keep_registers(o);
    add_values<kColumns>(o, s, r.running, p, values(r, place), [&](int step, const std::uint32_t(&words)[4]) {
      store_matrices(to + static_cast<unsigned>(((2 * step + lane / 16) ^ (row % 8)) * 16), words);
    });
    hopper::fence_shared_for_async();
    hopper::named_barrier_arrive(kProbabilityBarrier + r.group, kConsumerThreads);
    r.release(place, o);
    keep_words(p);
  }
  __device__ static void other_tile(Reader<Form>& r, Sums& o) {
    const Place<Form> place(r.tile);
    r.wait_part(place, 0);
    r.wait_part(place, 1);
    hopper::named_barrier_sync(kProbabilityBarrier + 1 - r.group, kConsumerThreads);
    const float low = move_top(r.running, 0, r.tops()[first_row()]);
    const float high = move_top(r.running, 1, r.tops()[first_row() + 8]);
    shrink_rows(o, make_float2(low, high));
    const Operand p = hopper::k_major(r.shared + L::kExchange), v = values(r, place);
    hopper::keep_registers(o);
    hopper::fence_wgmma();
#pragma unroll
    for (int step = 0; step < kTileRows / 16; ++step) {
      hopper::wgmma_bf16<kColumns, Major::kK, Major::kMN>(o, p.advanced(step * hopper::kKMajorStepBytes),
                                                          v.advanced(step * hopper::kMnMajorStepBytes),
                                                          Start::kAccumulate);
      if (step % 2 == 1) hopper::commit_wgmma();
    }
    r.release(place, o);
  }
  __device__ static void run(Reader<Form>& r, std::int64_t token, int turn, int count) {
    Sums o;
#pragma unroll
    for (float& each : o) each = 0.0F;
    r.running = start_running(r.a);
    if (r.group != 0) r.running.sum[0] = r.running.sum[1] = 0.0F;  // the sink counts once
    for (int left = count; left > 0; left -= kTileRows) {
      if (r.tile % kConsumers == static_cast<unsigned>(r.group)) {
        own_tile(r, o, left);
      } else {
        other_tile(r, o);
      }
      ++r.tile;
    }
    finish(r, o, token, turn);
  }
  __device__ static void finish(Reader<Form>& r, Sums& o, std::int64_t token, int turn) {
    float* sums = r.sums(turn);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(r.running.sum[half]);
      if (threadIdx.x % 4 == 0) sums[r.group * kDsaHeads + first_row() + 8 * half] = sum;
    }
    hopper::named_barrier_sync(kTotalsBarrier, kConsumerThreads);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = first_row() + 8 * half;
      const float total = sums[head] + sums[kDsaHeads + head];
      factor[half] = share_of(total);
      if (r.group == 0) store_lse(r.a, token, head, r.running.top[half], total);
    }
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o[i] *= factor[i / 2 % 2];
    store_rows<Form>(r.a, o, token, r.group * kColumns);
  }
};

// The forms with an O in each warpgroup.
template <typename Form>
struct RowsApart {
  using L = Layout<Form>;
  static constexpr int kColumns = Form::kValue, kHalf = kColumns / 4;  // sums of half of the columns
  using Sums = float[kColumns / 2];

  __device__ static void own_tile(Reader<Form>& r, Sums& o, int left) {
    const Place<Form> place(r.tile);
    float s[kTileRows / 2];
    r.score(s, place);
    if (left <= kConsumers * kTileRows) r.barriers.q_empty.arrive_as_warp();  // this warpgroup's last
    const float2 shrink = raise_tops(s, r.a.sizes.scale * kLog2e, left, r.running);
    shrink_rows(o, shrink);
    r.wait_part(place, 1);
    std::uint32_t p[kTileRows / 16][4];
    hopper::keep_registers(o);
    add_values<kColumns>(o, s, r.running, p,
                         hopper::mn_major(r.stage_at(place) + L::kFirstValueBox * kBoxBytes, kBoxBytes),
                         [](int, const std::uint32_t(&)[4]) {});
    r.release(place, o);
    keep_words(p);
  }
  __device__ static void run(Reader<Form>& r, std::int64_t token, int, int count) {
    Sums o;
#pragma unroll
    for (float& each : o) each = 0.0F;
    r.running = r.group == 0 ? start_running(r.a) : Running{{-INFINITY, -INFINITY}, {0.0F, 0.0F}};
    for (int left = count; left > 0; left -= kTileRows) {
      if (r.tile % kConsumers == static_cast<unsigned>(r.group)) own_tile(r, o, left);
      ++r.tile;
    }
    finish(r, o, token);
  }
  // Each warpgroup gives the other its sums of half of the columns.
  __device__ static void finish(Reader<Form>& r, Sums& o, std::int64_t token) {
    float *tops = r.tops(), *sums = r.sums(0);
    const int mine = r.group * kDsaHeads, theirs = kDsaHeads - mine;
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = sum_of_row(r.running.sum[half]);
      if (threadIdx.x % 4 != 0) continue;
      tops[mine + first_row() + 8 * half] = r.running.top[half];
      sums[mine + first_row() + 8 * half] = sum[half];
    }
    hopper::named_barrier_sync(kTotalsBarrier, kConsumerThreads);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = first_row() + 8 * half;
      const float their_top = tops[theirs + head], top = fmaxf(r.running.top[half], their_top);
      const auto weight = [top](float of) { return of == -INFINITY ? 0.0F : exp2_approx(of - top); };
      const float mine_now = weight(r.running.top[half]);
      const float total = sum[half] * mine_now + sums[theirs + head] * weight(their_top);
      factor[half] = share_of(total) * mine_now;
      if (r.group == 0) store_lse(r.a, token, head, top, total);
    }
    const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
    auto* exchange = reinterpret_cast<float*>(r.shared + L::kExchange) + thread;
    constexpr int kGiven = kHalf * hopper::kWarpgroup;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      exchange[r.group * kGiven + i * hopper::kWarpgroup] =
          (r.group == 0 ? o[kHalf + i] : o[i]) * factor[i / 2 % 2];
    }
    hopper::named_barrier_sync(kTotalsBarrier, kConsumerThreads);
    float whole[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      whole[i] = (r.group == 0 ? o[i] : o[kHalf + i]) * factor[i / 2 % 2] +
                 exchange[(1 - r.group) * kGiven + i * hopper::kWarpgroup];
    }
    store_rows<Form>(r.a, whole, token, r.group * (kColumns / 2));
  }
};

template <typename Form>
__device__ void consume(const HopperForward& a, unsigned char* shared, Barriers& barriers, int group) {
  using Rows = std::conditional_t<Form::kShared, SharedRows<Form>, RowsApart<Form>>;
  Reader<Form> reader{
      .a = a, .shared = shared, .barriers = barriers, .group = group, .tile = 0, .running = {}};
  for (int turn = 0;; ++turn) {
    const std::int64_t token = token_of_turn(a, turn);
    if (token < 0) return;
    barriers.q_full.wait(static_cast<unsigned>(turn) % 2);
    const int count = __shfl_sync(kFullWarp, barriers.count, 0);  // the compiler sees one for all lanes
    if (reader.own_tiles((count + kTileRows - 1) / kTileRows) == 0) barriers.q_empty.arrive_as_warp();
    Rows::run(reader, token, turn, count);
  }
}

template <typename Form>
__global__ void __launch_bounds__(kThreads, 1) hopper_forward(const __grid_constant__ HopperForward a) {
#if TERRACE_SM90A
  using L = Layout<Form>;
  extern __shared__ unsigned char raw[];
  unsigned char* shared = raw + ((1024U - hopper::shared_address(raw) % 1024U) % 1024U);
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + L::kBarriers);
  if (threadIdx.x == 0) {
    barriers.q_full.init(hopper::kWarpgroup + 1);  // its copies, and the count
    barriers.q_empty.init_for_warps(kConsumerThreads / kWarp);
    for (int stage = 0; stage < L::kStages; ++stage) {
      for (int part = 0; part < kParts; ++part) barriers.full[stage][part].init(hopper::kWarpgroup);
      for (int half = 0; half < kHalves; ++half) barriers.empty[stage][half].init_for_warps(L::kReleases);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  // The compiler sees one for all lanes, and keeps what is made of it in uniform registers.
  const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / hopper::kWarpgroup, 0);
  if (group == kConsumers) {
    hopper::give_registers<72>();
    Gatherer<Form>{.a = a, .barriers = barriers, .shared = hopper::shared_address(shared), .tile = 0}.run();
  } else {
    hopper::take_registers<216>();
    consume<Form>(a, shared, barriers, group);
  }
#endif
}

template <typename Form>
void launch_form(OpCall& call, const HopperForward& forward) {
  const std::int64_t blocks = std::min<std::int64_t>(forward.count, hopper::device_traits(call).processors);
  call.launch(hopper_forward<Form>,
              Grid{.x = blocks, .threads = kThreads, .shared_bytes = Layout<Form>::kBytes}, forward);
}

}  // namespace

void launch_hopper_forward(OpCall& call, const HopperForward& forward) {
  if (forward.sizes.key_width == MlaForm::kKey) return launch_form<MlaForm>(call, forward);
  launch_form<SplitForm>(call, forward);
}

void launch_hopper_forward(OpCall& call, const Dsa& op, const DsaSizes& sizes) {
  const std::int64_t tokens = sizes.tokens();
  const std::int64_t per_turn = op.selected != nullptr ? tokens : dsa_tokens_per_turn(sizes, sizes.slots);
  const DsaLists lists(call, op.shape, sizes, op.selected, per_turn);
  for (std::int64_t first = 0; first < tokens; first += per_turn) {
    const DsaTurn turn{first, std::min(per_turn, tokens - first)};
    launch_hopper_forward(call, HopperForward{.sizes = sizes,
                                              .q = op.in.q.as<Bf16>(),
                                              .k = op.in.k.as<Bf16>(),
                                              .v = op.in.v.as<Bf16>(),
                                              .gate = op.in.gate.as<Bf16>(),
                                              .sink = op.in.sink,
                                              .selected = lists.of(call, turn),
                                              .first = turn.first,
                                              .count = turn.count,
                                              .first_out = 0,
                                              .y = op.y.as<Bf16>(),
                                              .lse = op.lse,
                                              .attention = op.attention.as<Bf16>()});
  }
}

}  // namespace terrace::trainer::cuda
