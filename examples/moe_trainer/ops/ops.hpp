// The trainer's operators, once as an interface; ops/cpu and ops/cuda implement it.
//
// All tensors are fp32, row-major, dense, on the device the Ops was made for; indices are int32. Shapes stand
// beside each pointer. Every call is asynchronous on `stream`: arguments are copied, pointers must stay valid
// in stream order. Results are deterministic: the same call with the same bits in gives the same bits out.
// Outputs named `d_*` are overwritten unless the field says "adds". Inputs are never written. A null optional
// pointer means: not given, or not wanted. Scratch memory comes from the ScratchSource given at construction
// and goes back in stream order. Errors are thrown as std::exception with one line of text: the trainer is a
// program, not a guest. Mathematics: docs/OPERATORS.md.
#pragma once

#include <cstdint>
#include <memory>

#include "examples/moe_trainer/ops/attention.hpp"
#include "examples/moe_trainer/ops/attnres.hpp"
#include "examples/moe_trainer/ops/conv.hpp"
#include "examples/moe_trainer/ops/dsa.hpp"
#include "examples/moe_trainer/ops/embedding.hpp"
#include "examples/moe_trainer/ops/fp8.hpp"
#include "examples/moe_trainer/ops/kda.hpp"
#include "examples/moe_trainer/ops/linear.hpp"
#include "examples/moe_trainer/ops/loss.hpp"
#include "examples/moe_trainer/ops/moe.hpp"
#include "examples/moe_trainer/ops/norm.hpp"
#include "examples/moe_trainer/ops/optimizer.hpp"
#include "examples/moe_trainer/ops/quantised.hpp"
#include "examples/moe_trainer/ops/random_fill.hpp"
#include "examples/moe_trainer/ops/rotary.hpp"
#include "runtime/device.hpp"

namespace terrace::trainer {

class ScratchSource {
 public:
  virtual ~ScratchSource() = default;
  // Device memory until the handle dies; reused afterwards in order of the compute stream. Throws when out of
  // budget.
  [[nodiscard]] virtual std::shared_ptr<const void> take(Bytes size, Address* address) = 0;
};

class Ops {
 public:
  virtual ~Ops() = default;
  // clang-format off
#define TERRACE_TRAINER_OPS(APPLY)                                                                  \
  APPLY(Matmul) APPLY(GroupedWeightGradient) APPLY(RmsNorm) APPLY(RmsNormBackward)                  \
  APPLY(GatedRmsNorm) APPLY(GatedRmsNormBackward) APPLY(LayerNorm) APPLY(LayerNormBackward)         \
  APPLY(CausalConv) APPLY(CausalConvBackward) APPLY(Kda) APPLY(KdaBackward)                         \
  APPLY(DsaSelect) APPLY(Dsa) APPLY(DsaBackward) APPLY(MapKeys) APPLY(PackIndices) APPLY(UnpackIndices) APPLY(Router) APPLY(RouterBackward)                \
  APPLY(Permute) APPLY(GatherRows) APPLY(SumRows) APPLY(SumRowsBackward)                            \
  APPLY(Glu) APPLY(GluBackward) APPLY(GroupedGlu) APPLY(BalanceBias) APPLY(QuantileBias) APPLY(SequenceLoss) APPLY(Add)                    \
  APPLY(Embedding) APPLY(EmbeddingBackward) APPLY(LinearCrossEntropy) APPLY(SumOfSquares) APPLY(AdamW) \
  APPLY(Attention) APPLY(AttentionBackward) APPLY(AttnRes) APPLY(AttnResBackward) APPLY(Rotary) APPLY(Convert) \
  APPLY(RandomFill) APPLY(QuantiseRows) APPLY(QuantiseWeights) APPLY(GroupedMatmulFp8) \
  APPLY(QuantiseBlocks) APPLY(DequantiseBlocks)
// clang-format on
#define TERRACE_DECLARE_OP(Op) virtual void run(Stream stream, const Op& op) = 0;
  TERRACE_TRAINER_OPS(TERRACE_DECLARE_OP)
#undef TERRACE_DECLARE_OP
  virtual void grouped_forward(Stream stream, const GroupedMatmul& op) = 0;
  virtual void grouped_input_gradient(Stream stream, const GroupedMatmul& op) = 0;
  // Sustained fp32 GEMM FLOP/s of this implementation at a (rows, width, width) product: the best of a few
  // runs.
  [[nodiscard]] virtual double gemm_flops_per_second(std::int64_t rows, std::int64_t width) = 0;
};

// Errors: kNotSupported where the device cannot run these.
[[nodiscard]] Result<std::unique_ptr<Ops>> make_cpu_ops(Device& device, ScratchSource& scratch);
[[nodiscard]] Result<std::unique_ptr<Ops>> make_cuda_ops(Device& device, ScratchSource& scratch);
// By the device's kind.
[[nodiscard]] Result<std::unique_ptr<Ops>> make_ops(Device& device, ScratchSource& scratch);

}  // namespace terrace::trainer
