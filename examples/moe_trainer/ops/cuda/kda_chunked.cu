// The chunked form from the host: which calls it takes, its scratch, its turns.
#include <algorithm>
#include <cmath>

#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/kda.hpp"
#include "examples/moe_trainer/ops/cuda/kda_chunked.hpp"
#include "examples/moe_trainer/ops/cuda/kda_gradients.hpp"

namespace terrace::trainer::cuda {
namespace {

constexpr std::int64_t kScratchBytes = 3LL << 30;  // of a turn; more turns where it is not enough
constexpr std::int64_t kMaxTurn = 65535;           // chunks: blocks of a grid along y

// sequence_chunk[i]: how many chunks the sequences before i have. One block.
__global__ void __launch_bounds__(kColumnThreads)
    kda_count_chunks(const std::int32_t* starts, std::int64_t sequences, std::int32_t* sequence_chunk) {
  extern __shared__ std::int32_t kda_counts[];
  const std::int64_t share = (sequences + kColumnThreads - 1) / kColumnThreads;
  const std::int64_t begin = share * threadIdx.x < sequences ? share * threadIdx.x : sequences;
  const std::int64_t end = begin + share < sequences ? begin + share : sequences;
  std::int32_t count = 0;
  for (std::int64_t i = begin; i < end; ++i) count += (starts[i + 1] - starts[i] + kChunk - 1) / kChunk;
  kda_counts[threadIdx.x] = count;
  __syncthreads();
  std::int32_t before = 0;
  for (unsigned i = 0; i < threadIdx.x; ++i) before += kda_counts[i];
  for (std::int64_t i = begin; i < end; ++i) {
    sequence_chunk[i] = before;
    before += (starts[i + 1] - starts[i] + kChunk - 1) / kChunk;
  }
  if (threadIdx.x == kColumnThreads - 1) sequence_chunk[sequences] = before;
}

bool is_hopper(OpCall& call) {
  int device = 0, major = 0, minor = 0;
  call.check(cudaGetDevice(&device), "cudaGetDevice");
  call.check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  call.check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "cudaDeviceGetAttribute");
  return major == 9 && minor == 0;
}

// Pieces of 16 bytes.
bool is_aligned(const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; }

// Entries of the list of chunks, at most.
std::int64_t list_size(const KdaShape& shape) {
  if (!shape.packing) return shape.batch * ceil_div(shape.length, kChunk);
  return (shape.length + (kChunk - 1) * shape.packing.sequences) / kChunk;
}

template <typename Op>
bool takes(OpCall& call, Op op) {
  const KdaShape& s = op.shape;
  bool all = s.key_width == kChunkedWidth && s.value_width == kChunkedWidth && s.batch > 0 && s.length > 0 &&
             is_aligned(op.in.dt_bias) && s.batch <= kMaxTurn && s.value_heads <= kMaxTurn &&
             list_size(s) < (1LL << 31) && (s.gate == KdaGate::kSoftplus || s.lower_bound <= 0.0F);
  visit_arrays(op, [&](const auto& array, std::int64_t) {
    all = all && array.dtype() == Dtype::kBf16 && is_aligned(array.at());
  });
  return all && is_hopper(call);
}

// One pass over the list: what its kernels read, and how the list is cut.
class Pass {
 public:
  enum class Kind : std::uint8_t { kForward, kBackward };
  Pass(OpCall& call, const KdaShape& shape, const KdaInputs& in, Kind kind)
      : list_(list_size(shape)), step_(shape.packing ? 1 : shape.batch), heads_(shape.value_heads) {
    const bool grouped = shape.value_heads != shape.key_heads;
    const std::int64_t tile_bytes =
        3 * kWideTile + 2 * kSquareTile + (kind == Kind::kBackward ? 3 * kWideTile + 2 * kStateTile : 0);
    const std::int64_t part_bytes = kind == Kind::kBackward && grouped ? 4 * kWideTile : 0;
    const std::int64_t fit = kScratchBytes / (heads_ * (tile_bytes + part_bytes));
    turn_ = std::max(std::min({fit, kMaxTurn, list_}) / step_, std::int64_t{1}) * step_;
    fill(call, shape, in);
    const std::int64_t tiles = turn_ * heads_;
    const auto take = [&](std::int64_t bytes) { return call.scratch<unsigned char>(tiles * bytes); };
    for (unsigned char** wide : {&chunked_.key_start, &chunked_.to_end, &chunked_.from_start}) {
      *wide = take(kWideTile);
    }
    for (unsigned char** square : {&chunked_.a, &chunked_.solve}) *square = take(kSquareTile);
    chunked_.decay = call.scratch<float>(tiles * kDecayFloats);
    if (kind == Kind::kForward) return;
    for (unsigned char** wide : {&chunked_.vn, &chunked_.vn_rest, &chunked_.d_vb}) *wide = take(kWideTile);
    for (unsigned char** state : {&chunked_.state, &chunked_.d_state}) *state = take(kStateTile);
  }

  [[nodiscard]] std::int64_t turns() const { return ceil_div(list_, turn_); }
  [[nodiscard]] std::int64_t turn_size() const { return turn_; }
  [[nodiscard]] KdaChunked turn(std::int64_t index) const {
    KdaChunked out = chunked_;
    out.first = index * turn_;
    out.count = std::min(turn_, list_ - out.first);
    return out;
  }
  // Floats of the states under way between two turns.
  [[nodiscard]] std::int64_t carried() const { return step_ * heads_ * kChunkedWidth * kChunkedWidth; }

