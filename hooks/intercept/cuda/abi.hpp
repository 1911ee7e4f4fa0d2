// The few types of the CUDA ABI that intercepted calls pass through. Declared here, so that nothing of CUDA
// is needed to build or load the library; sizes and values are fixed by the ABI since CUDA 11.2.
#pragma once

#include <cstddef>
#include <cstdint>

namespace terrace::hooks::cuda {

using CallResult = int;  // cudaError_t, CUresult, cublasStatus_t, ncclResult_t
inline constexpr CallResult kSuccess = 0;
inline constexpr CallResult kInvalidValue = 1;    // of both APIs, as the next two
inline constexpr CallResult kOutOfMemory = 2;     // cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY
inline constexpr CallResult kNotInitialized = 3;  // cudaErrorInitializationError
inline constexpr CallResult kNotReady = 600;      // CUDA_ERROR_NOT_READY
// Refused because some stream is captured: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and those after it.
[[nodiscard]] constexpr bool refused_in_capture(CallResult result) { return result >= 900 && result <= 908; }

using DevicePointer = unsigned long long;   // CUdeviceptr
using PhysicalHandle = unsigned long long;  // CUmemGenericAllocationHandle
using DeviceOrdinal = int;                  // CUdevice
using ContextHandle = void*;                // CUcontext
using StreamHandle = void*;                 // cudaStream_t, CUstream
using EventHandle = void*;                  // CUevent
using FunctionHandle = void*;               // CUfunction, CUkernel
using ArrayHandle = void*;                  // CUarray, CUmipmappedArray
using PoolHandle = void*;                   // cudaMemPool_t, CUmemoryPool
using QueryResult = int;                    // CUdriverProcAddressQueryResult

// What was allocated at one time.
struct Extent {
  DevicePointer at = 0;
  std::uint64_t bytes = 0;
};

// Streams that are no handles. Zero means the first, in the variants for per-thread streams the second.
inline const StreamHandle kLegacyStream = reinterpret_cast<StreamHandle>(0x1);
inline const StreamHandle kPerThreadStream = reinterpret_cast<StreamHandle>(0x2);

// What a zero stream means in a function.
enum class DefaultStream : std::uint8_t { kLegacy, kPerThread };

inline constexpr unsigned long long kAskPerThread = 2;  // CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM

enum class LocationType : int { kDevice = 1, kHostNuma = 3 };  // others are places in host memory too
struct Location {
  LocationType type;
  int id;
};
// The beginning of CUmemAllocationProp, and all of it.
struct AllocationProperties {
  int type;
  int requested_handle_types;
  Location location;
  void* windows_only;
  unsigned char flags[8];  // compression, GPUDirect, two of usage
};
static_assert(offsetof(AllocationProperties, location) == 8 && sizeof(AllocationProperties) == 32);
inline constexpr int kPinnedMemory = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED

inline constexpr int kFileDescriptor = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

struct AccessDescription {
  Location location;
  int flags;
};
static_assert(sizeof(AccessDescription) == 12);
inline constexpr int kReadWrite = 3;

enum class PoolAttribute : int {
  kReservedCurrent = 5,
  kReservedHigh = 6,
  kUsedCurrent = 7,
  kUsedHigh = 8,
};

struct ArrayDescriptor {
  std::size_t width, height;
  int format;
  unsigned channels;
};
struct Array3dDescriptor {
  std::size_t width, height, depth;
  int format;
  unsigned channels, flags;
};

struct IpcHandle {
  char opaque[64];
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  StreamHandle stream;
  void* attributes;
  unsigned attribute_count;
};
static_assert(offsetof(LaunchConfig, stream) == 32);
struct Extent3 {  // dim3
  unsigned x, y, z;
};

}  // namespace terrace::hooks::cuda
