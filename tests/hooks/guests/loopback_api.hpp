// What the guests of the wall and of the pool call beyond cuda_api.hpp, and what they ask the loopback
// machine.
#pragma once

#include "tests/hooks/guests/cuda_api.hpp"

extern "C" {
struct Extent {
  unsigned x, y, z;
};
struct Access {
  int location, id, flags;
};
struct Array {
  std::size_t width, height;
  int format;
  unsigned channels;
};
struct IpcHandle {
  char opaque[64];
};
int cudaGetLastError();
int cudaSetDevice(int device);
int cudaMemGetInfo(std::size_t* available, std::size_t* total);
int cudaLaunchKernel(const void* function, Extent grid, Extent block, void** parameters, std::size_t shared,
                     void* stream);
int cudaMallocAsync_ptsz(void** out, std::size_t bytes, void* stream);
int cudaFreeAsync_ptsz(void* address, void* stream);
int cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned version,
                                     unsigned long long flags, int* status);
int cuMemGetInfo_v2(std::size_t* available, std::size_t* total);
int cuMemAllocPitch_v2(Pointer* out, std::size_t* pitch, std::size_t width, std::size_t height,
                       unsigned element);
int cuArrayCreate_v2(void** out, const Array* what);
int cuArrayDestroy(void* array);
int cuMemAddressReserve(Pointer* out, std::size_t bytes, std::size_t, Pointer, unsigned long long);
int cuMemMap(Pointer at, std::size_t bytes, std::size_t offset, Pointer handle, unsigned long long flags);
int cuMemUnmap(Pointer at, std::size_t bytes);
int cuMemSetAccess(Pointer at, std::size_t bytes, const Access* who, std::size_t count);
int cuMemExportToShareableHandle(int* file, Pointer handle, int type, unsigned long long flags);
int cuMemGetAllocationPropertiesFromHandle(void* out, Pointer handle);
int cuMemRetainAllocationHandle(Pointer* out, void* address);
int cuMemImportFromShareableHandle(Pointer* out, void* shared, int type);
int cuIpcGetMemHandle(IpcHandle* out, Pointer address);
int cuIpcOpenMemHandle_v2(Pointer* out, IpcHandle handle, unsigned flags);
int cuIpcCloseMemHandle(Pointer address);
int cuStreamCreate(void** out, unsigned flags);
int cuStreamDestroy_v2(void* stream);
int cuStreamBeginCapture_v2(void* stream, int mode);
int cuStreamEndCapture(void* stream, void** graph);
int cuEventCreate(void** out, unsigned flags);
int cuEventRecord(void* event, void* stream);
int cuDeviceGetDefaultMemPool(void** pool, int device);
int cuDeviceSetMemPool(int device, void* pool);
int cuMemPoolGetAttribute(void* pool, int attribute, void* value);
int cuMemPoolSetAttribute(void* pool, int attribute, void* value);
int cuMemPoolTrimTo(void* pool, std::size_t keep);
int cuMemPoolSetAccess(void* pool, const Access* who, std::size_t count);
int cuModuleUnload(void* module);
int cuCtxSynchronize();
int cuCtxEnablePeerAccess(void* context, unsigned flags);
int cuStreamSynchronize(void* stream);
int cuMemcpyHtoD_v2(Pointer to, const void* from, std::size_t bytes);
int cuMemcpyDtoH_v2(void* to, Pointer from, std::size_t bytes);
int cuMemcpyAsync(Pointer to, Pointer from, std::size_t bytes, void* stream);
int cuMemsetD8Async(Pointer to, unsigned char value, std::size_t bytes, void* stream);
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const void* sizes,
                           const void* strides, const void* box, const void* steps, int interleave,
                           int swizzle, int promotion, int fill);
int cuPointerGetAttribute(void* value, int attribute, Pointer address);
int cuMemGetAddressRange_v2(Pointer* base, std::size_t* bytes, Pointer address);
int cuMemGetAccess(unsigned long long* flags, const int* location, Pointer address);
int cuMulticastBindAddr(Pointer group, std::size_t offset, Pointer address, std::size_t bytes,
                        unsigned long long flags);
int cuGraphLaunch(void* graph, void* stream);

std::size_t loopback_used(int device);
long loopback_calls();
int loopback_access(Pointer address);
int loopback_busy(void* stream, int busy);
int loopback_waits(void* first, void* second);
void* loopback_other_pool();
void* loopback_kernel(const char* name, void (*run)(void** parameters), const std::size_t* sizes,
                      std::size_t count, int told);
int loopback_delay(void* stream, int milliseconds);
std::size_t loopback_host_bytes();
int loopback_in_hbm(Pointer address);
int loopback_refuse(std::size_t bytes);
int loopback_runtime_version();
}
