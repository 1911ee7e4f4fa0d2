// cudaMallocAsync and cudaFreeAsync from a pool that keeps what it has been given, which is how it is fast.
#include <cstdint>

#include "bench/peers/cuda_streams.hpp"
#include "bench/peers/table.hpp"

namespace {

using terrace::bench::check_cuda;
using terrace::bench::CudaStreams;

class CudaAsync {
 public:
  static std::unique_ptr<CudaAsync> open(int device, std::size_t budget, std::string& /*why*/) {
    auto opened = std::make_unique<CudaAsync>(device);
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {.type = cudaMemLocationTypeDevice, .id = device};
    properties.maxSize = budget;
    check_cuda(cudaMemPoolCreate(&opened->pool_, &properties), "cudaMemPoolCreate");
    std::uint64_t keep = UINT64_MAX;
    check_cuda(cudaMemPoolSetAttribute(opened->pool_, cudaMemPoolAttrReleaseThreshold, &keep),
               "cudaMemPoolSetAttribute");
    return opened;
  }
  explicit CudaAsync(int device) : streams_(device) {}
  CudaAsync(const CudaAsync&) = delete;
  CudaAsync& operator=(const CudaAsync&) = delete;
  ~CudaAsync() {
    streams_.synchronize();
    if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
  }

  void* new_stream() { return streams_.make(); }
  void* allocate(std::size_t bytes, void* stream) {
    void* address = nullptr;
    const auto code = cudaMallocFromPoolAsync(&address, bytes, pool_, static_cast<cudaStream_t>(stream));
    return code == cudaSuccess ? address : nullptr;
  }
  void release(void* address, std::size_t /*bytes*/, void* stream) {
    cudaFreeAsync(address, static_cast<cudaStream_t>(stream));
  }
  std::size_t reserved() {
    std::uint64_t bytes = 0;
    return cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &bytes) == cudaSuccess ? bytes
                                                                                                    : 0;
  }

 private:
  CudaStreams streams_;
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace

TERRACE_EXPORT_PEER(CudaAsync, "cuda_async")
