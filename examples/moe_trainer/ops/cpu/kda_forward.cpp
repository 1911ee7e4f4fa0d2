// Gated delta rule, forward: a task is one value head of one sequence; it walks its chunks in order.
#include "examples/moe_trainer/ops/cpu/kda_chunk.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

struct Workspace {
  Workspace(const KdaSizes& sizes, ScratchCursor& cursor)
      : chunk(sizes, cursor),
        state(cursor.take<float>(sizes.key * sizes.value)),
        vn(cursor.take<float>(kChunkRows * sizes.value)),
        o(cursor.take<float>(kChunkRows * sizes.value)) {}
  KdaChunk chunk;
  float *state, *vn, *o;
};

std::size_t workspace_bytes(const KdaSizes& sizes) {
  ScratchCursor cursor(nullptr);
  const Workspace unused(sizes, cursor);
  return cursor.used().count();
}

void head_forward(const Kda& op, const KdaSizes& sizes, const KdaHead& head, Workspace& work) {
  const KdaShape& shape = op.shape;
  const float* initial = op.in.initial_state;
  load_state(shape, sizes, initial == nullptr ? nullptr : initial + head.state_at, work.state);
  for (std::int64_t n = 0; n < head.chunks; ++n) {
    const std::int64_t first = n * kChunkRows;
    load_chunk(shape, sizes, op.in, head, first, work.chunk);
    residual(sizes, work.chunk, work.state, work.vn);
    multiply<Into::kSet>({kChunkRows, sizes.value, sizes.key}, {work.chunk.q_start, sizes.key, 1},
                         {work.state, sizes.value}, {work.o, sizes.value});
    multiply<Into::kAdd>({kChunkRows, sizes.value, kChunkRows}, {work.chunk.aqk, kChunkRows, 1},
                         {work.vn, sizes.value}, {work.o, sizes.value});
    for (std::int64_t i = 0; i < work.chunk.rows; ++i) {
      std::copy_n(work.o + i * sizes.value, shape.value_width,
                  op.o + head.value_at + (first + i) * head.value_stride);
    }
    advance_state(sizes, work.chunk, work.vn, work.state);
  }
  store_state(shape, sizes, work.state, op.final_state == nullptr ? nullptr : op.final_state + head.state_at);
}

}  // namespace

Bytes scratch_bytes(const Kda& op) {
  return Bytes(workspace_bytes(KdaSizes(op.shape))) * static_cast<std::uint64_t>(worker_count());
}

void compute(const Kda& op, std::byte* scratch) {
  const KdaSizes sizes(op.shape);
  const std::size_t stride = workspace_bytes(sizes);
  parallel_for(op.shape.sequences() * op.shape.value_heads, [&](std::int64_t task, std::int64_t worker) {
    ScratchCursor cursor(scratch + static_cast<std::size_t>(worker) * stride);
    Workspace work(sizes, cursor);
    const KdaHead head(op.shape, op.in, {task / op.shape.value_heads, task % op.shape.value_heads});
    head_forward(op, sizes, head, work);
  });
}

}  // namespace terrace::trainer::cpu
