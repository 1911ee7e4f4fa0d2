#include "allocator/tiers/nvme_tier.hpp"

#include <mutex>
#include <string>
#include <utility>

#include "allocator/extent_map.hpp"

#include "allocator/tiers/nvme_file.hpp"
#include "allocator/tiers/nvme_mover.hpp"
#include "allocator/tiers/nvme_transfer.hpp"
#include "allocator/tiers/tier_ledger.hpp"
#include "runtime/assert.hpp"
#include "runtime/copy_events.hpp"

namespace terrace {
namespace {

struct Placement {
  std::uint64_t offset = 0;
  Bytes span;
  std::shared_ptr<StoredBytes> stored = nullptr;  // by the last store; the ledger knows whether it ended well
};

Status check(const NvmeTier::Options& options) {
  constexpr Bytes kMostPiece = 1_GiB;
  constexpr unsigned kMostPieces = 1024;
  const bool piece_fits = options.piece > 0_B && options.piece <= kMostPiece &&
                          options.piece == round_up(options.piece, kFileAlignment);
  if (piece_fits && options.pieces >= 2 && options.pieces <= kMostPieces) return {};
  return Error{.code = Errc::kInvalidArgument,
               .text = "nvme tier: " + std::to_string(options.pieces) + " pieces of " +
                       std::to_string(options.piece.count()) +
                       " bytes: use 2 to 1024 pieces of a multiple of 4096 bytes, at most 1 GiB"};
}

}  // namespace

struct NvmeTier::Impl {
  Impl(Device& d, NvmeFile f, const Options& o) : device(d), options(o), events(d), file(std::move(f)) {
    usage.budget = file.size();
    usage.set_mapped(file.size());
    free.insert({0, file.size(), 0});
  }
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  // An event of the tier's own that completes with `after`, which the caller may then record anew; null
  // where there is nothing to wait for.
  [[nodiscard]] Result<EventPool::Held> hold(Stream gate, Event after);

