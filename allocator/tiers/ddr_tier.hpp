// Pinned host memory as a tier: blocks of a DdrPool, moved by a CopyEngine. Both may serve others too.
#pragma once

#include <mutex>

#include "allocator/block.hpp"
#include "allocator/ddr_pool.hpp"
#include "allocator/tier.hpp"
#include "allocator/tiers/tier_ledger.hpp"
#include "runtime/copy_engine.hpp"

namespace terrace {

class DdrTier final : public Tier {
 public:
  // All three outlive the tier; the pool and the engine are of this device.
  DdrTier(Device& device, DdrPool& pool, CopyEngine& copies);
  ~DdrTier() override;
  [[nodiscard]] TierInfo info() const override;
  [[nodiscard]] Result<TierBlock> allocate(Bytes size, Pool pool) override;
  [[nodiscard]] Status free(const TierBlock& block) override;
  [[nodiscard]] Result<TierTicket> store(const TierBlock& block, const std::byte* from, Event after) override;
  [[nodiscard]] Result<TierTicket> load(Address to, const TierBlock& block, Event after) override;
  // The whole pool's: its other users' blocks are counted too.
  [[nodiscard]] PoolUsage usage() const override;

 private:
  Device& device_;
  DdrPool& pool_;
  CopyEngine& copies_;
  std::mutex mutex_;
  TierLedger<Block> ledger_{TierId::kDdr};
};

}  // namespace terrace
