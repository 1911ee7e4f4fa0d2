// What the ring buffers and NCCL have to do with each other.
//
// Ring memory can be registered with a communicator, so that NCCL reaches it without copies of its own. And
// where devices reach no common memory, so that there are no rings, the same exchange goes through NCCL's
// grouped sends and receives: then the host must know every count, since NCCL takes none in band.
#pragma once

#include <span>
#include <vector>

#include "allocator/ring/ring_rank.hpp"
#include "hooks/nccl/library.hpp"
#include "runtime/collectives.hpp"

namespace terrace::hooks::nccl {

// Memory registered with one communicator, until destroyed. Movable.
class Registration {
 public:
  // Errors: kNotSupported (the library cannot register), kIo. The library outlives the registration.
  [[nodiscard]] static Result<Registration> create(const Library& library, Communicator communicator,
                                                   Address memory, Bytes size);
  [[nodiscard]] static Result<Registration> create(const Library& library, Communicator communicator,
                                                   const RingRank& ring) {
    return create(library, communicator, ring.memory(), ring.memory_size());
  }
  ~Registration();
  Registration(Registration&& other) noexcept;
  Registration& operator=(Registration&& other) noexcept;

 private:
  Registration(const Library& library, Communicator communicator, void* handle)
      : library_(&library), communicator_(communicator), handle_(handle) {}
  void end();
  const Library* library_;
  Communicator communicator_;
  void* handle_;
};

// One rank's side of an exchange of packed parts whose sizes the host knows: by rank, in bytes.
struct SendReceive {
  Communicator communicator = nullptr;
  StreamHandle stream = nullptr;
  const std::byte* send = nullptr;
  std::span<const Bytes> send_sizes;
  Address receive = nullptr;
  std::span<const Bytes> receive_sizes;
  // Announces the exchange to background copies of the device, which give way; null: nobody does. Then
  // `announced_on` is the same stream, as the device names it.
  Collectives* collectives = nullptr;
  Stream announced_on{};
};

// Queues the sides of all ranks of this process in one group: one side where each rank has a process. Parts
// of no bytes are not sent. Errors: kInvalidArgument (a side whose two lists differ in length), kIo; after
// kIo what was queued is not known, and the communicator is to be destroyed.
[[nodiscard]] Status exchange_parts(const Library& library, std::span<const SendReceive> sides);

}  // namespace terrace::hooks::nccl
