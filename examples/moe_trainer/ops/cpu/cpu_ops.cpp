// Ops on a device whose memory the host addresses: each operator is one launch on the caller's stream.
#include <stdexcept>
#include <utility>

#include "examples/moe_trainer/ops/cpu/gemm.hpp"
#include "examples/moe_trainer/ops/cpu/kernels.hpp"

namespace terrace::trainer {
namespace {

class CpuOps final : public Ops {
 public:
  CpuOps(Device& device, ScratchSource& scratch) : device_(device), scratch_(scratch) {}

#define TERRACE_DEFINE_OP(Op)                                                                        \
  void run(Stream stream, const Op& op) override {                                                   \
    launch(stream, cpu::scratch_bytes(op), [op](std::byte* scratch) { cpu::compute(op, scratch); }); \
  }
  TERRACE_TRAINER_OPS(TERRACE_DEFINE_OP)
#undef TERRACE_DEFINE_OP

  void grouped_forward(Stream stream, const GroupedMatmul& op) override {
    launch(stream, Bytes(), [op](std::byte*) { cpu::compute(op, cpu::GroupedPass::kForward); });
  }
  void grouped_input_gradient(Stream stream, const GroupedMatmul& op) override {
    launch(stream, Bytes(), [op](std::byte*) { cpu::compute(op, cpu::GroupedPass::kInputGradient); });
  }
  [[nodiscard]] double gemm_flops_per_second(std::int64_t rows, std::int64_t width) override {
    return cpu::measure_gemm_flops_per_second(rows, width);
  }

 private:
  // Scratch may be reused by later work of the stream as soon as this returns: the launch is then in its
  // order.
  template <typename Work>
  void launch(Stream stream, Bytes scratch_bytes, Work work) {
    Address scratch = nullptr;
    std::shared_ptr<const void> hold;
    if (scratch_bytes > Bytes()) hold = scratch_.take(scratch_bytes, &scratch);
    const Status launched = device_.launch_host(stream, [work = std::move(work), scratch] { work(scratch); });
    if (!launched.ok()) throw std::runtime_error(launched.error().text);
  }

  Device& device_;
  ScratchSource& scratch_;
};

}  // namespace

Result<std::unique_ptr<Ops>> make_cpu_ops(Device& device, ScratchSource& scratch) {
  const auto not_supported = [](const char* text) {
    return Error{Errc::kNotSupported, text, {}, Pool::kScratch};
  };
  const Capabilities& can = device.info().can;
  if (!can.host_addressable || !can.host_kernels) {
    return not_supported(
        "CPU operators: this device's memory is out of the host's reach; use its own kernels");
  }
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    return not_supported("CPU operators: this processor lacks AVX2 or FMA");
  }
  return std::unique_ptr<Ops>(std::make_unique<CpuOps>(device, scratch));
}

}  // namespace terrace::trainer
