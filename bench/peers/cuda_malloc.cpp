// cudaMalloc and cudaFree: what every caching allocator is there to avoid.
#include "bench/peers/cuda_streams.hpp"
#include "bench/peers/table.hpp"

namespace {

using terrace::bench::CudaStreams;

class CudaMalloc {
 public:
  static std::unique_ptr<CudaMalloc> open(int device, std::size_t /*budget*/, std::string& /*why*/) {
    return std::make_unique<CudaMalloc>(device);
  }
  explicit CudaMalloc(int device) : streams_(device) {}

  void* new_stream() { return streams_.make(); }
  void* allocate(std::size_t bytes, void* /*stream*/) {
    void* address = nullptr;
    return cudaMalloc(&address, bytes) == cudaSuccess ? address : nullptr;
  }
  void release(void* address, std::size_t /*bytes*/, void* /*stream*/) { cudaFree(address); }
  std::size_t reserved() { return 0; }

 private:
  CudaStreams streams_;
};

}  // namespace

TERRACE_EXPORT_PEER(CudaMalloc, "cuda_malloc")