 private:
  void fill(OpCall& call, const KdaShape& shape, const KdaInputs& in) {
    KdaChunked& c = chunked_;
    c.length = shape.length, c.batch = shape.batch, c.sequences = shape.sequences();
    c.key_heads = shape.key_heads, c.value_heads = heads_, c.group = heads_ / shape.key_heads;
    c.gate = shape.gate, c.lower_bound = shape.lower_bound, c.l2_eps = shape.l2_eps;
    c.scale = kda_sizes(call, shape).scale;
    const auto bits = [](In array) { return array.as<std::uint16_t>(); };
    c.q = bits(in.q), c.k = bits(in.k), c.v = bits(in.v), c.z = bits(in.gate), c.beta = bits(in.beta);
    c.a_log = in.a_log, c.dt_bias = in.dt_bias;
    if (!shape.packing) return;
    c.starts = shape.packing.starts;
    auto* sequence_chunk = call.scratch<std::int32_t>(c.sequences + 1);
    call.launch(kda_count_chunks,
                Grid{.threads = kColumnThreads, .shared_bytes = kColumnThreads * sizeof(std::int32_t)},
                c.starts, c.sequences, sequence_chunk);
    c.sequence_chunk = sequence_chunk;
  }

  std::int64_t list_, step_, heads_;  // step_: entries from a sequence's chunk to its next
  std::int64_t turn_ = 1;
  KdaChunked chunked_{};
};

KdaChunkOutputs outputs(OpCall& call, const KdaBackward& op, const Pass& pass) {
  const std::int64_t tiles = pass.turn_size() * op.shape.value_heads;
  const auto bits = [](Out array) { return array.as<std::uint16_t>(); };
  KdaChunkOutputs out{.d_o = op.d_o.as<std::uint16_t>(),
                      .d_q = bits(op.d_q),
                      .d_k = bits(op.d_k),
                      .d_q_parts = nullptr,
                      .d_k_parts = nullptr,
                      .d_v = bits(op.d_v),
                      .d_z = bits(op.d_gate),
                      .d_beta = bits(op.d_beta),
                      .d_dt_parts = call.scratch<float>(tiles * kChunkedWidth),
                      .d_a_parts = call.scratch<float>(tiles * kChunkedWidth)};
  if (op.shape.value_heads == op.shape.key_heads) return out;
  out.d_q_parts = call.scratch<float>(tiles * kChunk * kChunkedWidth);
  out.d_k_parts = call.scratch<float>(tiles * kChunk * kChunkedWidth);
  return out;
}

}  // namespace

bool runs_chunked(OpCall& call, const Kda& op) { return takes(call, op); }
bool runs_chunked(OpCall& call, const KdaBackward& op) { return takes(call, op); }

void launch_chunked(OpCall& call, const Kda& op) {
  const Pass pass(call, op.shape, op.in, Pass::Kind::kForward);
  auto* carry = pass.turns() > 1 ? call.scratch<float>(pass.carried()) : nullptr;
  for (std::int64_t i = 0; i < pass.turns(); ++i) {
    prepare_chunks(call, pass.turn(i));
    walk_states(call, pass.turn(i),
                KdaWalk{.from = op.in.initial_state,
                        .to = op.final_state,
                        .carry_in = carry,
                        .carry_out = carry,
                        .o = op.o.as<std::uint16_t>(),
                        .d_o = nullptr});
  }
}

void launch_chunked(OpCall& call, const KdaBackward& op) {
  const Pass pass(call, op.shape, op.in, Pass::Kind::kBackward);
  const KdaChunkOutputs out = outputs(call, op, pass);
  const std::int64_t turns = pass.turns(), carried = pass.carried();
  auto* borders = turns > 1 ? call.scratch<float>(turns * carried) : nullptr;  // the state after each turn
  auto* d_border = turns > 1 ? call.scratch<float>(carried) : nullptr;
  const auto forward = [&](const KdaChunked& chunked, std::int64_t i) {
    prepare_chunks(call, chunked);
    walk_states(call, chunked,
                KdaWalk{.from = op.in.initial_state,
                        .to = nullptr,
                        .carry_in = i > 0 ? borders + (i - 1) * carried : nullptr,
                        .carry_out = turns > 1 ? borders + i * carried : nullptr,
                        .o = nullptr,
                        .d_o = nullptr});
  };
  for (std::int64_t i = 0; i + 1 < turns; ++i) forward(pass.turn(i), i);
  for (std::int64_t i = turns - 1; i >= 0; --i) {
    const KdaChunked chunked = pass.turn(i);
    const std::int64_t parts = chunked.count * chunked.value_heads * kChunkedWidth;
    forward(chunked, i);
    walk_gradients(call, chunked,
                   KdaWalk{.from = op.d_final_state,
                           .to = op.d_initial_state,
                           .carry_in = d_border,
                           .carry_out = d_border,
                           .o = nullptr,
                           .d_o = out.d_o});
    if (op.shape.packing) {  // entries that turn out not to exist
      call.zero(out.d_dt_parts, parts);
      call.zero(out.d_a_parts, parts);
    }
    chunk_gradients(call, chunked, out);
    add_gate_sums(call, op, {out.d_dt_parts, out.d_a_parts, chunked.count});
  }
}

}  // namespace terrace::trainer::cuda
