#include "examples/moe_trainer/model/quantised.hpp"

#include <utility>

namespace terrace::trainer {

namespace {

QuantisedRows room(Memory& memory, std::int64_t rows, std::int64_t width, Pool pool) {
  const Bytes numbers = round_up(Bytes(static_cast<std::uint64_t>(rows * width)), 256_B);
  BlockRef block = memory.block(numbers + Bytes(static_cast<std::uint64_t>(rows) * sizeof(float)), pool);
  std::byte* at = block->address;
  return {.block = std::move(block),
          .q = reinterpret_cast<E4m3*>(at),
          .scale = reinterpret_cast<float*>(at + numbers.count()),
          .rows = rows,
          .width = width};
}

// With rows of the same width as the weights'.
GroupedMatmulFp8 product(std::int64_t groups, const std::int32_t* offsets, const QuantisedRows& rows,
                         const QuantisedRows& weights) {
  return {.groups = groups,
          .rows = rows.rows,
          .n = weights.rows / groups,
          .k = weights.width,
          .offsets = offsets,
          .a = rows.q,
          .a_scale = rows.scale,
          .w = weights.q,
          .w_scale = weights.scale,
          .c = nullptr};
}

}  // namespace

QuantisedRows QuantisedRows::row_range(std::int64_t first, std::int64_t count) const {
  QuantisedRows part = *this;
  part.q += first * width;
  part.scale += first;
  part.rows = count;
  return part;
}

QuantisedRows quantised(const Pass& pass, const Tensor& x) {
  QuantisedRows out = room(pass.memory, x.rows, x.width, Pool::kActivation);
  pass.ops.run(pass.stream,
               QuantiseRows{.rows = x.rows, .width = x.width, .x = x, .q = out.q, .scale = out.scale});
  return out;
}

void QuantisedWeights::allocate(Memory& memory, const Parameter& w) {
  groups_ = w.shape[0];
  straight_ = room(memory, groups_ * w.shape[1], w.shape[2], Pool::kWeights);
  turned_ = room(memory, groups_ * w.shape[2], w.shape[1], Pool::kWeights);
}

void QuantisedWeights::refresh(const Pass& pass, const Parameter& w) {
  if (!pass.chooses() || pass.micro_batch != 0) return;
  if (made_ && w.training == Training::kNo) return;
  made_ = true;
  pass.ops.run(pass.stream, QuantiseWeights{.groups = groups_,
                                            .n = w.shape[1],
                                            .k = w.shape[2],
                                            .w = w.operand(),
                                            .q = straight_.q,
                                            .scale = straight_.scale,
                                            .q_turned = turned_.q,
                                            .turned_scale = turned_.scale});
}

void QuantisedWeights::forward(const Pass& pass, const std::int32_t* offsets, const QuantisedRows& x,
                               const Tensor& out) const {
  GroupedMatmulFp8 op = product(groups_, offsets, x, straight_);
  op.c = out;
  pass.ops.run(pass.stream, op);
}

void QuantisedWeights::input_gradient(const Pass& pass, const std::int32_t* offsets, const QuantisedRows& d_y,
                                      const Tensor& d_x, Accumulate into) const {
  GroupedMatmulFp8 op = product(groups_, offsets, d_y, turned_);
  op.c = d_x;
  op.into = into;
  pass.ops.run(pass.stream, op);
}

}  // namespace terrace::trainer
