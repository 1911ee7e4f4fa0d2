// What the two RMM peers have in common: the resource lives on cudaMalloc and is called without type erasure.
#pragma once

#include <cuda/stream>

#include "bench/peers/cuda_streams.hpp"
#include "bench/peers/table.hpp"

namespace terrace::bench {

// `Resource` is an rmm::mr resource; reserved() stays with the peer.
template <typename Resource>
class RmmPeer {
 public:
  template <typename... Arguments>
  explicit RmmPeer(int device, Arguments&&... arguments)
      : streams_(device), resource_(std::forward<Arguments>(arguments)...) {}

  void* new_stream() { return streams_.make(); }
  void* allocate(std::size_t bytes, void* stream) {
    return resource_.allocate(ref(stream), bytes, kAlignment);
  }
  void release(void* address, std::size_t bytes, void* stream) {
    resource_.deallocate(ref(stream), address, bytes, kAlignment);
  }

 protected:
  [[nodiscard]] const Resource& resource() const { return resource_; }

 private:
  static constexpr std::size_t kAlignment = 256;
  static cuda::stream_ref ref(void* stream) { return cuda::stream_ref(static_cast<cudaStream_t>(stream)); }

  CudaStreams streams_;  // before the resource, which is gone before them
  Resource resource_;
};

}  // namespace terrace::bench
