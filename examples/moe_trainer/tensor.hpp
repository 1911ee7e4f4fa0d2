// A dense fp32 matrix in device memory, shared by whoever still reads it.
//
// Copies share the block; the last one to go gives it back in order of the compute stream. So dropping a
// tensor right after the launch of its last reader is how the trainer keeps its peak low.
#pragma once

#include <cstdint>
#include <utility>

#include "swapcore/session.hpp"

namespace terrace::trainer {

struct Tensor {
  BlockRef block;
  float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t width = 0;

  [[nodiscard]] static Tensor over(BlockRef block, std::int64_t rows, std::int64_t width) {
    auto* data = reinterpret_cast<float*>(block->address);
    return {std::move(block), data, rows, width};
  }
  [[nodiscard]] std::int64_t count() const { return rows * width; }
  [[nodiscard]] Bytes bytes() const { return Bytes(static_cast<std::uint64_t>(count()) * sizeof(float)); }
  explicit operator bool() const { return data != nullptr; }
};

// Drops tensors after their last use.
template <typename... Tensors>
void drop(Tensors&... tensors) {
  ((tensors = Tensor{}), ...);
}

}  // namespace terrace::trainer
