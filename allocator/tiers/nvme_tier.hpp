// A file on a local drive as a tier: behind pinned bounce buffers, past the page cache, every piece
// checksummed.
//
// The checksums are kept in memory, so a piece that reaches the drive in part, late or not at all is found by
// the load: never wrong bytes. The file lives as long as the tier (docs/design/0008-tiers.md).
#pragma once

#include <filesystem>
#include <memory>

#include "allocator/ddr_pool.hpp"
#include "allocator/tier.hpp"
#include "allocator/tiers/io_engine.hpp"
#include "runtime/copy_engine.hpp"

namespace terrace {

class NvmeTier final : public Tier {
 public:
  struct Options {
    std::filesystem::path folder;  // exists, on the drive to be used
    Bytes size;                    // of the file, set aside at once: the budget, never exceeded
    Bytes piece = 4_MiB;           // of a read or write; a multiple of 4 KiB, at most 1 GiB
    unsigned pieces = 8;  // bounce buffers, 2 to 1024: so many reads and writes are in flight at most
    IoChoice io = IoChoice::kAuto;
  };
  // All three outlive the tier. Takes piece x pieces, and 4 KiB, from `pool`. Errors: those of
  // NvmeFile::create and DdrPool::allocate, kInvalidArgument (a piece or their number is out of range), what
  // the device said.
  [[nodiscard]] static Result<std::unique_ptr<NvmeTier>> create(Device& device, DdrPool& pool,
                                                                CopyEngine& copies, const Options& options);
  ~NvmeTier() override;
  // The rates are measured: bytes of transfers that have ended by the time that took.
  [[nodiscard]] TierInfo info() const override;
  [[nodiscard]] Result<TierBlock> allocate(Bytes size, Pool pool) override;
  [[nodiscard]] Status free(const TierBlock& block) override;
  [[nodiscard]] Result<TierTicket> store(const TierBlock& block, const std::byte* from, Event after) override;
  [[nodiscard]] Result<TierTicket> load(Address to, const TierBlock& block, Event after) override;
  [[nodiscard]] PoolUsage usage() const override;

 private:
  struct Impl;
  explicit NvmeTier(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
