// Row by row: from the maxima and sums of a row's parts to its loss, and from logits to their gradient.
// Shapes are those of a chunk of `rows` tokens; pitch: from one row to the next.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"
#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

// Some of a row's logits: the largest, and the sum of e^(logit - largest).
struct LogitPart {
  float largest, sum;
};

// What makes a row's gradient: factor * e^(logit - top), at the label label_gradient instead.
struct alignas(16) RowState {
  float top;
  float factor;  // gradient_scale / sum of e^(logit - top); 0: a row of zeros
  float label_gradient;
  std::int32_t label;  // -1: none
};

struct RowsOf {
  std::int64_t rows, parts, vocabulary;
  const std::int32_t* labels;  // (rows)
  LogitPart* part;             // (rows, parts)
  float* label_logits;         // (rows); read for labels inside the vocabulary
  RowState* states;            // (rows)
  float* losses;               // (rows)
  float gradient_scale;
};

struct LogitsSlice {
  std::int64_t first_word, words, pitch, part;  // part: which of each row's this slice is
};

// Parts and label logits into states and losses; loss_sum += the losses.
void finish_rows(OpCall& call, const RowsOf& rows, float* loss_sum);
// fp32 logits (rows, pitch) into their part; also the label logits that they hold.
void fold_logits(OpCall& call, const RowsOf& rows, const LogitsSlice& slice, const float* logits);
// fp32 logits into d_logits; the same memory, or bf16 elsewhere.
void logits_gradient(OpCall& call, const RowsOf& rows, const LogitsSlice& slice, const float* logits,
                     Out d_logits);
// In place: bf16 e^(logit - largest of its part of kLossTileWords words) into d_logits. The pitch is whole
// parts.
void exponentials_gradient(OpCall& call, const RowsOf& rows, std::int64_t pitch, Bf16* values);
void narrow(OpCall& call, const float* from, std::int64_t count, Bf16* to);

}  // namespace terrace::trainer::cuda
