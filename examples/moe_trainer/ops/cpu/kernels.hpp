// The CPU operators as plain functions on host pointers, each spread over the thread pool.
//
// compute(op, scratch) does what ops.hpp says of `op`, reading and writing the pointers in it.
// scratch_bytes(op) is how much scratch it wants, from the shape alone, 64-byte aligned.
#pragma once

#include <cstddef>
#include <type_traits>

#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer::cpu {

enum class GroupedPass : std::uint8_t { kForward, kInputGradient };

#define TERRACE_DECLARE_COMPUTE(Op) void compute(const Op& op, std::byte* scratch);
TERRACE_TRAINER_OPS(TERRACE_DECLARE_COMPUTE)
#undef TERRACE_DECLARE_COMPUTE
void compute(const GroupedMatmul& op, GroupedPass pass);

template <typename Op>
[[nodiscard]] constexpr Bytes scratch_bytes(const Op&) {
  return Bytes();
}
[[nodiscard]] Bytes scratch_bytes(const Attention& op);
[[nodiscard]] Bytes scratch_bytes(const AttentionBackward& op);
[[nodiscard]] Bytes scratch_bytes(const RmsNormBackward& op);
[[nodiscard]] Bytes scratch_bytes(const GatedRmsNormBackward& op);
[[nodiscard]] Bytes scratch_bytes(const LayerNormBackward& op);
[[nodiscard]] Bytes scratch_bytes(const CausalConv& op);
[[nodiscard]] Bytes scratch_bytes(const CausalConvBackward& op);
[[nodiscard]] Bytes scratch_bytes(const Kda& op);
[[nodiscard]] Bytes scratch_bytes(const KdaBackward& op);
[[nodiscard]] Bytes scratch_bytes(const DsaSelect& op);
[[nodiscard]] Bytes scratch_bytes(const Dsa& op);
[[nodiscard]] Bytes scratch_bytes(const DsaBackward& op);
[[nodiscard]] Bytes scratch_bytes(const GroupedGlu& op);
[[nodiscard]] Bytes scratch_bytes(const GroupedMatmulFp8& op);
[[nodiscard]] Bytes scratch_bytes(const Router& op);
[[nodiscard]] Bytes scratch_bytes(const RouterBackward& op);
[[nodiscard]] Bytes scratch_bytes(const Permute& op);
[[nodiscard]] Bytes scratch_bytes(const SequenceLoss& op);
[[nodiscard]] Bytes scratch_bytes(const QuantileBias& op);
[[nodiscard]] Bytes scratch_bytes(const LinearCrossEntropy& op);
[[nodiscard]] Bytes scratch_bytes(const SumOfSquares& op);
[[nodiscard]] Bytes scratch_bytes(const GatherRows& op);
[[nodiscard]] Bytes scratch_bytes(const SumRows& op);
[[nodiscard]] Bytes scratch_bytes(const SumRowsBackward& op);
[[nodiscard]] Bytes scratch_bytes(const RmsNorm& op);
[[nodiscard]] Bytes scratch_bytes(const AttnRes& op);
[[nodiscard]] Bytes scratch_bytes(const AttnResBackward& op);
[[nodiscard]] Bytes scratch_bytes(const Rotary& op);

// Bump allocation inside one scratch range: the same sequence of takes sizes it (from null) and hands it out.
class ScratchCursor {
 public:
  explicit ScratchCursor(std::byte* base) : base_(base) {}
  template <typename T>
  T* take(std::int64_t count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  [[nodiscard]] Bytes used() const { return Bytes(used_); }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace terrace::trainer::cpu
