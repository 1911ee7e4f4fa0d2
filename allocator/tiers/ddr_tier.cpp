#include "allocator/tiers/ddr_tier.hpp"

#include <utility>

#include "runtime/assert.hpp"

namespace terrace {
namespace {

class DdrTransfer final : public TierTransfer {
 public:
  explicit DdrTransfer(CopyEngine::Ticket copy) : copy_(std::move(copy)) {}
  [[nodiscard]] bool done() const override { return copy_.done(); }
  [[nodiscard]] Status synchronize() override { return copy_.synchronize(); }
  [[nodiscard]] Status wait_on(Stream stream) override { return copy_.order_before(stream); }

 private:
  const CopyEngine::Ticket copy_;
};

}  // namespace

DdrTier::DdrTier(Device& device, DdrPool& pool, CopyEngine& copies)
    : device_(device), pool_(pool), copies_(copies) {}

DdrTier::~DdrTier() { TERRACE_CHECK(ledger_.count() == 0, "every block is freed before its tier"); }

TierInfo DdrTier::info() const {
  return {.id = TierId::kDdr,
          .how = "pinned host memory",
          .store_bytes_per_second = device_.info().d2h_bytes_per_second,
          .load_bytes_per_second = device_.info().h2d_bytes_per_second,
          .granularity = 1_B,
          .needs_pinning = true,
          .device_addressable = true,  // pinned memory has one address for host and device
          .stream_ordered = true};
}

Result<TierBlock> DdrTier::allocate(Bytes size, Pool pool) {
  if (size == 0_B) return Error{.code = Errc::kInvalidArgument, .text = "ddr tier: a block of no bytes"};
  auto block = pool_.allocate(size, pool);
  if (!block) return std::move(block).error();
  const std::lock_guard lock(mutex_);
  return ledger_.insert(size, pool, block->address, *block);
}

Status DdrTier::free(const TierBlock& block) {
  const std::lock_guard lock(mutex_);
  auto placed = ledger_.remove(block);
  if (!placed) return std::move(placed).error();
  return pool_.free(*placed);
}

Result<TierTicket> DdrTier::store(const TierBlock& block, const std::byte* from, Event after) {
  const std::lock_guard lock(mutex_);
  auto placed = ledger_.begin_store(block);
  if (!placed) return std::move(placed).error();
  const Transfer piece{(*placed)->address, from, (*placed)->size};
  auto copy = copies_.submit({.direction = Direction::kD2H,
                              .after = after,
                              .reason = CopyReason::kSpill,
                              .priority = CopyPriority::kBackground},
                             {&piece, 1});
  if (!copy) {
    ledger_.emptied(block);
    return std::move(copy).error();
  }
  auto transfer = std::make_shared<DdrTransfer>(std::move(copy).value());
  ledger_.storing(block, transfer);
  return TierTicket(std::move(transfer));
}

Result<TierTicket> DdrTier::load(Address to, const TierBlock& block, Event after) {
  const std::lock_guard lock(mutex_);
  auto placed = ledger_.begin_load(block);
  if (!placed) return std::move(placed).error();
  const Transfer piece{to, (*placed)->address, (*placed)->size};
  auto copy = copies_.submit({.direction = Direction::kH2D, .after = after, .reason = CopyReason::kRestore},
                             {&piece, 1});
  if (!copy) return std::move(copy).error();
  auto transfer = std::make_shared<DdrTransfer>(std::move(copy).value());
  ledger_.loading(block, transfer);
  return TierTicket(std::move(transfer));
}

PoolUsage DdrTier::usage() const { return pool_.usage(); }

}  // namespace terrace
