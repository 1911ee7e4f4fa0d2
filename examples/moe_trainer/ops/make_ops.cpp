#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer {

Result<std::unique_ptr<Ops>> make_ops(Device& device, ScratchSource& scratch) {
  if (device.info().kind != "cuda") return make_cpu_ops(device, scratch);
#ifdef TERRACE_HAVE_CUDA
  return make_cuda_ops(device, scratch);
#else
  return Error{
      Errc::kNotSupported,
      "operators: this build has no CUDA kernels; build with a CUDA toolkit or use the emulated device",
      {},
      Pool::kScratch};
#endif
}

}  // namespace terrace::trainer
