// The indexer's loss of one token, KL(p || softmax(I)) over the positions it selected, and its exact
// gradient.
#pragma once

#include "examples/moe_trainer/ops/cpu/dsa_token.hpp"

namespace terrace::trainer::cpu {

struct IndexScratch {
  IndexScratch(const DsaSizes& sizes, ScratchCursor& cursor)
      : q(cursor.take<float>(sizes.index_heads * sizes.index)),
        target(cursor.take<float>(sizes.slots)),
        scores(cursor.take<float>(sizes.slots)) {}
  float *q, *target, *scores;
};

// p: the main attention (heads, slots). Writes d_index_q and d_index_w of the token, leaves the gradient of
// the products <q_h, k_s> in d_products (index_heads, slots) for the reduction over keys, and returns the
// loss.
float index_backward(const DsaBackward& op, const DsaSizes& sizes, std::int64_t token, const Selected& chosen,
                     const float* p, const IndexScratch& work, float* panel, float* d_products);

}  // namespace terrace::trainer::cpu
