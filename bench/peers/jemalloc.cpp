// jemalloc, as its users meet it: malloc and free of its archive, which this library holds and hides, so that
// no other malloc of the process changes. Its thread-local storage is of the initial-exec kind: a program
// that uses this peer links it; opened late, the loader may have no room left for it.
#include <jemalloc/jemalloc.h>

#include <cstdint>
#include <cstdlib>

#include "bench/peers/host_peer.hpp"

namespace {

struct Jemalloc {
  static void* allocate(std::size_t bytes) { return malloc(bytes); }
  static void release(void* address, std::size_t /*bytes*/) { free(address); }
  // Pages it keeps resident, the unused ones among them included.
  static std::size_t reserved() {
    std::uint64_t epoch = 1;
    std::size_t resident = 0;
    std::size_t size = sizeof resident;
    mallctl("epoch", nullptr, nullptr, &epoch, sizeof epoch);  // the figures below are as of the last epoch
    return mallctl("stats.resident", &resident, &size, nullptr, 0) == 0 ? resident : 0;
  }
};

}  // namespace

TERRACE_EXPORT_PEER(terrace::bench::HostPeer<Jemalloc>, "jemalloc")
