#include "runtime/cuda/cuda_device.hpp"

#include <array>

#include "runtime/peer_reach.hpp"

namespace terrace {

namespace cuda {

Result<std::unique_ptr<CudaDevice>> CudaDevice::open(const Driver& driver, DeviceId id) {
  CUdevice device = 0;
  const Status found = check(driver, driver.cuDeviceGet(&device, id.index), {"cuDeviceGet", {}, id});
  if (!found.ok()) {
    Error error = found.error();
    // The driver calls an ordinal past the last an invalid argument or an invalid device, by version.
    error.code = Errc::kNotFound;
    return error;
  }
  CUcontext context = nullptr;
  const Status retained =
      check(driver, driver.cuDevicePrimaryCtxRetain(&context, device), {"cuDevicePrimaryCtxRetain", {}, id});
  if (!retained.ok()) return retained.error();
  std::unique_ptr<CudaDevice> opened(new CudaDevice(driver, device, context, id));
  if (Status described = opened->describe(); !described.ok()) return described.error();
  return opened;
}

CudaDevice::CudaDevice(const Driver& driver, CUdevice device, CUcontext context, DeviceId id)
    : driver_(driver), device_(device), context_(context) {
  info_.id = id;
  info_.kind = "cuda";
  memory_kind_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory_kind_.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  access_.push_back({.location = memory_kind_.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
}

Status CudaDevice::describe() {
  int virtual_memory = 0;
  Status asked = call("cuDeviceGetAttribute", {}, [&] {
    return driver_.cuDeviceGetAttribute(&virtual_memory,
                                        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_);
  });
  if (!asked.ok()) return asked;
  if (virtual_memory == 0) {
    return Error{.code = Errc::kNotSupported,
                 .text = "cuda device " + std::to_string(info_.id.index) +
                         " has no virtual memory management; use the emulated device"};
  }
  info_.can.remap = true;
  int host_numa = 0;
  asked = call("cuDeviceGetAttribute", {}, [&] {
    return driver_.cuDeviceGetAttribute(
        &host_numa, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_);
  });
  // A driver that does not know the attribute has no such memory.
  info_.can.host_physical = asked.ok() && host_numa != 0;

  std::array<char, 256> name{};
  asked = call("cuDeviceGetName", {}, [&] {
    return driver_.cuDeviceGetName(name.data(), static_cast<int>(name.size()) - 1, device_);
  });
  if (!asked.ok()) return asked;
  info_.name = name.data();

  std::array<char, 32> pci{};
  asked = call("cuDeviceGetPCIBusId", {}, [&] {
    return driver_.cuDeviceGetPCIBusId(pci.data(), static_cast<int>(pci.size()) - 1, device_);
  });
  if (!asked.ok()) return asked;
  info_.pci = pci.data();
  for (char& c : info_.pci) {
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
  }

  std::size_t granularity = 0;
  asked = call("cuMemGetAllocationGranularity", {}, [&] {
    return driver_.cuMemGetAllocationGranularity(&granularity, &memory_kind_,
                                                 CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  });
  if (!asked.ok()) return asked;
  info_.granularity = Bytes(granularity);

  const Result<MemoryInfo> memory = this->memory();
  if (!memory.ok()) return memory.error();
  info_.capacity = round_down(memory->total, info_.granularity);

  return call("cuCtxGetStreamPriorityRange", {},
              [&] { return driver_.cuCtxGetStreamPriorityRange(&priorities_.normal, &priorities_.high); });
}

// Failures in what follows have nobody to go to, and nothing to do: a context that refuses them, lost or
// already torn down at the end of the process, holds none of this any more.
CudaDevice::~CudaDevice() {
  (void)in_context([&] {
    for (const CudaStream& stream : streams_.all()) {
      if (stream.owner == CudaStream::Owner::kFramework) continue;
      driver_.cuStreamSynchronize(stream.handle);
      driver_.cuStreamDestroy(stream.handle);
    }
    for (const CUevent event : events_.all()) driver_.cuEventDestroy(event);
    if (ring_kernel_) driver_.cuModuleUnload(ring_kernel_->module);
    if (fp8_kernels_) driver_.cuModuleUnload(fp8_kernels_->module);
    for (const auto& [host, size] : pinned_) driver_.cuMemHostUnregister(host);
    for (const auto& [id, physical] : physical_) driver_.cuMemRelease(physical.handle);
    return CUDA_SUCCESS;
  });
  driver_.cuDevicePrimaryCtxRelease(device_);
}

Status CudaDevice::bind_thread() {
  return check(driver_, driver_.cuCtxSetCurrent(context_), {"cuCtxSetCurrent", {}, info_.id});
}

Error CudaDevice::invalid(std::string text, Bytes size) const {
  return {.code = Errc::kInvalidArgument,
          .text = "cuda device " + std::to_string(info_.id.index) + ": " + std::move(text),
          .bytes = size};
}

}  // namespace cuda

Result<std::unique_ptr<Device>> open_cuda_device(DeviceId id) {
  const Result<const cuda::Driver*> driver = cuda::open_driver();
  if (!driver.ok()) return driver.error();
  auto device = cuda::CudaDevice::open(**driver, id);
  if (!device.ok()) return std::move(device).error();
  return std::unique_ptr<Device>(std::move(device).value());
}

bool cuda_available() { return cuda::open_driver().ok(); }

Result<PeerReach> cuda_peer_reach() {
  const Result<const cuda::Driver*> opened = cuda::open_driver();
  if (!opened.ok()) return opened.error();
  const cuda::Driver& driver = **opened;
  PeerReach reach;
  if (Status counted =
          cuda::check(driver, driver.cuDeviceGetCount(&reach.devices), {"cuDeviceGetCount", {}, {}});
      !counted)
    return counted.error();
  for (int from = 0; from < reach.devices; ++from) {
    for (int to = 0; to < reach.devices; ++to) {
      if (from == to) continue;
      CUdevice device{}, peer{};
      int can = 0;
      CUresult result = driver.cuDeviceGet(&device, from);
      if (result == CUDA_SUCCESS) result = driver.cuDeviceGet(&peer, to);
      if (result == CUDA_SUCCESS) result = driver.cuDeviceCanAccessPeer(&can, device, peer);
      if (Status asked = cuda::check(driver, result, {"cuDeviceCanAccessPeer", {}, DeviceId{from}}); !asked)
        return asked.error();
      ++reach.pairs;
      reach.reaching_pairs += can;
    }
  }
  return reach;
}

}  // namespace terrace
