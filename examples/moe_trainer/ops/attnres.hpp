// Attention residuals: a sublayer's input is a mix of what earlier parts of the model gave. Common rules:
// ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/linear.hpp"

namespace terrace::trainer {

inline constexpr std::int64_t kMaxAttnResSources = 16;

// logit_l = <w * q, v_l / rms(v_l)>, p = softmax over the sources, h = sum_l p_l v_l: on the raw v.
struct AttnRes {
  std::int64_t rows, width, sources;  // sources 1 to 16
  float eps;                          // of rms(v) = sqrt(mean v^2 + eps)
  In v[kMaxAttnResSources];           // each (rows, width)
  const float* w;                     // (width), the norm's weight
  const float* q;                     // (width), the query
  Out h;                              // (rows, width)
  float* probability = nullptr;       // (rows, sources), for whoever wants to see it
};
template <typename F>
void visit_arrays(AttnRes& op, F&& visit) {
  for (std::int64_t l = 0; l < op.sources && l < kMaxAttnResSources; ++l) {
    visit(op.v[l], op.rows * op.width);
  }
  visit(op.h, op.rows * op.width);
}
// Makes p again from v: nothing of the forward is kept. d_v_l may be null (not wanted); no two are the same
// array, and none is another's source.
struct AttnResBackward {
  std::int64_t rows, width, sources;
  float eps;
  In v[kMaxAttnResSources];
  const float* w;
  const float* q;
  In d_h;
  Out d_v[kMaxAttnResSources];
  Accumulate into_d_v[kMaxAttnResSources] = {};  // all kOverwrite unless said
  float* d_w;                                    // (width), adds; null: not wanted
  float* d_q;                                    // the same
};
template <typename F>
void visit_arrays(AttnResBackward& op, F&& visit) {
  for (std::int64_t l = 0; l < op.sources && l < kMaxAttnResSources; ++l) {
    visit(op.v[l], op.rows * op.width);
    visit(op.d_v[l], op.rows * op.width, op.into_d_v[l]);
  }
  visit(op.d_h, op.rows * op.width);
}

}  // namespace terrace::trainer
