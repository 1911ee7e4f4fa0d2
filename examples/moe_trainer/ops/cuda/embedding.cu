// out_t = table[ids_t];  d_table[id] += sum over t with ids_t = id of d_out_t, t ascending
//   table, d_table: (V, D)   out, d_out: (T, D)   ids: (T)
// Backward sorts the tokens by id (stable, so a run of equal ids is in order of its tokens) and cuts the
// sorted tokens into chunks. A block sums the runs of one chunk: a run inside it goes to the table, the parts
// of a run that crosses chunks to scratch, where the chunk that the run starts in adds them up in order.
#include <cub/device/device_radix_sort.cuh>

#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 128;
constexpr int kChunk = kWarp;  // tokens
constexpr int kBatch = 4;      // tokens whose loads are under way together

// kCount numbers a thread, 16 bytes or one.
template <typename T, int kCount>
__global__ void embed(Embedding op) {
  const std::int64_t packs = op.width / kCount;
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, token = at / packs;
  if (token >= op.tokens) return;
  const std::int64_t column = at % packs * kCount;
  const T* from = op.table.as<T>() + std::int64_t{op.ids[token]} * op.width + column;
  T* to = op.out.as<T>() + token * op.width + column;
  if constexpr (kCount == 1) {
    *to = *from;
  } else {
    store_raw(to, load_raw(from));
  }
}

__global__ void count_up(std::int32_t* out, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) out[i] = static_cast<std::int32_t>(i);
}

struct SortedTokens {
  const std::int32_t* id;     // ascending
  const std::int32_t* token;  // ascending where ids are equal
  std::int64_t count;
};

// A thread's columns: four neighbours, or one.
template <int kCount>
struct Columns {
  float value[kCount];

  template <typename T>
  __device__ void load(const T* at) {
    if constexpr (kCount == 1) {
      value[0] = load_float(at);
    } else {
      const float4 four = load_four(at);
      value[0] = four.x;
      value[1] = four.y;
      value[2] = four.z;
      value[3] = four.w;
    }
  }
  __device__ void store(float* at) const {
    if constexpr (kCount == 1) {
      *at = value[0];
    } else {
      store_four(at, {value[0], value[1], value[2], value[3]});
    }
  }
  __device__ void add(const Columns& other) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) value[n] += other.value[n];
  }
};

// parts: (chunks, 2, width): what the chunk has of a run that began before it, and of one that goes on after
// it. A chunk inside one long run has the first alone. The table's rows of a batch are read together: a row
// is of one run, which ends once.
template <typename T, int kCount>
__global__ void __launch_bounds__(kSumThreads)
    sum_chunks(EmbeddingBackward op, SortedTokens sorted, float* parts) {
  constexpr int kBlockColumns = kSumThreads * kCount;
  const auto columns = static_cast<unsigned>((op.width + kBlockColumns - 1) / kBlockColumns);
  const std::int64_t chunk = blockIdx.x / columns, begin = chunk * kChunk;
  const std::int64_t column = std::int64_t{blockIdx.x % columns} * kBlockColumns + threadIdx.x * kCount;
  const std::int64_t end = min(sorted.count, begin + kChunk);
  const bool inside = column < op.width;
  // Lane i: the chunk's i-th token.
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t mine = begin + lane;
  const std::int32_t own_id = mine < end ? sorted.id[mine] : -1;
  const std::int32_t own_token = mine < end ? sorted.token[mine] : 0;
  const bool own_ends = mine < end && (mine + 1 == sorted.count || sorted.id[mine + 1] != own_id);
  const unsigned ends = __ballot_sync(kFullWarp, own_ends);  // where a run does
  const T* d_out = op.d_out.as<T>() + column;
  float* table = op.d_table + column;
  float* part = parts + chunk * 2 * op.width + column;
  bool continues = begin > 0 && sorted.id[begin - 1] == sorted.id[begin];
  Columns<kCount> sum{};
  const int count = static_cast<int>(end - begin);
  for (int i0 = 0; i0 < count; i0 += kBatch) {
    Columns<kCount> next[kBatch], before[kBatch];
    std::int32_t id[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = i0 + k;
      id[k] = __shfl_sync(kFullWarp, own_id, i);
      const std::int32_t token = __shfl_sync(kFullWarp, own_token, i);
      next[k] = before[k] = {};
      if (!inside || i >= count) continue;
      next[k].load(d_out + std::int64_t{token} * op.width);
      if ((ends >> i & 1U) != 0) before[k].load(table + std::int64_t{id[k]} * op.width);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = i0 + k;
      if (!inside || i >= count) continue;
      sum.add(next[k]);
      const bool last = (ends >> i & 1U) != 0;
      if (!last && i + 1 < count) continue;
      if (continues) {
        sum.store(part);
      } else if (!last) {
        sum.store(part + op.width);
      } else {
        before[k].add(sum);
        before[k].store(table + std::int64_t{id[k]} * op.width);
      }
      continues = false;
      sum = {};
    }
  }
}

