// Cross entropy of a linear layer, loss = lse - logit of the label, in chunks of rows and of the vocabulary.
//
// Where one chunk holds the whole vocabulary, its logits serve loss and gradient. Otherwise a first sweep
// over the slices finds each row's maximum and sum, and a second makes the logits again for the gradient.
// Logits never exceed kLogits floats.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "examples/moe_trainer/ops/cpu/gemm.hpp"
#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"
#include "runtime/assert.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kLogits = 1 << 20;
constexpr std::int64_t kMinRows = 256;
constexpr std::int32_t kIgnored = -100;
constexpr std::int64_t kGrain = 16;

struct Chunking {
  explicit Chunking(const LinearCrossEntropy& op)
      : slice(std::min(op.vocabulary, kLogits / std::min(kMinRows, op.tokens))),
        rows(std::min(op.tokens, std::max<std::int64_t>(1, kLogits / slice))) {}
  std::int64_t slice, rows;
};

struct Workspace {
  Workspace(const Chunking& chunking, ScratchCursor& cursor)
      : logits(cursor.take<float>(chunking.rows * chunking.slice)),
        top(cursor.take<float>(chunking.rows)),
        total(cursor.take<float>(chunking.rows)),
        of_label(cursor.take<float>(chunking.rows)) {}
  float *logits, *top, *total, *of_label;  // per row: maximum, sum of e^(logit - maximum), the label's logit
};

struct Part {
  std::int64_t first_row, rows, first_word, words;
};

void make_logits(const LinearCrossEntropy& op, const Part& part, float* logits) {
  gemm_parallel({.m = part.rows,
                 .n = part.words,
                 .k = op.width,
                 .a = op.hidden + part.first_row * op.width,
                 .lda = op.width,
                 .ta = Transpose::kNo,
                 .b = op.weight + part.first_word * op.width,
                 .ldb = op.width,
                 .tb = Transpose::kYes,
                 .c = logits,
                 .ldc = part.words});
}

// Folds one slice of a row into its running maximum and sum.
void fold_row(const float* logits, std::int64_t words, float* top, float* total) {
  Vec best = splat(*top);
  std::int64_t i = 0;
  for (; i + kLanes <= words; i += kLanes) best = max(load(logits + i), best);
  float m = largest(best);
  for (; i < words; ++i) m = std::max(m, logits[i]);
  Vec fresh = zero();
  for (i = 0; i + kLanes <= words; i += kLanes) fresh += exp(load(logits + i) - m);
  float rest = 0;
  for (; i < words; ++i) rest += std::exp(logits[i] - m);
  *total = *total * std::exp(*top - m) + (sum(fresh) + rest);
  *top = m;
}

void fold_slice(const LinearCrossEntropy& op, const Part& part, const Workspace& work) {
  parallel_ranges(part.rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float* row = work.logits + r * part.words;
      fold_row(row, part.words, work.top + r, work.total + r);
      const std::int32_t label = op.labels[part.first_row + r];
      if (label >= part.first_word && label < part.first_word + part.words) {
        work.of_label[r] = row[label - part.first_word];
      }
    }
  });
}

// Logits become scale * (softmax - one at the label); rows that don't count become zero.
void softmax_gradient(const LinearCrossEntropy& op, const Part& part, const Workspace& work) {
  parallel_ranges(part.rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      float* row = work.logits + r * part.words;
      const std::int32_t label = op.labels[part.first_row + r];
      if (label == kIgnored) {
        std::fill_n(row, part.words, 0.0F);
        continue;
      }
      const float factor = op.gradient_scale / work.total[r], top = work.top[r];
      for (std::int64_t i = 0; i < part.words; i += kLanes) {
        const std::int64_t n = part.words - i;
        store_part(row + i, exp(load_part(row + i, n) - top) * factor, n);
      }
      if (label >= part.first_word && label < part.first_word + part.words) {
        row[label - part.first_word] -= op.gradient_scale;
      }
    }
  });
}

void slice_gradients(const LinearCrossEntropy& op, const Part& part, const Workspace& work) {
  softmax_gradient(op, part, work);
  if (op.d_hidden != nullptr) {
    gemm_parallel({.m = part.rows,
                   .n = op.width,
                   .k = part.words,
                   .a = work.logits,
                   .lda = part.words,
                   .ta = Transpose::kNo,
                   .b = op.weight + part.first_word * op.width,
                   .ldb = op.width,
                   .tb = Transpose::kNo,
                   .c = op.d_hidden + part.first_row * op.width,
                   .ldc = op.width,
                   .into = part.first_word == 0 ? Accumulate::kOverwrite : Accumulate::kAdd});
  }
  if (op.d_weight != nullptr) {
    gemm_parallel({.m = part.words,
                   .n = op.width,
                   .k = part.rows,
                   .a = work.logits,
                   .lda = part.words,
                   .ta = Transpose::kYes,
                   .b = op.hidden + part.first_row * op.width,
                   .ldb = op.width,
                   .tb = Transpose::kNo,
                   .c = op.d_weight + part.first_word * op.width,
                   .ldc = op.width,
                   .into = Accumulate::kAdd});
  }
}

double rows_loss(const LinearCrossEntropy& op, std::int64_t first, std::int64_t rows, const Workspace& work) {
  double loss = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int32_t label = op.labels[first + r];
    if (label == kIgnored) continue;
    loss += static_cast<double>(work.top[r]) + std::log(static_cast<double>(work.total[r])) -
            static_cast<double>(work.of_label[r]);
  }
  return loss;
}

}  // namespace

Bytes scratch_bytes(const LinearCrossEntropy& op) {
  if (op.tokens == 0) return Bytes();
  if (op.width < 1 || op.vocabulary < 1) {
    throw std::runtime_error("linear cross entropy: a width and a vocabulary of at least 1");
  }
  ScratchCursor cursor(nullptr);
  const Workspace unused(Chunking(op), cursor);
  return cursor.used();
}

void compute(const LinearCrossEntropy& op, std::byte* scratch) {
  if (op.tokens == 0) return;
  for (std::int64_t t = 0; t < op.tokens; ++t) {
    TERRACE_CHECK(op.labels[t] == kIgnored || (op.labels[t] >= 0 && op.labels[t] < op.vocabulary),
                  "labels lie inside the vocabulary or are -100");
  }
  const Chunking chunking(op);
  ScratchCursor cursor(scratch);
  const Workspace work(chunking, cursor);
  const bool whole = chunking.slice == op.vocabulary;
  const bool gradients = op.d_hidden != nullptr || op.d_weight != nullptr;
  double loss = 0;
  for (std::int64_t first = 0; first < op.tokens; first += chunking.rows) {
    const std::int64_t rows = std::min(chunking.rows, op.tokens - first);
    std::fill_n(work.top, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(work.total, rows, 0.0F);
    std::fill_n(work.of_label, rows, 0.0F);
    const auto slice_at = [&](std::int64_t word) {
      return Part{first, rows, word, std::min(chunking.slice, op.vocabulary - word)};
    };
    for (std::int64_t word = 0; word < op.vocabulary; word += chunking.slice) {
      make_logits(op, slice_at(word), work.logits);
      fold_slice(op, slice_at(word), work);
    }
    loss += rows_loss(op, first, rows, work);
    for (std::int64_t word = 0; gradients && word < op.vocabulary; word += chunking.slice) {
      if (!whole) make_logits(op, slice_at(word), work.logits);
      slice_gradients(op, slice_at(word), work);
    }
  }
  *op.loss_sum += static_cast<float>(loss);
}

}  // namespace terrace::trainer::cpu
