// mimalloc by its own names. Its library also defines malloc: open this peer with RTLD_LOCAL, so that no
// other malloc of the process changes.
#include <mimalloc.h>

#include "bench/peers/host_peer.hpp"

namespace {

struct Mimalloc {
  static void* allocate(std::size_t bytes) { return mi_malloc(bytes); }
  static void release(void* address, std::size_t /*bytes*/) { mi_free(address); }
  static std::size_t reserved() { return 0; }  // its count of committed bytes drifts when threads come and go
};

}  // namespace

TERRACE_EXPORT_PEER(terrace::bench::HostPeer<Mimalloc>, "mimalloc")