// One block row a chunk: where a run starts in it and goes on, its parts in order.
__global__ void __launch_bounds__(kSumThreads)
    join_runs(EmbeddingBackward op, SortedTokens sorted, const float* parts) {
  const std::int64_t columns = (op.width + kSumThreads - 1) / kSumThreads;
  const std::int64_t chunk = blockIdx.x / columns, begin = chunk * kChunk, next = begin + kChunk;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) % columns * kSumThreads + threadIdx.x;
  if (column >= op.width || next >= sorted.count) return;
  const std::int32_t id = sorted.id[next - 1];
  if (sorted.id[next] != id) return;                                              // it ends here
  if (begin > 0 && sorted.id[begin] == id && sorted.id[begin - 1] == id) return;  // it began earlier
  const float* part = parts + column;
  float sum = part[(chunk * 2 + 1) * op.width];
  for (std::int64_t i = next; i < sorted.count && sorted.id[i] == id; i += kChunk) {
    sum += part[i / kChunk * 2 * op.width];
  }
  op.d_table[std::int64_t{id} * op.width + column] += sum;
}

int bits_for(std::int64_t below) {
  int bits = 1;
  while (bits < 31 && (std::int64_t{1} << bits) < below) ++bits;
  return bits;
}

SortedTokens sort_by_id(OpCall& call, const EmbeddingBackward& op) {
  auto* id = call.scratch<std::int32_t>(op.tokens);
  auto* token = call.scratch<std::int32_t>(op.tokens);
  auto* unsorted = call.scratch<std::int32_t>(op.tokens);
  call.launch(count_up, grid_for(op.tokens, kThreads), unsorted, op.tokens);
  std::size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    call.check(cub::DeviceRadixSort::SortPairs(scratch, bytes, op.ids, id, unsorted, token,
                                               static_cast<int>(op.tokens), 0, bits_for(op.vocabulary),
                                               call.stream()),
               "cub::DeviceRadixSort::SortPairs");
  };
  sort(nullptr);
  sort(call.scratch<std::byte>(static_cast<std::int64_t>(bytes)));
  return {id, token, op.tokens};
}

}  // namespace

void launch(OpCall& call, const Embedding& op) {
  call.set_shape({op.tokens, op.width, op.vocabulary});
  call.require(op.table.dtype() == op.out.dtype(), "all arrays must have one type");
  if (op.width <= 0) return;
  with_element(op.table.dtype(), [&](auto element) {
    using T = decltype(element);
    if (op.width % kPack<T> == 0 && aligned(op.table.at()) && aligned(op.out.at())) {
      call.launch(embed<T, kPack<T>>, grid_for(op.tokens * (op.width / kPack<T>), kThreads), op);
    } else {
      call.launch(embed<T, 1>, grid_for(op.tokens * op.width, kThreads), op);
    }
  });
}

void launch(OpCall& call, const EmbeddingBackward& op) {
  call.set_shape({op.tokens, op.width, op.vocabulary});
  if (op.tokens <= 0 || op.width <= 0) return;
  call.require(op.tokens <= 0x7fffffff - kChunk, "more tokens than 32 bits count");
  const SortedTokens sorted = sort_by_id(call, op);
  const std::int64_t chunks = ceil_div(op.tokens, kChunk);
  auto* parts = call.scratch<float>(chunks * 2 * op.width);
  with_element(op.d_out.dtype(), [&](auto element) {
    using T = decltype(element);
    const bool fours = op.width % 4 == 0 && aligned(op.d_table) && aligned_fours(op.d_out);
    const std::int64_t columns = ceil_div(op.width, std::int64_t{kSumThreads} * (fours ? 4 : 1));
    call.launch(fours ? sum_chunks<T, 4> : sum_chunks<T, 1>,
                Grid{.x = chunks * columns, .threads = kSumThreads}, op, sorted, parts);
  });
  call.launch(join_runs, Grid{.x = chunks * ceil_div(op.width, kSumThreads), .threads = kSumThreads}, op,
              sorted, static_cast<const float*>(parts));
}

}  // namespace terrace::trainer::cuda
