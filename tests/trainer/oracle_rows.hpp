// The memory-bound operators again, as plain loops in float64.
#pragma once

#include <cstdint>
#include <vector>

#include "examples/moe_trainer/ops/muon.hpp"
#include "tests/trainer/oracle.hpp"

namespace terrace::trainer::oracle {

struct AttnResValues {
  std::int64_t width;
  double eps;
  std::vector<Values> v;  // each (rows, width)
  Values w, q;
};
[[nodiscard]] Values attn_res(const AttnResValues& in);
[[nodiscard]] Values attn_res_probability(const AttnResValues& in);  // (rows, sources)
struct AttnResGradients {
  std::vector<Values> v;
  Values w, q;
};
[[nodiscard]] AttnResGradients attn_res_backward(const AttnResValues& in, const Values& d_h);

// Sequences one behind the other: starts as in Packing.
[[nodiscard]] Values packed_conv(const ConvShape& shape, const std::vector<std::int32_t>& starts,
                                 const Values& x, const Values& w);

// One head's numbers at a position.
struct RotaryShape {
  std::int64_t width, offset, rotary_width;
  RotaryLayout layout;
  double theta;
};
[[nodiscard]] Values rotary(const RotaryShape& shape, const Values& head, double position);

// One matrix; momentum is updated, the parameter returned.
[[nodiscard]] Values muon(const Muon& muon, const Values& parameter, const Values& gradient,
                          Values& momentum);

}  // namespace terrace::trainer::oracle
