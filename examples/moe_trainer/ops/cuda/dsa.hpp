// What the sparse attention's kernels share. A token's index runs over the whole batch: b * T + t.
//
// Each operator has a general form (any width, fp32 or bf16, plain loops) and forms for Hopper's matrix
// units, which their launchers choose by *_fits_hopper.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

inline constexpr int kDsaThreads = 128;
// Of what is kept a token; tokens go in as many turns as it takes.
inline constexpr std::int64_t kDsaScratchBytes = 64LL << 20;
// Of scores at a time where the caller does not want them.
inline constexpr std::int64_t kDsaScoreBytes = 256LL << 20;

struct DsaSizes {
  std::int64_t batch, length, heads, key_width, value_width, index_heads, index_width;  // B T H DK DV HI DI
  std::int64_t slots;
  float scale;        // of the attention's logits
  float index_scale;  // HI^-1/2 DI^-1/2
  [[nodiscard]] TERRACE_HOST_DEVICE std::int64_t tokens() const { return batch * length; }
};
[[nodiscard]] DsaSizes dsa_sizes(OpCall& call, const DsaShape& shape);
// The inputs of attention are there, of one type, and fit each other.
void check_attention(const OpCall& call, const DsaShape& shape, const DsaInputs& in);

// How many tokens fit kDsaScratchBytes at that many floats a token; at least one, at most all.
[[nodiscard]] std::int64_t dsa_tokens_per_turn(const DsaSizes& sizes, std::int64_t floats_per_token);

// Tokens first .. first + count, whose scratch starts at zero.
struct DsaTurn {
  std::int64_t first, count;
};

// The lists that an operator goes by: the caller's, or, where it gives none, all positions of a token's
// sequence up to itself, written turn by turn.
class DsaLists {
 public:
  // Turns of at most `per_turn` tokens.
  DsaLists(OpCall& call, const DsaShape& shape, const DsaSizes& sizes, const std::int32_t* selected,
           std::int64_t per_turn);
  // Where the lists of all tokens would start: those of the turn's tokens are there, until the next turn's.
  [[nodiscard]] const std::int32_t* of(OpCall& call, const DsaTurn& turn) const;

 private:
  DsaSizes sizes_;
  Packing packing_;
  const std::int32_t* selected_;
  std::int32_t* made_ = nullptr;  // (turn, slots)
};

// bf16, at most 64 heads, DK 576 with the value in the first 512, or DK = DV = 128 with values of their own;
// arrays aligned to 16 bytes; compute capability 9.0.
[[nodiscard]] bool attention_fits_hopper(OpCall& call, const DsaShape& shape, const DsaInputs& in);
[[nodiscard]] inline bool fits_pieces(In array) {  // read or written 16 bytes at a time; null does
  return reinterpret_cast<std::uintptr_t>(array.at()) % 16 == 0;
}
void launch_hopper_forward(OpCall& call, const Dsa& op, const DsaSizes& sizes);
void launch_hopper_backward(OpCall& call, const DsaBackward& op, const DsaSizes& sizes);

// The indexer's side of the backward pass, turn by turn: what both forms keep, and the general one.
enum class IndexWork : std::uint8_t { kGeneral, kHopper };
class IndexLearner {
 public:
  // Turns of at most `per_turn` tokens. Does nothing where the indexer's gradients are not wanted.
  IndexLearner(OpCall& call, const DsaBackward& op, const DsaSizes& sizes, std::int64_t per_turn,
               IndexWork work);
  // (turn, slots): where the attention's probabilities summed over heads are put before run(). Null: nothing
  // to do.
  [[nodiscard]] float* share() const { return share_; }
  [[nodiscard]] float* losses() const { return losses_; }        // (B T)
  [[nodiscard]] float* d_index_k() const { return d_index_k_; }  // (B T, DI), sums
  // The general form.
  void run(OpCall& call, const DsaTurn& turn, const std::int32_t* selected) const;
  void finish(OpCall& call) const;

 private:
  template <typename T>
  void run_typed(OpCall& call, const DsaTurn& turn, const std::int32_t* selected) const;
  const DsaBackward& op_;
  DsaSizes sizes_;
  float* share_ = nullptr;
  float* d_score_ = nullptr;    // (turn, slots)
  float* d_x_ = nullptr;        // (turn, HI, slots)
  float* losses_ = nullptr;     // (B T)
  float* d_index_k_ = nullptr;  // (B T, DI)
};

// d_sink += sum over tokens of the terms (B T, H).
void add_dsa_sink(OpCall& call, const float* terms, const DsaSizes& sizes, float* d_sink);
void store_dsa_sums(OpCall& call, const float* sums, std::int64_t count, Bf16* out);

// bf16, index heads of 128 numbers, at most 64 and a multiple of 8 of them.
[[nodiscard]] bool scores_fit_hopper(OpCall& call, const DsaSelect& op);
// Scores of queries first .. first + rows of one sequence against the positions up to each.
struct DsaScoreRows {
  DsaSizes sizes;
  In index_q, index_k, index_w;
  Packing packing;
  std::int64_t batch, first, rows;
  float* scores;  // (rows, T)
};
void launch_hopper_scores(OpCall& call, const DsaScoreRows& rows);

}  // namespace terrace::trainer::cuda
