// How LinearCrossEntropy is cut on CUDA: how many tokens at a time, and whether their logits are kept for the
// gradient or made again. A pure function of the shape; what it plans never takes more than its limit.
//
// Kept: the logits of `rows` tokens stay, and their gradient takes their place. Each such chunk reads and
// writes the whole of d_weight once, so few rows are dear: below kFewRows the words are cut instead. Cut: a
// first pass over all words finds each row's maximum and sum, a second makes the logits again, `slice` words
// at a time. It costs a third more products, but d_weight is read and written once for thousands of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "examples/moe_trainer/ops/loss.hpp"

namespace terrace::trainer::cuda {

// kTiles: our own product for bf16 on Hopper, which leaves e^(logit - largest of its tile) in bf16.
// kLibrary: fp32 logits of cuBLAS.
enum class LossPath : std::uint8_t { kTiles, kLibrary };
enum class LossPass : std::uint8_t { kForward, kForwardBackward };

inline constexpr std::int64_t kLossTileRows = 128;
inline constexpr std::int64_t kLossTileWords = 256;

struct LossShape {
  std::int64_t tokens, width, vocabulary;
  Dtype dtype;
  LossPath path;
  LossPass pass;
};

struct LossPlan {
  std::int64_t rows;   // tokens at a time
  std::int64_t slice;  // words at a time; the vocabulary: logits are kept
  std::int64_t pitch;  // numbers from one row of logits to the next
  std::int64_t parts;  // (maximum, sum) pairs a row
  // Where each array starts in scratch, in bytes, and the end of the last.
  std::int64_t logits = 0, gradient = 0, parts_at = 0, sums = 0, states = 0, label_logits = 0, losses = 0;
  std::int64_t bytes = 0;
};

namespace loss_plan {

inline constexpr std::int64_t kAlign = 256;
inline constexpr std::int64_t kFewRows = 512;
inline constexpr std::int64_t kMostCutRows = 4096;

[[nodiscard]] constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
[[nodiscard]] constexpr std::int64_t round_up_to(std::int64_t a, std::int64_t b) {
  return divide_up(a, b) * b;
}

struct Cut {
  std::int64_t rows, slice;
};

[[nodiscard]] inline LossPlan lay_out(const LossShape& shape, const Cut& cut) {
  const bool tiles = shape.path == LossPath::kTiles;
  const bool backward = shape.pass == LossPass::kForwardBackward;
  const bool kept = cut.slice >= shape.vocabulary;
  LossPlan plan{.rows = cut.rows,
                .slice = std::min(cut.slice, shape.vocabulary),
                .pitch = round_up_to(std::min(cut.slice, shape.vocabulary), tiles ? kLossTileWords : 8),
                .parts = divide_up(shape.vocabulary, tiles ? kLossTileWords : cut.slice)};
  std::int64_t end = 0;
  const auto take = [&end](std::int64_t bytes) {
    const std::int64_t at = end;
    end += round_up_to(bytes, kAlign);
    return at;
  };
  // Our product needs no logits for the maxima and sums, cuBLAS's result is fp32 and cannot serve cuBLAS
  // again beside bf16 arrays.
  plan.logits = take(tiles ? (backward ? 2 * plan.rows * plan.pitch : 0) : 4 * plan.rows * plan.pitch);
  plan.gradient = plan.logits;
  if (!tiles && backward && shape.dtype == Dtype::kBf16) plan.gradient = take(2 * plan.rows * plan.pitch);
  const std::int64_t parts_bytes = 8 * plan.rows * plan.parts;
  if (tiles && !kept) {  // the maxima and sums of tiles are read before the first slice is made
    plan.parts_at = plan.logits;
    end = std::max(end, round_up_to(parts_bytes, kAlign));
  } else {
    plan.parts_at = take(parts_bytes);
  }
  const bool sums = backward && !kept && shape.dtype == Dtype::kBf16;
  plan.sums = take(sums ? 4 * plan.rows * shape.width : 0);
  plan.states = take(16 * plan.rows);
  plan.label_logits = take(4 * plan.rows);
  plan.losses = take(4 * plan.rows);
  plan.bytes = end;
  return plan;
}

// The most of `step`'s multiples (and then single ones) that fit, at most `most`; 0: not one does.
template <typename Fits>
[[nodiscard]] std::int64_t largest(std::int64_t most, std::int64_t step, Fits fits) {
  if (fits(most)) return most;
  for (const std::int64_t unit : {step, std::int64_t{1}}) {
    std::int64_t low = 0, high = divide_up(most, unit);  // low fits (or is 0), high does not (or is too many)
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (fits(middle * unit) ? low : high) = middle;
    }
    if (low > 0) return low * unit;
  }
  return 0;
}

}  // namespace loss_plan

[[nodiscard]] inline LossPlan plan_loss(const LossShape& shape,
                                        std::int64_t limit_bytes = kLossScratchBytes) {
  using namespace loss_plan;
  const auto fits = [&](const Cut& cut) { return lay_out(shape, cut).bytes <= limit_bytes; };
  const std::int64_t kept = largest(shape.tokens, kLossTileRows, [&](std::int64_t rows) {
    return fits({rows, shape.vocabulary});
  });
  if (kept >= std::min(shape.tokens, kFewRows)) {
    // As many chunks, of even size.
    const std::int64_t chunks = divide_up(shape.tokens, kept);
    const std::int64_t even = round_up_to(divide_up(shape.tokens, chunks), kLossTileRows);
    return lay_out(shape, {std::min(kept, even), shape.vocabulary});
  }
  for (std::int64_t rows = std::min(shape.tokens, kMostCutRows);; rows = divide_up(rows, 2)) {
    const std::int64_t slice = largest(shape.vocabulary, kLossTileWords, [&](std::int64_t words) {
      return fits({rows, words});
    });
    if (slice < std::min(shape.vocabulary, 16 * kLossTileWords) && rows > 1) continue;
    const std::int64_t words = std::max<std::int64_t>(slice, 1);
    const std::int64_t even =
        round_up_to(divide_up(shape.vocabulary, divide_up(shape.vocabulary, words)), kLossTileWords);
    return lay_out(shape, {rows, std::min(words, even)});
  }
}

}  // namespace terrace::trainer::cuda
