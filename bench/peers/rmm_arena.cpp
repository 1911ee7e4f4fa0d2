// RMM's arena, which takes the whole budget at once and gives every stream an arena of its own.
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>

#include "bench/peers/rmm_peer.hpp"

namespace {

class RmmArena : public terrace::bench::RmmPeer<rmm::mr::arena_memory_resource> {
 public:
  static std::unique_ptr<RmmArena> open(int device, std::size_t budget, std::string& /*why*/) {
    // It asks for all of it in one piece, beside what the runtime has taken since the budget was read.
    const std::size_t size = budget - budget / 32;
    auto opened = std::make_unique<RmmArena>(device, rmm::mr::cuda_memory_resource{}, size);
    opened->budget_ = size;
    return opened;
  }
  using RmmPeer::RmmPeer;
  std::size_t reserved() { return budget_; }

 private:
  std::size_t budget_ = 0;
};

}  // namespace

TERRACE_EXPORT_PEER(RmmArena, "rmm_arena")
