// Ring buffers for all-to-all exchanges between the devices of one process.
//
// For every pair of ranks a channel of slots, each of a fixed worst case, reserved from the comm pool when
// the ring is made and never grown, spilled or moved: its blocks are known to no session. Every device maps
// the others' memory, so a sender stores straight into the receiver's slot. runtime/ring_exchange.hpp has the
// protocol, ring_protocol.hpp its state machines, docs/design/0007-rings.md the reasons and the figures.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "allocator/ring/ring_rank.hpp"

namespace terrace {

class RingBuffers {
 public:
  struct Member {
    Device* device = nullptr;  // all outlive the ring
    HbmPool* pool = nullptr;   // of that device
    Stream stream;             // of that device: the reservation is ordered on it
  };
  // What each rank takes from its comm pool. Precondition: options that create() accepts.
  [[nodiscard]] static Bytes bytes_per_rank(const RingOptions& options, std::uint32_t ranks);

  // One rank a member; waits until the memory of all is ready. Errors, with nothing kept: kInvalidArgument
  // (the text says which option), kNotSupported (two devices reach no common memory: fall back to another
  // transport), kOutOfBudget, kOutOfMemory, kDeviceLost.
  [[nodiscard]] static Result<std::unique_ptr<RingBuffers>> create(std::span<const Member> members,
                                                                   const RingOptions& options);
  ~RingBuffers();  // waits for the work of all ranks

  [[nodiscard]] std::uint32_t ranks() const { return static_cast<std::uint32_t>(ranks_.size()); }
  [[nodiscard]] RingRank& rank(std::uint32_t rank) { return *ranks_.at(rank); }

 private:
  RingBuffers() = default;
  [[nodiscard]] Status reserve(std::span<const Member> members, const RingOptions& options);
  std::vector<std::unique_ptr<RingRank>> ranks_;
};

}  // namespace terrace
