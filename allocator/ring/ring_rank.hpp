// One rank's end of the ring buffers: its memory, and the exchanges it queues.
//
// Calls of one rank come from one thread at a time and in the same order on every rank; different ranks may
// call at the same time. Their work must be ordered: one stream, or streams that wait for each other. The
// host waits for nothing. No call here allocates: everything was reserved when the ring was made.
//
// Exchanges are announced as collectives, to which background copies give way.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/hbm_pool.hpp"
#include "allocator/ring/ring_protocol.hpp"
#include "runtime/clock.hpp"
#include "runtime/collectives.hpp"
#include "runtime/device.hpp"
#include "runtime/ring_exchange.hpp"

namespace terrace {

struct RingOptions {
  std::uint32_t slots = 8;                // of each channel, a power of two, 2 at least: exchanges in flight
  Bytes slot_bytes = Bytes(64ULL << 20);  // the most that one rank ever has for another
  Nanoseconds timeout = std::chrono::seconds(10);  // of every wait on the device
  RingShape shape{};                               // all zero: chosen from the device
};

// What a rank sends: its parts for rank 0, 1, ... next to each other, and how many bytes each has.
struct RingParts {
  const std::byte* data = nullptr;
  Bytes size;                             // of the buffer; nothing beyond it is read
  const std::uint64_t* counts = nullptr;  // device memory, one a rank: the host never learns them
};
// Where a rank receives: the parts of rank 0, 1, ... next to each other, as long as they came.
struct RingRoom {
  Address data = nullptr;
  Bytes size;                       // nothing beyond it is written
  std::uint64_t* counts = nullptr;  // device memory, one a rank, written by the exchange; null: not wanted
};

enum class RingPath : std::uint8_t {
  kFastest,      // kDirect where all ranks have registered buffers for it, kSlots where not
  kSlots,        // by the kernel, through the slots
  kDirect,       // by the kernel, straight into the receive buffers: the fastest at every size
  kCopyEngines,  // straight into the receive buffers, slower, and no processor is busy
};

// An exchange of parts that all have one size, which the host knows: what ncclAlltoAll does.
struct RingEqualParts {
  const std::byte* send = nullptr;  // ranks * each
  Address receive = nullptr;        // ranks * each
  Bytes each;
  RingPath path = RingPath::kFastest;
};

// An exchange in place: its parts lie in their slots until it is released.
struct RingTicket {
  std::uint64_t sequence = 0;
};

class RingBuffers;

class RingRank {
 public:
  ~RingRank();
  RingRank(const RingRank&) = delete;
  RingRank& operator=(const RingRank&) = delete;

  // Sends the parts, and copies what arrives into the room while it arrives. A part that is larger than a
  // slot, or runs past a buffer, is cut, and check() on both sides says so. Errors: kInvalidArgument (an
  // exchange in place is not released), kTimeout (the ring has stopped), kDeviceLost.
  [[nodiscard]] Status exchange(Stream stream, const RingParts& parts, const RingRoom& room);
  // Sends the parts and leaves what arrives in the slots: nothing is copied, and the rank's own part stays
  // where it is. `counts` as in RingRoom. Errors: as above; kInvalidArgument where all slots are held.
  [[nodiscard]] Result<RingTicket> exchange_in_place(Stream stream, const RingParts& parts,
                                                     std::uint64_t* counts);
  // Where the part of `sender`, another rank, lies once the exchange has passed on its stream.
  [[nodiscard]] const std::byte* part(RingTicket ticket, std::uint32_t sender) const;
  // Gives the slots back once `stream` has passed this point; in the order of the exchanges.
  // Errors: kInvalidArgument (not the oldest), kTimeout, kDeviceLost.
  [[nodiscard]] Status release(Stream stream, RingTicket ticket);

