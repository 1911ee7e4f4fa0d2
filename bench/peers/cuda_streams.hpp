// The streams a CUDA peer hands out. Made by the thread that will use them: the peer's device becomes the
// current one of that thread, as its library expects.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace terrace::bench {

// Throws what CUDA said: for open(), where it becomes the reason.
inline void check_cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}

class CudaStreams {
 public:
  explicit CudaStreams(int device) : device_(device) {
    if (device < 0) throw std::runtime_error("it serves GPUs, not the emulated device");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    check_cuda(cudaFree(nullptr), "cudaFree");  // makes the context
  }
  CudaStreams(const CudaStreams&) = delete;
  CudaStreams& operator=(const CudaStreams&) = delete;
  ~CudaStreams() {
    synchronize();
    for (cudaStream_t stream : made_) cudaStreamDestroy(stream);
  }

  // Null where CUDA gives none.
  cudaStream_t make() {
    cudaStream_t stream = nullptr;
    if (cudaSetDevice(device_) != cudaSuccess) return nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return nullptr;
    const std::lock_guard lock(mutex_);
    made_.push_back(stream);
    return stream;
  }
  void synchronize() {
    cudaSetDevice(device_);
    const std::lock_guard lock(mutex_);
    for (cudaStream_t stream : made_) cudaStreamSynchronize(stream);
  }
  [[nodiscard]] int device() const { return device_; }

 private:
  const int device_;
  std::mutex mutex_;
  std::vector<cudaStream_t> made_;
};

}  // namespace terrace::bench
