// Sparse attention of one token: its query heads against the gathered rows it selected.
//
// Keys come sixteen at a time as a panel (width, 16), gathered and transposed once for all heads; heads are
// padded to fours and key widths to eights with zeros.
#pragma once

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/small_matmul.hpp"

namespace terrace::trainer::cpu {

inline constexpr std::int64_t kPanel = 16;

struct DsaSizes {
  explicit DsaSizes(const DsaShape& shape);
  std::int64_t heads, index_heads;  // padded to 4
  std::int64_t key, value, index;   // widths padded to 8, 16, 8
  std::int64_t slots;               // padded to 16
  float scale, index_scale;
};

// Which rows of a (T, width) tensor a token sees: `count` ascending positions.
struct Selected {
  const std::int32_t* position;
  std::int64_t count;
};
// The lists of an operator: given, or all positions of a token's sequence up to itself.
class ChosenLists {
 public:
  // Takes scratch for the second kind alone, and fills it where the cursor hands out memory.
  ChosenLists(const DsaShape& shape, const std::int32_t* selected, ScratchCursor& cursor);
  // The positions before the padding.
  [[nodiscard]] Selected of(std::int64_t token) const;

 private:
  const DsaShape& shape_;
  const std::int32_t* selected_;
  std::int32_t* every_ = nullptr;  // 0, 1, 2, ...
};
// The position at which the sequence of position t starts.
[[nodiscard]] std::int64_t sequence_start(const Packing& packing, std::int64_t t);

struct Rows {
  const float* at;
  std::int64_t width, stride;
};
// The rows that are values: those of v, or the first numbers of the key rows. `token` is the first of its
// batch row.
[[nodiscard]] Rows value_rows(const DsaShape& shape, const DsaInputs& in, std::int64_t token);

// to (heads, padded) from (real heads, width), the rest zeros.
struct PadHeads {
  std::int64_t real, heads, width, padded;
};
void pad_heads(const PadHeads& how, const float* from, float* to);

// out (heads, slots) = left (heads, padded width) times the gathered rows transposed. Slots past the count
// become zero.
struct GatherDot {
  std::int64_t heads, padded, slots;
};
void gather_dot(const GatherDot& how, const float* left, const Rows& rows, const Selected& chosen,
                float* panel, float* out);
// out (real heads, rows.width), dense = left (heads, slots) times the gathered rows.
struct GatherSum {
  std::int64_t real, slots;
};
void gather_sum(const GatherSum& how, const float* left, const Rows& rows, const Selected& chosen,
                float* out);

// Attention probabilities of one token, p (heads, slots); p_sink and lse (heads), where given.
struct TokenScratch {
  TokenScratch(const DsaSizes& sizes, ScratchCursor& cursor);
  float *q, *panel, *o;  // padded query; one panel of the widest kind; attention before the gate (H, DV)
};
void probabilities(const DsaShape& shape, const DsaSizes& sizes, const DsaInputs& in, std::int64_t token,
                   const Selected& chosen, const TokenScratch& scratch, float* p, float* p_sink, float* lse);

}  // namespace terrace::trainer::cpu
