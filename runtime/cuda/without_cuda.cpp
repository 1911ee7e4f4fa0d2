// The cuda device of a build without the CUDA headers: there is none, and it says so.
#include "runtime/device.hpp"
#include "runtime/peer_reach.hpp"
#include "runtime/profiler_ranges.hpp"

namespace terrace {

Result<std::unique_ptr<Device>> open_cuda_device(DeviceId id) {
  return Error{Errc::kNotSupported, "cuda device " + std::to_string(id.index) +
                                        ": this build has no CUDA; build where the toolkit's headers are, or "
                                        "use the emulated device"};
}

bool cuda_available() { return false; }

Result<PeerReach> cuda_peer_reach() { return Error{Errc::kNotSupported, "this build has no CUDA"}; }

bool profiler_listens() { return false; }
void push_profiler_range(const char*) {}
void pop_profiler_range() {}

}  // namespace terrace
