// Dense causal attention in float64, one token and head at a time, on dense arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "examples/moe_trainer/ops/attention.hpp"
#include "tests/trainer/oracle.hpp"

namespace terrace::trainer::oracle {

struct AttentionValues {
  Values q, k, v, sink;              // no sink: empty
  std::vector<std::int32_t> starts;  // of packed sequences and the end; empty: a batch
};
struct AttentionResult {
  Values o, lse;
};
struct AttentionGradients {
  Values q, k, v, sink;
};
// Of the shape, the strides and the packing's pointer are not looked at.
[[nodiscard]] AttentionResult attention(const AttentionShape& shape, const AttentionValues& in);
[[nodiscard]] AttentionGradients attention_backward(const AttentionShape& shape, const AttentionValues& in,
                                                    const Values& d_o);

}  // namespace terrace::trainer::oracle
