// The few types of the CUDA ABI that intercepted calls pass through. Declared here, so that nothing of CUDA
// is needed to build or load the library; sizes and values are fixed by the ABI since CUDA 11.2.
#pragma once

#include <cstddef>
#include <cstdint>

namespace terrace::hooks::cuda {

using CallResult = int;  // cudaError_t and CUresult
inline constexpr CallResult kSuccess = 0;
inline constexpr CallResult kNotInitialized = 3;  // cudaErrorInitializationError, CUDA_ERROR_NOT_INITIALIZED

using DevicePointer = unsigned long long;   // CUdeviceptr
using PhysicalHandle = unsigned long long;  // CUmemGenericAllocationHandle
using StreamHandle = void*;                 // cudaStream_t, CUstream
using MemoryPool = void*;                   // cudaMemPool_t, CUmemoryPool
using QueryResult = int;                    // CUdriverProcAddressQueryResult

enum class LocationType : int { kDevice = 1 };  // others are places in host memory

// The beginning of CUmemAllocationProp; only ever read through a pointer that the guest gave.
struct AllocationProperties {
  int type;
  int requested_handle_types;
  LocationType location_type;
  int location_id;
};
static_assert(offsetof(AllocationProperties, location_type) == 8);

}  // namespace terrace::hooks::cuda