  Device& device;
  const Options options;
  EventPool events;
  const NvmeFile file;
  // Streams that only wait and record: one for stores and one for loads, so that a load does not wait for
  // what a store comes after.
  Stream store_gate;
  Stream load_gate;
  mutable std::mutex mutex;  // what follows, and the order of operations on the two streams
  ExtentMap free;
  TierLedger<Placement> ledger{TierId::kNvme};
  std::uint64_t last_generation = 0;
  PoolUsage usage;
  std::unique_ptr<NvmeMover> mover;
};

NvmeTier::Impl::~Impl() {
  TERRACE_CHECK(ledger.count() == 0, "every block is freed before its tier");
  mover.reset();
  for (const Stream gate : {store_gate, load_gate}) {
    if (gate != Stream{}) device.destroy_stream(gate);
  }
}

Result<EventPool::Held> NvmeTier::Impl::hold(Stream gate, Event after) {
  if (after == Event{}) return EventPool::Held();
  if (device.completed(after)) {
    if (Status how = device.synchronize(after); !how) return how.error();
    return EventPool::Held();
  }
  auto held = events.take();
  if (!held) return held;
  if (Status waits = device.wait(gate, after); !waits) return waits.error();
  if (Status recorded = device.record(gate, **held); !recorded) return recorded.error();
  return held;
}

Result<std::unique_ptr<NvmeTier>> NvmeTier::create(Device& device, DdrPool& pool, CopyEngine& copies,
                                                   const Options& options) {
  if (Status checked = check(options); !checked) return checked.error();
  auto file = NvmeFile::create({.folder = options.folder, .size = options.size});
  if (!file) return std::move(file).error();
  auto impl = std::make_unique<Impl>(device, std::move(file).value(), options);
  for (Stream* gate : {&impl->store_gate, &impl->load_gate}) {
    const auto made = device.create_stream(StreamPriority::kNormal);
    if (!made) return made.error();
    *gate = *made;
  }
  auto mover = NvmeMover::create({device, pool, copies, impl->file},
                                 {.piece = options.piece, .pieces = options.pieces, .io = options.io});
  if (!mover) return std::move(mover).error();
  impl->mover = std::move(mover).value();
  return std::unique_ptr<NvmeTier>(new NvmeTier(std::move(impl)));
}

NvmeTier::NvmeTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

NvmeTier::~NvmeTier() = default;

TierInfo NvmeTier::info() const {
  return {.id = TierId::kNvme,
          .how = std::string(impl_->mover->engine_name()) +
                 (impl_->file.direct() ? ", O_DIRECT" : ", through the page cache") + ", in " +
                 impl_->options.folder.string(),
          .store_bytes_per_second = impl_->mover->bytes_per_second(NvmeTransfer::Kind::kStore),
          .load_bytes_per_second = impl_->mover->bytes_per_second(NvmeTransfer::Kind::kLoad),
          .granularity = kFileAlignment,
          .needs_pinning = true,
          .device_addressable = false,
          .stream_ordered = false};
}

Result<TierBlock> NvmeTier::allocate(Bytes size, Pool pool) {
  if (size == 0_B) return Error{.code = Errc::kInvalidArgument, .text = "nvme tier: a block of no bytes"};
  const std::lock_guard lock(impl_->mutex);
  // Before rounding, which could not hold an absurd size.
  const Bytes span = size > impl_->file.size() ? size : round_up(size, kFileAlignment);
  const auto fit = impl_->free.best_fit(span);
  if (!fit) {
    return out_of_budget(span, pool,
                         format_bytes(size) + " on nvme for " + name_of(pool) +
                             " do not fit: " + format_bytes(impl_->usage.live) + " of the budget of " +
                             format_bytes(impl_->usage.budget) + " are in use");
  }
  impl_->free.take(fit->offset, span);
  impl_->usage.add(pool, span);
  return impl_->ledger.insert(size, pool, nullptr, {.offset = fit->offset, .span = span});
}

Status NvmeTier::free(const TierBlock& block) {
  const std::lock_guard lock(impl_->mutex);
  const auto placed = impl_->ledger.remove(block);
  if (!placed) return placed.error();
  impl_->free.insert({placed->offset, placed->span, 0});
  impl_->usage.remove(block.pool, placed->span);
  return {};
}

Result<TierTicket> NvmeTier::store(const TierBlock& block, const std::byte* from, Event after) {
  const std::lock_guard lock(impl_->mutex);
  const auto placed = impl_->ledger.begin_store(block);
  if (!placed) return placed.error();
  const auto held = impl_->hold(impl_->store_gate, after);
  if (!held) {
    impl_->ledger.emptied(block);
    return held.error();
  }
  auto stored = std::make_shared<StoredBytes>();
  stored->generation = ++impl_->last_generation;
  stored->checksums.resize(round_up(block.size, impl_->options.piece) / impl_->options.piece);
  (*placed)->stored = stored;
  auto transfer = std::make_shared<NvmeTransfer>(NvmeTransfer::Request{.kind = NvmeTransfer::Kind::kStore,
                                                                       .block = block.id,
                                                                       .size = block.size,
                                                                       .offset = (*placed)->offset,
                                                                       .from = from,
                                                                       .stored = std::move(stored)});
  impl_->ledger.storing(block, transfer);
  impl_->mover->submit(transfer, *held);
  return TierTicket(std::move(transfer));
}

Result<TierTicket> NvmeTier::load(Address to, const TierBlock& block, Event after) {
  const std::lock_guard lock(impl_->mutex);
  const auto placed = impl_->ledger.begin_load(block);
  if (!placed) return placed.error();
  const auto held = impl_->hold(impl_->load_gate, after);
  if (!held) return held.error();
  auto transfer = std::make_shared<NvmeTransfer>(NvmeTransfer::Request{.kind = NvmeTransfer::Kind::kLoad,
                                                                       .block = block.id,
                                                                       .size = block.size,
                                                                       .offset = (*placed)->offset,
                                                                       .to = to,
                                                                       .stored = (*placed)->stored});
  impl_->ledger.loading(block, transfer);
  impl_->mover->submit(transfer, *held);
  return TierTicket(std::move(transfer));
}

PoolUsage NvmeTier::usage() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->usage;
}

}  // namespace terrace
