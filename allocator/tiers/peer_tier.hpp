// HBM of a neighbour as a tier: memory created on another device, reached over the link between the two.
//
// Memory comes in slabs, created and mapped on the peer with access granted to this device, and is kept for
// reuse; a slab that is wholly free goes back to the peer when the budget is needed for one of another size.
// Copies run on two streams of this device, one each way, so that both directions run at once and neither
// waits behind the host link's.
#pragma once

#include <memory>

#include "allocator/tier.hpp"

namespace terrace {

class PeerTier final : public Tier {
 public:
  struct Options {
    Bytes budget;         // of the peer's HBM, rounding included; never exceeded
    Bytes slab = 64_MiB;  // least bytes created at a time
  };
  // `device` is whose HBM overflows, `peer` whose HBM takes it. Both outlive the tier, and `device` whatever
  // is mapped on `peer`. Errors: kNotSupported (no path between the two), kInvalidArgument (one device).
  [[nodiscard]] static Result<std::unique_ptr<PeerTier>> create(Device& device, Device& peer,
                                                                Options options);
  ~PeerTier() override;
  [[nodiscard]] TierInfo info() const override;
  [[nodiscard]] Result<TierBlock> allocate(Bytes size, Pool pool) override;
  [[nodiscard]] Status free(const TierBlock& block) override;
  [[nodiscard]] Result<TierTicket> store(const TierBlock& block, const std::byte* from, Event after) override;
  [[nodiscard]] Result<TierTicket> load(Address to, const TierBlock& block, Event after) override;
  [[nodiscard]] PoolUsage usage() const override;

 private:
  struct Impl;
  explicit PeerTier(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
