// What the guests call, as its headers would declare it.
#pragma once

#include <cstddef>

extern "C" {
using Pointer = unsigned long long;
int cudaMalloc(void** out, std::size_t bytes);
int cudaMallocAsync(void** out, std::size_t bytes, void* stream);
int cudaMallocFromPoolAsync(void** out, std::size_t bytes, void* pool, void* stream);
int cudaMallocManaged(void** out, std::size_t bytes, unsigned flags);
int cudaMallocPitch(void** out, std::size_t* pitch, std::size_t width, std::size_t height);
int cudaMallocHost(void** out, std::size_t bytes);
int cudaHostAlloc(void** out, std::size_t bytes, unsigned flags);
int cudaFree(void* address);
int cudaFreeAsync(void* address, void* stream);
int cudaFreeHost(void* address);
int cuMemAlloc_v2(Pointer* out, std::size_t bytes);
int cuMemAllocAsync(Pointer* out, std::size_t bytes, void* stream);
int cuMemAllocFromPoolAsync(Pointer* out, std::size_t bytes, void* pool, void* stream);
int cuMemAllocManaged(Pointer* out, std::size_t bytes, unsigned flags);
int cuMemHostAlloc(void** out, std::size_t bytes, unsigned flags);
int cuMemAllocHost_v2(void** out, std::size_t bytes);
int cuMemFree_v2(Pointer address);
int cuMemFreeAsync(Pointer address, void* stream);
int cuMemFreeHost(void* address);
int cuMemCreate(Pointer* handle, std::size_t bytes, const void* properties, unsigned long long flags);
int cuMemRelease(Pointer handle);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuDevicePrimaryCtxReset_v2(int device);
int cuCtxSetCurrent(void* context);
int cuGetProcAddress(const char* symbol, void** out, int version, unsigned long long flags);
int cuGetProcAddress_v2(const char* symbol, void** out, int version, unsigned long long flags, int* found);
int loopback_hidden_alloc(void** out, std::size_t bytes);
}
