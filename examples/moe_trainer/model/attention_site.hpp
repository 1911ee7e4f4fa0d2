// The site of an attention whose backward also reads the logarithms of its sums: both lie in one block, so
// that one offer and one fetch serve both.
#pragma once

#include <cstdint>
#include <utility>

#include "examples/moe_trainer/model/site.hpp"

namespace terrace::trainer {

struct AttentionSite {
  SiteId site;
  std::int64_t rows, width, heads;
};
struct Attended {
  Tensor o;    // (rows, width), of activations
  Tensor lse;  // (rows, heads), fp32
};

// `compute(o, lse)` as for site_output.
template <typename Compute>
[[nodiscard]] Attended attention_output(const Pass& pass, const AttentionSite& at, Compute&& compute) {
  constexpr std::int64_t kAlignment = 64;  // bytes
  const std::int64_t o_bytes =
      (at.rows * at.width * bytes_of(pass.compute) + kAlignment - 1) / kAlignment * kAlignment;
  const auto parts_of = [&](const Tensor& both) {
    return Attended{.o = {both.block, both.at, at.rows, at.width, pass.compute},
                    .lse = {both.block, both.at + o_bytes, at.rows, at.heads, Dtype::kF32}};
  };
  const std::int64_t floats = o_bytes / bytes_of(Dtype::kF32) + at.rows * at.heads;
  return parts_of(site_output(pass, at.site, Reads::kInBackward, SiteShape{1, floats, Dtype::kF32},
                              [&](const Tensor& both) {
                                const Attended parts = parts_of(both);
                                compute(parts.o, parts.lse);
                              }));
}

}  // namespace terrace::trainer
