// Exchanges between CUDA devices: the kernel of kernels/ring_exchange.cu, loaded and launched by the driver.
#include "runtime/ring_exchange.hpp"

#include "runtime/cuda/cuda_device.hpp"
#include "runtime/device_fault.hpp"

namespace terrace::cuda {

// NOLINTNEXTLINE(readability-identifier-naming): named after its file by kernels/embed.cmake
extern const unsigned char ring_exchange_image[];

namespace {

constexpr int kThreads = 512;  // as kernels/ring_exchange.cu is compiled for
// What every device takes as a kernel's arguments.
static_assert(sizeof(RingExchange) <= 4096);

}  // namespace

Result<CudaDevice::RingKernel> CudaDevice::load_ring_kernel() const {
  RingKernel kernel;
  Status done = call("cuModuleLoadData", {},
                     [&] { return driver_.cuModuleLoadData(&kernel.module, ring_exchange_image); });
  if (!done.ok()) return done.error();
  int per_processor = 0;
  int processors = 0;
  done = call("cuModuleGetFunction", {}, [&] {
    return driver_.cuModuleGetFunction(&kernel.function, kernel.module, "terrace_ring_exchange");
  });
  if (done.ok()) {
    done = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", {}, [&] {
      return driver_.cuOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel.function, kThreads,
                                                                 0);
    });
  }
  if (done.ok()) {
    done = call("cuDeviceGetAttribute", {}, [&] {
      return driver_.cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_);
    });
  }
  if (!done.ok()) {
    (void)in_context([&] { return driver_.cuModuleUnload(kernel.module); });
    return done.error();
  }
  kernel.blocks = static_cast<std::uint32_t>(per_processor * processors);
  return kernel;
}

Result<CudaDevice::RingKernel> CudaDevice::ring_kernel() {
  const std::lock_guard lock(kernel_mutex_);
  if (!ring_kernel_) {
    auto loaded = load_ring_kernel();
    if (!loaded.ok()) return std::move(loaded).error();
    ring_kernel_ = *loaded;
  }
  return *ring_kernel_;
}

Result<std::uint32_t> CudaDevice::exchange_blocks() {
  const Result<RingKernel> kernel = ring_kernel();
  if (!kernel.ok()) return kernel.error();
  return kernel->blocks;
}

Status CudaDevice::exchange(Stream stream, const RingExchange& exchange) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  const CUstream queue = stream_of(stream).handle;
  const Result<RingKernel> kernel = ring_kernel();
  if (!kernel.ok()) return kernel.error();
  const std::uint32_t blocks = ring_block_count(exchange);
  if (blocks > kernel->blocks) {
    return invalid("an exchange of " + std::to_string(blocks) + " blocks: " + std::to_string(kernel->blocks) +
                       " run at once; ask for fewer",
                   {});
  }
  RingExchange argument = exchange;
  if (exchange.report != nullptr) {
    CUdeviceptr report = 0;
    Status found = call("cuMemHostGetDevicePointer", {},
                        [&] { return driver_.cuMemHostGetDevicePointer(&report, exchange.report, 0); });
    if (!found.ok()) return found;
    argument.report = reinterpret_cast<RingReport*>(report);
  }
  void* arguments[] = {&argument};
  return call("cuLaunchKernel", {}, [&] {
    return driver_.cuLaunchKernel(kernel->function, blocks, 1, 1, kThreads, 1, 1, 0, queue, arguments,
                                  nullptr);
  });
}

}  // namespace terrace::cuda