  // Names the buffer that peers may write into: on this rank's device, mapped for its peers as device memory
  // is. On every rank, before any rank queues an exchange of equal parts: the path depends on all of them.
  void register_receive(Address data, Bytes size);
  // Every rank gives the same size and path, and each receives into its registered buffer, or none does;
  // ranks that go through slots and ranks that go straight wait in vain, and check() says that they differ.
  // By copy engines what is queued behind an opening that timed out still runs: after a time-out, parts of a
  // peer's registered buffer may be written, at any time until this rank's stream has come to rest. Errors:
  // as exchange(); kInvalidArgument (a part is larger than a slot and may not go another way; a receive
  // buffer is not registered). A copy or launch that cannot be queued after others were ends the ring, and
  // the call returns once those have run.
  [[nodiscard]] Status exchange_equal(Stream stream, const RingEqualParts& parts);

  // What the device has found so far; a look at host memory. After a time-out always that: the ring has
  // stopped, and what its buffers hold means nothing. An overflow once each; ask when the exchange has
  // completed. Errors: kTimeout, kInvalidArgument (overflow); the texts name ranks, slot and epoch.
  [[nodiscard]] Status check();

  [[nodiscard]] std::uint32_t rank() const { return rank_; }
  [[nodiscard]] std::uint64_t exchanges() const { return window_.next(); }
  [[nodiscard]] Address memory() const { return block_->address; }  // for registration elsewhere
  [[nodiscard]] Bytes memory_size() const { return Bytes(ring_memory_bytes(layout_)); }
  [[nodiscard]] const RingShape& shape() const { return shape_; }

 private:
  friend class RingBuffers;
  struct FreePages {
    void operator()(void* pages) const;
  };
  struct Direct {  // registered receive buffers, by rank; shared by all ranks
    std::array<std::atomic<Address>, kRingMostRanks> data{};
    std::array<std::atomic<std::uint64_t>, kRingMostRanks> size{};
  };

  RingRank(Device& device, HbmPool& pool, const RingOptions& options, std::uint32_t rank,
           const RingLayout& layout);
  [[nodiscard]] Status reserve(Stream stream);  // all it will ever hold
  [[nodiscard]] Status choose_shape();
  void finish();  // waits for its streams
  void note(Stream stream);
  [[nodiscard]] std::uint64_t peers() const { return layout_.ranks - 1; }
  // The window's moves, counted.
  void pass();
  void hold();
  void give_back();
  [[nodiscard]] Status usable() const;
  [[nodiscard]] RingExchange prepare(RingStep step) const;
  [[nodiscard]] Status queue(Stream stream, const RingExchange& exchange);
  [[nodiscard]] bool direct_possible(const RingEqualParts& parts) const;
  [[nodiscard]] Status exchange_slots(Stream stream, const RingEqualParts& parts);
  [[nodiscard]] Status exchange_direct(Stream stream, const RingEqualParts& parts);
  [[nodiscard]] Status exchange_by_engines(Stream stream, const RingEqualParts& parts);
  [[nodiscard]] Status copy_parts(Stream stream, const RingEqualParts& parts);
  [[nodiscard]] std::optional<Error> take_overflow(std::uint32_t peer);

  Device& device_;
  HbmPool& pool_;
  const RingOptions options_;
  const std::uint32_t rank_;
  const RingLayout layout_;
  RingShape shape_;
  RingWindow window_;
  std::array<std::byte*, kRingMostRanks> base_{};  // every rank's memory
  std::shared_ptr<Direct> direct_;
  std::optional<Block> block_;
  std::unique_ptr<RingReport, FreePages> report_;
  bool pinned_ = false;
  std::optional<Stream> side_;  // the rank's own part, beside what goes to peers
  std::optional<Event> forked_;
  std::optional<Event> joined_;
  std::vector<Stream> streams_;  // that have been used
  Collectives collectives_;
  Status failed_;  // a step that could not be queued: the ranks no longer agree
  std::array<std::uint64_t, kRingMostRanks> told_sent_{};
  std::array<std::uint64_t, kRingMostRanks> told_received_{};
};

}  // namespace terrace
