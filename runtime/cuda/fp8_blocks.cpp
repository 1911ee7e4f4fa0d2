// Numbers packed as 8-bit floats on a CUDA device: the kernels of kernels/fp8_blocks.cu, loaded and launched
// by the driver.
#include "runtime/fp8_blocks.hpp"

#include <algorithm>

#include "runtime/cuda/cuda_device.hpp"
#include "runtime/device_fault.hpp"

namespace terrace::cuda {

// NOLINTNEXTLINE(readability-identifier-naming): named after its file by kernels/embed.cmake
extern const unsigned char fp8_blocks_image[];

namespace {

constexpr unsigned kThreads = 256;  // as kernels/fp8_blocks.cu is compiled for
constexpr unsigned kWarps = kThreads / 32;
constexpr std::uint64_t kMostBlocks =
    132 * 8;  // of threads: all that an H200 runs at once; each adds up once

}  // namespace

Result<CudaDevice::Fp8Kernels> CudaDevice::load_fp8_kernels() const {
  Fp8Kernels kernels;
  Status done = call("cuModuleLoadData", {},
                     [&] { return driver_.cuModuleLoadData(&kernels.module, fp8_blocks_image); });
  if (!done.ok()) return done.error();
  done = call("cuModuleGetFunction", {},
              [&] { return driver_.cuModuleGetFunction(&kernels.pack, kernels.module, "terrace_fp8_pack"); });
  if (done.ok()) {
    done = call("cuModuleGetFunction", {}, [&] {
      return driver_.cuModuleGetFunction(&kernels.unpack, kernels.module, "terrace_fp8_unpack");
    });
  }
  if (done.ok()) return kernels;
  (void)in_context([&] { return driver_.cuModuleUnload(kernels.module); });
  return done.error();
}

Result<CudaDevice::Fp8Kernels> CudaDevice::fp8_kernels() {
  const std::lock_guard lock(kernel_mutex_);
  if (!fp8_kernels_) {
    auto loaded = load_fp8_kernels();
    if (!loaded.ok()) return std::move(loaded).error();
    fp8_kernels_ = *loaded;
  }
  return *fp8_kernels_;
}

Status CudaDevice::launch_fp8(Stream stream, CUfunction kernel, const Fp8Blocks& blocks) {
  if (blocks.count == 0) return {};
  const CUstream queue = stream_of(stream).handle;
  const std::uint64_t wanted = (fp8_blocks(blocks.count) + kWarps - 1) / kWarps;
  const auto grid = static_cast<unsigned>(std::min(wanted, kMostBlocks));
  Fp8Blocks argument = blocks;
  void* arguments[] = {&argument};
  return call("cuLaunchKernel", {}, [&] {
    return driver_.cuLaunchKernel(kernel, grid, 1, 1, kThreads, 1, 1, 0, queue, arguments, nullptr);
  });
}

Status CudaDevice::pack_fp8(Stream stream, const Fp8Blocks& blocks) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  const Result<Fp8Kernels> kernels = fp8_kernels();
  return kernels.ok() ? launch_fp8(stream, kernels->pack, blocks) : Status(kernels.error());
}

Status CudaDevice::unpack_fp8(Stream stream, const Fp8Blocks& blocks) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  const Result<Fp8Kernels> kernels = fp8_kernels();
  return kernels.ok() ? launch_fp8(stream, kernels->unpack, blocks) : Status(kernels.error());
}

}  // namespace terrace::cuda
