// Ops on the CUDA device: binds the thread, names the call, and hands it to the operator's launcher.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer {
namespace {

template <typename T>
T checked(Result<T> result) {
  if (!result) throw std::runtime_error("gemm_flops_per_second: " + result.error().text);
  return std::move(result).value();
}
void checked(const Status& status) {
  if (!status) throw std::runtime_error("gemm_flops_per_second: " + status.error().text);
}

// A stream and two events of the device for one measurement.
class Stopwatch {
 public:
  explicit Stopwatch(Device& device)
      : device_(device),
        stream_(checked(device.create_stream(StreamPriority::kNormal))),
        from_(checked(device.create_event())),
        to_(checked(device.create_event())) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    device_.destroy_event(from_);
    device_.destroy_event(to_);
    device_.destroy_stream(stream_);
  }
  [[nodiscard]] Stream stream() const { return stream_; }
  void start() { checked(device_.record(stream_, from_)); }
  [[nodiscard]] double stop() {
    checked(device_.record(stream_, to_));
    checked(device_.synchronize(to_));
    return checked(device_.seconds_between(from_, to_));
  }

 private:
  Device& device_;
  Stream stream_;
  Event from_, to_;
};

class CudaOps final : public Ops {
 public:
  CudaOps(Device& device, ScratchSource& scratch) : device_(device), scratch_(scratch) {}

#define TERRACE_RUN_OP(Op)                         \
  void run(Stream stream, const Op& op) override { \
    cuda::OpCall call(call_options(stream, #Op));  \
    cuda::launch(call, op);                        \
  }
  TERRACE_TRAINER_OPS(TERRACE_RUN_OP)
#undef TERRACE_RUN_OP

  void grouped_forward(Stream stream, const GroupedMatmul& op) override {
    cuda::OpCall call(call_options(stream, "GroupedMatmul forward"));
    cuda::launch_grouped_forward(call, op);
  }
  void grouped_input_gradient(Stream stream, const GroupedMatmul& op) override {
    cuda::OpCall call(call_options(stream, "GroupedMatmul input gradient"));
    cuda::launch_grouped_input_gradient(call, op);
  }

  double gemm_flops_per_second(std::int64_t rows, std::int64_t width) override {
    constexpr int kProducts = 8;  // between two events, so that their own cost does not count
    constexpr int kRuns = 4;      // the first warms up
    Stopwatch watch(device_);
    double best = 0;
    {
      cuda::OpCall call(call_options(watch.stream(), "gemm_flops_per_second"));
      call.set_shape({rows, width, width});
      // Scratch is ordered by the compute stream, which is not ours here.
      call.check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      const auto* a = call.scratch<float>(rows * width);
      const auto* b = call.scratch<float>(width * width);
      auto* c = call.scratch<float>(rows * width);
      call.zero(const_cast<float*>(a), rows * width);
      call.zero(const_cast<float*>(b), width * width);
      const Matmul product{.m = rows,
                           .n = width,
                           .k = width,
                           .a = a,
                           .ta = Transpose::kNo,
                           .b = b,
                           .tb = Transpose::kYes,
                           .c = c};
      for (int i = 0; i < kRuns; ++i) {
        watch.start();
        for (int j = 0; j < kProducts; ++j) cuda::launch(call, product);
        const double seconds = watch.stop();
        const double flops = 2.0 * kProducts * static_cast<double>(rows) * static_cast<double>(width * width);
        if (i > 0 && seconds > 0) best = std::max(best, flops / seconds);
      }
    }
    blas_.forget(watch.stream());
    return best;
  }

 private:
  cuda::OpCall::Options call_options(Stream stream, const char* op) {
    return {.device = &device_, .stream = stream, .scratch = &scratch_, .blas = &blas_, .op = op};
  }

  Device& device_;
  ScratchSource& scratch_;
  cuda::BlasHandles blas_;
};

}  // namespace

Result<std::unique_ptr<Ops>> make_cuda_ops(Device& device, ScratchSource& scratch) {
  if (device.info().kind != "cuda") {
    return Error{.code = Errc::kNotSupported,
                 .text = "the CUDA operators need a cuda device, not \"" + device.info().kind + "\""};
  }
  return std::unique_ptr<Ops>(std::make_unique<CudaOps>(device, scratch));
}

}  // namespace terrace::trainer
