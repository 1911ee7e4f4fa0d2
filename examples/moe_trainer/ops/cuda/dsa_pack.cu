// Lists of positions to and from their short forms: one block a row.
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::uint16_t kLonePadding = 0xFFFF;

__global__ void __launch_bounds__(kThreads)
    pack_short(IndexLists lists, const std::int32_t* selected, std::uint16_t* packed) {
  const std::int32_t* row = selected + std::int64_t{blockIdx.x} * lists.slots;
  std::uint16_t* out = packed + std::int64_t{blockIdx.x} * lists.slots;
  __shared__ std::int32_t last;  // the row's largest position, -1: none
  if (threadIdx.x == 0) last = -1;
  __syncthreads();
  for (std::int64_t j = threadIdx.x; j < lists.slots; j += kThreads) {
    if (row[j] >= 0 && (j + 1 == lists.slots || row[j + 1] < 0)) last = row[j];  // one thread at most
  }
  __syncthreads();
  for (std::int64_t j = threadIdx.x; j < lists.slots; j += kThreads) {
    std::int32_t value = row[j] >= 0 ? row[j] : last;
    if (value < 0) value = j > 0 ? 0 : (lists.slots == 1 ? kLonePadding : 1);
    out[j] = static_cast<std::uint16_t>(value);
  }
}

__global__ void __launch_bounds__(kThreads)
    unpack_short(IndexLists lists, const std::uint16_t* packed, std::int32_t* selected) {
  const std::uint16_t* row = packed + std::int64_t{blockIdx.x} * lists.slots;
  std::int32_t* out = selected + std::int64_t{blockIdx.x} * lists.slots;
  const bool empty = lists.slots == 1 ? row[0] == kLonePadding : row[1] < row[0];
  for (std::int64_t j = threadIdx.x; j < lists.slots; j += kThreads) {
    const bool there = !empty && (j == 0 || row[j] > row[j - 1]);
    out[j] = there ? row[j] : -1;
  }
}

__global__ void __launch_bounds__(kThreads)
    pack_bits(IndexLists lists, const std::int32_t* selected, std::uint32_t* packed) {
  const std::int32_t* row = selected + std::int64_t{blockIdx.x} * lists.slots;
  const std::int64_t words = (lists.length + 31) / 32;
  std::uint32_t* out = packed + std::int64_t{blockIdx.x} * words;
  for (std::int64_t word = threadIdx.x; word < words; word += kThreads) out[word] = 0;
  __syncthreads();
  for (std::int64_t j = threadIdx.x; j < lists.slots; j += kThreads) {
    if (row[j] >= 0) atomicOr(out + row[j] / 32, 1U << (row[j] % 32));
  }
}

__global__ void __launch_bounds__(kThreads)
    unpack_bits(IndexLists lists, const std::uint32_t* packed, std::int32_t* selected) {
  const std::int64_t words = (lists.length + 31) / 32;
  const std::uint32_t* row = packed + std::int64_t{blockIdx.x} * words;
  std::int32_t* out = selected + std::int64_t{blockIdx.x} * lists.slots;
  __shared__ int warp_total[kThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x);
  int placed = 0;
  for (std::int64_t base = 0; base < words; base += kThreads) {
    std::uint32_t bits = base + thread < words ? row[base + thread] : 0;
    const int mine = __popc(bits);
    int place = mine;
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kFullWarp, place, step);
      if (thread % kWarp >= step) place += other;
    }
    __syncthreads();  // the last turn's readers are done
    if (thread % kWarp == kWarp - 1) warp_total[thread / kWarp] = place;
    __syncthreads();
    place += placed - mine;
    for (int warp = 0; warp < kThreads / kWarp; ++warp) {
      if (warp < thread / kWarp) place += warp_total[warp];
      placed += warp_total[warp];
    }
    for (; bits != 0; bits &= bits - 1) {
      out[place++] = static_cast<std::int32_t>((base + thread) * 32 + __ffs(static_cast<int>(bits)) - 1);
    }
  }
  for (std::int64_t j = placed + thread; j < lists.slots; j += kThreads) out[j] = -1;
}

void check_lists(OpCall& call, const IndexLists& lists) {
  call.set_shape({lists.rows, lists.slots, lists.length});
  call.require(lists.slots <= lists.length, "more slots than positions");
}

}  // namespace

void launch(OpCall& call, const PackIndices& op) {
  check_lists(call, op.lists);
  if (op.lists.rows <= 0 || op.lists.slots <= 0) return;
  const Grid grid{.x = op.lists.rows, .threads = kThreads};
  switch (index_form(op.lists)) {
    case IndexForm::kBitmap:
      return call.launch(pack_bits, grid, op.lists, op.selected, reinterpret_cast<std::uint32_t*>(op.packed));
    case IndexForm::kShortList:
      return call.launch(pack_short, grid, op.lists, op.selected,
                         reinterpret_cast<std::uint16_t*>(op.packed));
    case IndexForm::kList:
      break;
  }
  call.check(cudaMemcpyAsync(op.packed, op.selected, static_cast<std::size_t>(packed_index_bytes(op.lists)),
                             cudaMemcpyDeviceToDevice, call.stream()),
             "cudaMemcpyAsync");
}

void launch(OpCall& call, const UnpackIndices& op) {
  check_lists(call, op.lists);
  if (op.lists.rows <= 0 || op.lists.slots <= 0) return;
  const Grid grid{.x = op.lists.rows, .threads = kThreads};
  switch (index_form(op.lists)) {
    case IndexForm::kBitmap:
      return call.launch(unpack_bits, grid, op.lists, reinterpret_cast<const std::uint32_t*>(op.packed),
                         op.selected);
    case IndexForm::kShortList:
      return call.launch(unpack_short, grid, op.lists, reinterpret_cast<const std::uint16_t*>(op.packed),
                         op.selected);
    case IndexForm::kList:
      break;
  }
  call.check(cudaMemcpyAsync(op.selected, op.packed, static_cast<std::size_t>(packed_index_bytes(op.lists)),
                             cudaMemcpyDeviceToDevice, call.stream()),
             "cudaMemcpyAsync");
}

}  // namespace terrace::trainer::cuda
