// PyTorch's caching allocator, called from C++ as its operators call it, with the settings it has by default.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>

#include "bench/peers/cuda_streams.hpp"
#include "bench/peers/table.hpp"

namespace {

using terrace::bench::check_cuda;
using terrace::bench::CudaStreams;
namespace caching = c10::cuda::CUDACachingAllocator;

class PyTorch {
 public:
  static std::unique_ptr<PyTorch> open(int device, std::size_t budget, std::string& /*why*/) {
    auto opened = std::make_unique<PyTorch>(device);
    caching::init(c10::cuda::device_count_ensure_non_zero());
    opened->use_device();
    std::size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    const double share = static_cast<double>(budget) / static_cast<double>(total);
    caching::setMemoryFraction(std::min(1.0, share), opened->index());
    return opened;
  }
  explicit PyTorch(int device) : streams_(device) {}
  PyTorch(const PyTorch&) = delete;
  PyTorch& operator=(const PyTorch&) = delete;
  ~PyTorch() {
    streams_.synchronize();
    try {
      caching::emptyCache();
    } catch (const std::exception&) {  // the process ends with its memory
    }
  }

  void* new_stream() {
    use_device();
    return streams_.make();
  }
  void* allocate(std::size_t bytes, void* stream) {
    return caching::get()->raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream));
  }
  void release(void* address, std::size_t /*bytes*/, void* /*stream*/) {
    caching::get()->raw_delete(address);
  }
  std::size_t reserved() {
    using c10::CachingAllocator::StatType;
    const auto stats = caching::getDeviceStats(index());
    const auto& bytes = stats.reserved_bytes[static_cast<std::size_t>(StatType::AGGREGATE)];
    return static_cast<std::size_t>(bytes.current);
  }

 private:
  [[nodiscard]] c10::DeviceIndex index() const { return static_cast<c10::DeviceIndex>(streams_.device()); }
  // Of the calling thread, as PyTorch keeps it.
  void use_device() const { c10::cuda::set_device(index()); }

  CudaStreams streams_;
};

}  // namespace

TERRACE_EXPORT_PEER(PyTorch, "pytorch")
