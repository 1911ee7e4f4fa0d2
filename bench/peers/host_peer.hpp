// What the peers that hand out host memory have in common: they hold no state of ours, know no streams and
// take no budget. `Calls` has static allocate(bytes), release(address, bytes) and reserved().
#pragma once

#include "bench/peers/table.hpp"

namespace terrace::bench {

template <typename Calls>
class HostPeer {
 public:
  static std::unique_ptr<HostPeer> open(int device, std::size_t /*budget*/, std::string& why) {
    if (device < 0) return std::make_unique<HostPeer>();
    why = "it hands out host memory, not that of a GPU";
    return nullptr;
  }
  void* new_stream() { return nullptr; }
  void* allocate(std::size_t bytes, void* /*stream*/) { return Calls::allocate(bytes); }
  void release(void* address, std::size_t bytes, void* /*stream*/) { Calls::release(address, bytes); }
  std::size_t reserved() { return Calls::reserved(); }
};

}  // namespace terrace::bench
