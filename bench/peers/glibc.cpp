// The process's own malloc: glibc's, unless something is preloaded. What it holds includes the rest of the
// process.
#include <malloc.h>

#include <cstdlib>

#include "bench/peers/host_peer.hpp"

namespace {

struct Glibc {
  static void* allocate(std::size_t bytes) { return std::malloc(bytes); }
  static void release(void* address, std::size_t /*bytes*/) { std::free(address); }
  static std::size_t reserved() {
    const struct mallinfo2 held = mallinfo2();
    return held.arena + held.hblkhd;
  }
};

}  // namespace

TERRACE_EXPORT_PEER(terrace::bench::HostPeer<Glibc>, "glibc")
