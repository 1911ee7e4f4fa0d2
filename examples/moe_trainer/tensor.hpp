// A dense matrix in device memory, fp32 or bf16, shared by whoever still reads it.
//
// Copies share the block; the last one to go gives it back in order of the compute stream. So dropping a
// tensor right after the launch of its last reader is how the trainer keeps its peak low.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "examples/moe_trainer/ops/array.hpp"
#include "swapcore/session.hpp"

namespace terrace::trainer {

struct Tensor {
  BlockRef block;
  std::byte* at = nullptr;
  std::int64_t rows = 0;
  std::int64_t width = 0;
  Dtype dtype = Dtype::kF32;

  [[nodiscard]] static Tensor over(BlockRef block, std::int64_t rows, std::int64_t width,
                                   Dtype dtype = Dtype::kF32) {
    std::byte* at = block->address;
    return {std::move(block), at, rows, width, dtype};
  }
  [[nodiscard]] std::int64_t count() const { return rows * width; }
  [[nodiscard]] Bytes bytes() const {
    return Bytes(static_cast<std::uint64_t>(count()) * static_cast<std::uint64_t>(bytes_of(dtype)));
  }
  // The same numbers in another shape. Precondition: as many of them.
  [[nodiscard]] Tensor reshaped(std::int64_t new_rows, std::int64_t new_width) const {
    Tensor other = *this;
    other.rows = new_rows;
    other.width = new_width;
    return other;
  }
  // The shape, over no memory.
  [[nodiscard]] Tensor shape_alone() const {
    return {.block = nullptr, .at = nullptr, .rows = rows, .width = width, .dtype = dtype};
  }
  // Rows first .. first + count, in the same block.
  [[nodiscard]] Tensor row_range(std::int64_t first, std::int64_t row_count) const {
    Tensor part = *this;
    part.at += first * width * bytes_of(dtype);
    part.rows = row_count;
    return part;
  }

  operator In() const { return {static_cast<const void*>(at), dtype}; }
  operator Out() const { return {static_cast<void*>(at), dtype}; }
  // Throws std::invalid_argument on bf16.
  [[nodiscard]] float* f32() const { return Out(*this).f32(); }
  template <typename T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(at);
  }
  explicit operator bool() const { return at != nullptr; }
};

// Drops tensors after their last use.
template <typename... Tensors>
void drop(Tensors&... tensors) {
  ((tensors = Tensor{}), ...);
}

}  // namespace terrace::trainer
