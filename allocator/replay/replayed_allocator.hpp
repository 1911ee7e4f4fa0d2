// What a trace can be replayed against: allocators behind one interface, each with its own streams.
//
// One thread uses an allocator. Streams are numbered from 0; one comes into being when it is first named and
// lives as long as the allocator. Before it goes, an allocator takes back every block that is still held.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "runtime/device.hpp"

namespace terrace {

// A recorded stream among those of the replay. Traces with more share: stream n is n modulo this.
inline constexpr std::size_t kMostReplayStreams = 32;
struct ReplayStream {
  std::size_t number = 0;  // below kMostReplayStreams
};

// The block number as the trace counts them.
struct ReplayBlock {
  std::uint64_t id = 0;
  Bytes size;
};

class ReplayedAllocator {
 public:
  virtual ~ReplayedAllocator() = default;
  [[nodiscard]] virtual const std::string& name()
      const = 0;  // in reports: "terrace", "baseline", a plugin's own
  // Makes a stream now, so that no call that is timed does. Errors: those of Device::create_stream.
  [[nodiscard]] virtual Status prepare(ReplayStream stream) = 0;
  // Errors: kOutOfBudget and kOutOfMemory (nothing changed, the replay goes on without this block); any other
  // ends the replay. Precondition of both: the stream is prepared.
  [[nodiscard]] virtual Status allocate(ReplayStream stream, const ReplayBlock& block, Pool pool) = 0;
  [[nodiscard]] virtual Status free(ReplayStream stream,
                                    const ReplayBlock& block) = 0;  // allocated, not freed
  // Bytes it holds from the device now, for blocks and caches; zero where it cannot say.
  [[nodiscard]] virtual Bytes reserved() const = 0;
};

// Our own: HbmPool. Errors: those of HbmPool::create.
[[nodiscard]] Result<std::unique_ptr<ReplayedAllocator>> replay_on_pool(Device& device, Bytes budget);
// No allocator at all: every block is physical memory of its own, rounded up to the device's granularity,
// created and mapped at allocate, and given back at free behind a wait for its stream, as cudaMalloc and
// cudaFree do.
[[nodiscard]] Result<std::unique_ptr<ReplayedAllocator>> replay_on_device(Device& device, Bytes budget);
// A system behind allocator_plugin.h. `device_number` -1: host memory. Errors: kNotFound (no such file, not a
// plugin), kNotSupported (another ABI), kOutOfMemory (it cannot open; the text is its own).
[[nodiscard]] Result<std::unique_ptr<ReplayedAllocator>> replay_on_plugin(const std::string& file,
                                                                          int device_number, Bytes budget);

}  // namespace terrace
