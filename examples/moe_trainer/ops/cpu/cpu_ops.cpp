// Ops on a device whose memory the host addresses: each operator is one launch on the caller's stream. The
// operators compute in fp32; bf16 arrays are converted on the way in and out (mixed.hpp).
#include <stdexcept>
#include <utility>

#include "examples/moe_trainer/ops/cpu/gemm.hpp"
#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/mixed.hpp"

namespace terrace::trainer {
namespace {

// Whether the operator says where its typed arrays are. One that has such arrays and does not say so takes
// fp32 alone: a bf16 array then fails its launch, as ArrayOf::f32() does.
template <typename Op>
constexpr bool kHasArrays = requires(Op& op, cpu::StandIns& visit) {
  visit_arrays(op, visit);
};

class CpuOps final : public Ops {
 public:
  CpuOps(Device& device, ScratchSource& scratch) : device_(device), scratch_(scratch) {}

#define TERRACE_DEFINE_OP(Op)                                                                    \
  void run(Stream stream, const Op& op) override {                                               \
    run_op(stream, op, [](const Op& each, std::byte* scratch) { cpu::compute(each, scratch); }); \
  }
  TERRACE_TRAINER_OPS(TERRACE_DEFINE_OP)
#undef TERRACE_DEFINE_OP

  void grouped_forward(Stream stream, const GroupedMatmul& op) override {
    run_grouped(stream, op, cpu::GroupedPass::kForward);
  }
  void grouped_input_gradient(Stream stream, const GroupedMatmul& op) override {
    run_grouped(stream, op, cpu::GroupedPass::kInputGradient);
  }
  [[nodiscard]] double gemm_flops_per_second(std::int64_t rows, std::int64_t width) override {
    return cpu::measure_gemm_flops_per_second(rows, width);
  }

 private:
  template <typename Op, typename Compute>
  void run_op(Stream stream, const Op& op, Compute compute) {
    if constexpr (kHasArrays<Op>) {
      run_mixed(stream, op, compute, [](Op& each, auto& visit) { visit_arrays(each, visit); });
    } else {
      launch(stream, op, compute);
    }
  }
  void run_grouped(Stream stream, const GroupedMatmul& op, cpu::GroupedPass pass) {
    const auto visit_arrays_of_pass = [pass](GroupedMatmul& each, auto& visit) {
      const bool forward = pass == cpu::GroupedPass::kForward;
      visit(each.a, each.rows * (forward ? each.k : each.n));
      visit(each.w, each.groups * each.n * each.k);
      visit(each.c, each.rows * (forward ? each.n : each.k));
    };
    run_mixed(
        stream, op, [pass](const GroupedMatmul& each, std::byte*) { cpu::compute(each, pass); },
        visit_arrays_of_pass);
  }

  // With fp32 stand-ins for what is bf16.
  template <typename Op, typename Compute, typename VisitArrays>
  void run_mixed(Stream stream, Op op, Compute compute, VisitArrays visit_arrays_of) {
    cpu::StandIns stand_ins;
    visit_arrays_of(op, stand_ins);
    const Scratch wide = take(stand_ins.bytes());
    stand_ins.set_base(wide.at);
    cpu::StandIns::Replace replace(stand_ins);
    visit_arrays_of(op, replace);
    if (stand_ins.bytes() == Bytes()) return launch(stream, op, compute);
    launch(stream, op, [stand_ins = std::move(stand_ins), compute](const Op& each, std::byte* scratch) {
      stand_ins.convert_in();
      compute(each, scratch);
      stand_ins.convert_out();
    });
  }

  struct Scratch {
    Address at = nullptr;
    std::shared_ptr<const void> hold;
  };
  [[nodiscard]] Scratch take(Bytes size) {
    Scratch scratch;
    if (size > Bytes()) scratch.hold = scratch_.take(size, &scratch.at);
    return scratch;
  }
  // Scratch may be reused by later work of the stream as soon as this returns: the launch is then in its
  // order.
  template <typename Op, typename Compute>
  void launch(Stream stream, const Op& op, Compute compute) {
    const Scratch scratch = take(cpu::scratch_bytes(op));
    const Status launched =
        device_.launch_host(stream, [op, compute = std::move(compute), at = scratch.at] { compute(op, at); });
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
