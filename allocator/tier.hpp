// A place behind HBM where bytes can wait: one interface over pinned host memory, another device's HBM, a
// file.
//
// A block of a tier is empty until a store has ended well; a load brings what the last one left. One transfer
// of a block runs at a time. A store that fails leaves the block empty and the HBM copy the truth; a load
// that fails leaves the bytes at its target undefined, and the block as it was. Either way the block can be
// freed.
//
// Every method may be called from any thread. Errors are values. A block that is not of this tier, or was
// freed, is one (kInvalidArgument), and no byte moves; a store that the device refused fails as above.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "allocator/block.hpp"
#include "allocator/pool_usage.hpp"
#include "runtime/device.hpp"

namespace terrace {

struct TierInfo {
  TierId id = TierId::kDdr;
  std::string how;                    // "io_uring, O_DIRECT": for a person
  double store_bytes_per_second = 0;  // HBM to the tier, the other direction idle; 0: not known (yet)
  double load_bytes_per_second = 0;
  Bytes granularity;                // sizes are rounded up to it
  bool needs_pinning = false;       // pinned host memory is held for it, or passed through
  bool device_addressable = false;  // kernels of the device may use a block in place, at its address
  bool stream_ordered = false;      // a stream can wait for a transfer without the host: TierTicket::wait_on
};

struct TierBlock {
  std::uint64_t id = 0;  // unique within its tier for ever; 0: no block
  Bytes size;            // as asked for
  Pool pool = Pool::kScratch;
  Address address = nullptr;  // where the bytes are, on a tier that is device_addressable; else null
  bool operator==(const TierBlock&) const = default;
};

// What a tier knows of a transfer. Implemented by each tier, and safe from any thread.
class TierTransfer {
 public:
  virtual ~TierTransfer() = default;
  [[nodiscard]] virtual bool done() const = 0;
  [[nodiscard]] virtual Status synchronize() = 0;
  [[nodiscard]] virtual Status wait_on(Stream stream) = 0;
};

// A completion mark. A ticket let go changes nothing: the transfer goes on. All are gone before their tier.
class TierTicket {
 public:
  TierTicket() = default;
  explicit TierTicket(std::shared_ptr<TierTransfer> transfer) : transfer_(std::move(transfer)) {}
  TierTicket(TierTicket&&) noexcept = default;
  TierTicket& operator=(TierTicket&&) noexcept = default;

  // Precondition of the others: valid().
  [[nodiscard]] bool valid() const { return transfer_ != nullptr; }
  [[nodiscard]] bool done() const { return transfer_->done(); }
  // The host waits, and learns how it ended. Errors: kIo (the file refused, or gave back other bytes than
  // were stored: a torn or stale write), what the device said.
  [[nodiscard]] Status synchronize() const { return transfer_->synchronize(); }
  // What is queued on `stream` (of the tier's device) from now on comes after the transfer. On a tier that is
  // not stream_ordered the host waits here, and errors are those of synchronize().
  [[nodiscard]] Status wait_on(Stream stream) const { return transfer_->wait_on(stream); }

 private:
  std::shared_ptr<TierTransfer> transfer_;
};

class Tier {
 public:
  virtual ~Tier() = default;  // every block freed before
  [[nodiscard]] virtual TierInfo info() const = 0;

  // Errors: kOutOfBudget, kOutOfMemory (what is behind the tier refused), kInvalidArgument (no bytes).
  [[nodiscard]] virtual Result<TierBlock> allocate(Bytes size, Pool pool) = 0;
  // Errors: kInvalidArgument (no such block; a transfer of it is in flight). In-place use has ended before.
  [[nodiscard]] virtual Status free(const TierBlock& block) = 0;

  // Copies block.size bytes once `after` has completed on the device; Event{}: at once. `after` may be
  // recorded anew as soon as the call returns. The HBM range stays as it is until the ticket is done.
  // Errors of both: kInvalidArgument (no such block; a transfer of it is in flight; a load of an empty one),
  // what the device said.
  [[nodiscard]] virtual Result<TierTicket> store(const TierBlock& block, const std::byte* from,
                                                 Event after) = 0;
  [[nodiscard]] virtual Result<TierTicket> load(Address to, const TierBlock& block, Event after) = 0;

  [[nodiscard]] virtual PoolUsage usage() const = 0;
};

}  // namespace terrace
