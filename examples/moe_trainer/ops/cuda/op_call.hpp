// One call of an operator on the CUDA device: its stream, its scratch, and the only place where CUDA and
// cuBLAS calls are checked. A failure throws std::runtime_error with the call, the operator and its shape.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer::cuda {

class OpCall;

// One cuBLAS handle a stream, each with a workspace of its own, 32 MiB on compute capability 9.0 and 4 MiB
// elsewhere: on one device the choice of algorithm, and so every bit of a product, depends on the shape
// alone.
class BlasHandles {
 public:
  BlasHandles() = default;
  BlasHandles(const BlasHandles&) = delete;
  BlasHandles& operator=(const BlasHandles&) = delete;
  ~BlasHandles();
  [[nodiscard]] cublasHandle_t on(OpCall& call, Stream stream);
  void forget(Stream stream);  // its work is done

 private:
  struct Entry {
    cublasHandle_t handle = nullptr;
    cudaStream_t stream = nullptr;
    std::shared_ptr<const void> workspace;
    Bytes workspace_size;
    Address workspace_at = nullptr;
  };
  std::mutex mutex_;
  std::map<std::uint32_t, Entry> entries_;
};

// How many blocks, threads a block and bytes of dynamic shared memory. No blocks: nothing to do.
struct Grid {
  std::int64_t x = 1;
  std::int64_t y = 1;
  std::int64_t z = 1;
  int threads = 256;
  std::size_t shared_bytes = 0;
};

[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Enough blocks of `threads` for one thread an element.
[[nodiscard]] constexpr Grid grid_for(std::int64_t elements, int threads = 256) {
  return Grid{.x = ceil_div(elements, threads), .threads = threads};
}

class OpCall {
 public:
  struct Options {
    Device* device;
    Stream stream;
    ScratchSource* scratch;
    BlasHandles* blas;
    const char* op;
  };
  // Makes the device's context current on this thread.
  explicit OpCall(const Options& options);

  // What errors say; set first by every operator.
  void set_shape(std::initializer_list<std::int64_t> shape) { shape_.assign(shape); }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  [[nodiscard]] cublasHandle_t blas() { return options_.blas->on(*this, options_.stream); }

  // Device memory for `count` numbers until the call object dies; its reuse is ordered after this call's
  // work.
  template <typename T>
  [[nodiscard]] T* scratch(std::int64_t count) {
    return reinterpret_cast<T*>(take(Bytes(static_cast<std::uint64_t>(count > 0 ? count : 1) * sizeof(T))));
  }
  [[nodiscard]] std::shared_ptr<const void> take_shared(Bytes size, Address* address) {
    return options_.scratch->take(size, address);
  }

  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), const Grid& grid, const Arguments&... arguments) {
    if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0) return;
    check_grid(grid);
    if (grid.shared_bytes > kSharedWithoutAsking) {
      check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(grid.shared_bytes)),
            "cudaFuncSetAttribute");
    }
    cudaLaunchConfig_t config{};
    config.gridDim =
        dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
    config.blockDim = dim3(static_cast<unsigned>(grid.threads));
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = stream_;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "cudaLaunchKernelEx");
  }
  void zero(float* at, std::int64_t count);

  void check(cudaError_t result, const char* call) const;
  void check(cublasStatus_t result, const char* call) const;
  void require(bool condition, const char* what) const;  // a shape this implementation takes

 private:
  static constexpr std::size_t kSharedWithoutAsking = 48 * 1024;
  [[nodiscard]] Address take(Bytes size);
  void check_grid(const Grid& grid) const;
  [[noreturn]] void fail(const char* call, const char* what) const;

  Options options_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::int64_t> shape_;
  std::vector<std::shared_ptr<const void>> taken_;
};

}  // namespace terrace::trainer::cuda
