// RMM's pool: half the budget from the start, the rest when needed.
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include "bench/peers/rmm_peer.hpp"

namespace {

class RmmPool : public terrace::bench::RmmPeer<rmm::mr::pool_memory_resource> {
 public:
  static std::unique_ptr<RmmPool> open(int device, std::size_t budget, std::string& /*why*/) {
    const std::size_t most = budget / 512 * 512;  // RMM takes multiples of 256 only
    return std::make_unique<RmmPool>(device, rmm::mr::cuda_memory_resource{}, most / 2, most);
  }
  using RmmPeer::RmmPeer;
  std::size_t reserved() { return resource().pool_size(); }
};

}  // namespace

TERRACE_EXPORT_PEER(RmmPool, "rmm_pool")
