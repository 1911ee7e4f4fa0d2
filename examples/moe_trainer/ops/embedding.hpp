// Embedding and elementwise sums. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

struct Add {
  std::int64_t count;
  In a;
  In b;
  Out out;
};  // out may be a or b
struct Embedding {
  std::int64_t tokens, width, vocabulary;
  const std::int32_t* ids;
  In table;
  Out out;
};
struct EmbeddingBackward {
  std::int64_t tokens, width, vocabulary;
  const std::int32_t* ids;
  In d_out;
  float* d_table;
};  // adds

}  // namespace terrace::trainer
