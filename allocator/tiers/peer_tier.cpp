#include "allocator/tiers/peer_tier.hpp"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "allocator/extent_map.hpp"

#include "allocator/tiers/tier_ledger.hpp"
#include "runtime/assert.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/copy_events.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

// What copy engines move at full speed, and keeps every block aligned for whatever kernels do in place.
constexpr Bytes kGranularity = 512_B;

struct Slab {
  Address base = nullptr;
  Physical physical;
  Bytes size;
  ExtentMap free;
};

struct Placement {
  Slab* slab = nullptr;
  std::uint64_t offset = 0;
  Bytes span;
};

class PeerTransfer final : public TierTransfer {
 public:
  PeerTransfer(Device& device, CopyReason reason, EventPool::Held started, EventPool::Held finished)
      : device_(device), reason_(reason), started_(std::move(started)), finished_(std::move(finished)) {}
  ~PeerTransfer() override {
    if (done()) {
      if (const auto spent = device_.seconds_between(*started_, *finished_)) {
        metrics().add<Metric::kTransferSeconds>(Direction::kPeer, reason_, *spent);
      }
    }
  }
  PeerTransfer(const PeerTransfer&) = delete;
  PeerTransfer& operator=(const PeerTransfer&) = delete;
  [[nodiscard]] bool done() const override { return device_.completed(*finished_); }
  [[nodiscard]] Status synchronize() override { return device_.synchronize(*finished_); }
  [[nodiscard]] Status wait_on(Stream stream) override { return device_.wait(stream, *finished_); }

 private:
  Device& device_;
  const CopyReason reason_;
  const EventPool::Held started_;
  const EventPool::Held finished_;
};

}  // namespace

struct PeerTier::Impl {
  Impl(Device& d, Device& p, Options o) : device(d), peer(p), options(o), events(d) {
    usage.budget = o.budget;
  }
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  [[nodiscard]] Result<Slab*> slab_for(Bytes span, Pool pool);
  [[nodiscard]] Slab* best_slab(Bytes span) const;
  void release_free_slabs(Bytes needed);
  [[nodiscard]] Result<Slab*> create_slab(Bytes size);
  [[nodiscard]] bool destroy_slab(const Slab& slab);
  [[nodiscard]] Result<std::shared_ptr<TierTransfer>> copy(CopyReason reason, const Transfer& piece,
                                                           Event after);
  [[nodiscard]] Status queue(Stream stream, const Transfer& piece, Event after, Event started,
                             Event finished);

  Device& device;
  Device& peer;
  const Options options;
  Stream storing;
  Stream loading;
  EventPool events;
  mutable std::mutex mutex;  // what follows, and the order of operations on the two streams
  std::vector<std::unique_ptr<Slab>> slabs;
  TierLedger<Placement> ledger{TierId::kPeer};
  PoolUsage usage;
};

PeerTier::Impl::~Impl() {
  TERRACE_CHECK(ledger.count() == 0, "every block is freed before its tier");
  for (const Stream stream : {storing, loading}) {
    if (stream != Stream{}) device.destroy_stream(stream);
  }
  // A call that fails may succeed when asked again; twice, and the device is lost with all its memory.
  for (const auto& slab : slabs) (void)(destroy_slab(*slab) || destroy_slab(*slab));
}

Slab* PeerTier::Impl::best_slab(Bytes span) const {
  Slab* best = nullptr;
  Bytes best_size;
  for (const auto& slab : slabs) {
    const auto fit = slab->free.best_fit(span);
    if (!fit || (best != nullptr && fit->size >= best_size)) continue;
    best = slab.get();
    best_size = fit->size;
  }
  return best;
}

void PeerTier::Impl::release_free_slabs(Bytes needed) {
  for (auto it = slabs.begin(); it != slabs.end() && usage.budget - usage.mapped < needed;) {
    const Slab& slab = **it;
    if (slab.free.total() == slab.size && destroy_slab(slab)) {
      usage.set_mapped(usage.mapped - slab.size);
      it = slabs.erase(it);
    } else {
      ++it;
    }
  }
}

Result<Slab*> PeerTier::Impl::slab_for(Bytes span, Pool pool) {
  if (Slab* slab = best_slab(span)) return slab;
  const Bytes least = round_up(span, peer.info().granularity);
  release_free_slabs(least);
  const Bytes room = round_down(usage.budget - usage.mapped, peer.info().granularity);
  if (room < least) {
    return out_of_budget(span, pool,
                         format_bytes(span) + " of a peer's HBM for " + name_of(pool) +
                             " do not fit: " + format_bytes(usage.live) + " of the budget of " +
                             format_bytes(usage.budget) + " are in use");
  }
  const Bytes ahead = std::min(room, std::max(least, round_up(options.slab, peer.info().granularity)));
  auto slab = create_slab(ahead);
  if (slab || ahead == least || slab.error().code != Errc::kOutOfMemory) return slab;
  return create_slab(least);  // others hold the rest of the peer's memory
}

Result<Slab*> PeerTier::Impl::create_slab(Bytes size) {
  auto base = peer.reserve(size);
  if (!base) return std::move(base).error();
  auto physical = peer.create_physical(size);
  if (!physical) {
    peer.release(*base, size);
    return std::move(physical).error();
  }
  if (Status mapped = peer.map(*base, *physical, size); !mapped) {
    peer.destroy_physical(*physical);
    peer.release(*base, size);
    return mapped.error();
  }
  auto slab = std::make_unique<Slab>(Slab{.base = *base, .physical = *physical, .size = size, .free = {}});
  slab->free.insert({0, size, 0});
  usage.set_mapped(usage.mapped + size);
  slabs.push_back(std::move(slab));
  return slabs.back().get();
}

bool PeerTier::Impl::destroy_slab(const Slab& slab) {
  if (!peer.unmap(slab.base, slab.size)) return false;
  peer.destroy_physical(slab.physical);
  peer.release(slab.base, slab.size);
  return true;
}

Status PeerTier::Impl::queue(Stream stream, const Transfer& piece, Event after, Event started,
                             Event finished) {
  if (after != Event{}) {
    if (Status waits = device.wait(stream, after); !waits) return waits;
  }
  if (Status recorded = device.record(stream, started); !recorded) return recorded;
  if (Status copied = device.copy(stream, Direction::kPeer, piece.to, piece.from, piece.size); !copied) {
    return copied;
  }
  return device.record(stream, finished);
}

Result<std::shared_ptr<TierTransfer>> PeerTier::Impl::copy(CopyReason reason, const Transfer& piece,
                                                           Event after) {
  auto started = events.take();
  if (!started) return std::move(started).error();
  auto finished = events.take();
  if (!finished) return std::move(finished).error();
  const Stream stream = reason == CopyReason::kSpill ? storing : loading;
  if (Status queued = queue(stream, piece, after, **started, **finished); !queued) {
    // The copy may be on its way into memory that the caller is about to reuse. What the wait reports adds
    // nothing to the error in hand.
    (void)device.synchronize(stream);
    return queued.error();
  }
  metrics().add<Metric::kTransfers>(Direction::kPeer, reason, 1);
  metrics().add<Metric::kTransferBytes>(Direction::kPeer, reason, piece.size);
  return std::shared_ptr<TierTransfer>(std::make_shared<PeerTransfer>(
      device, reason, std::move(started).value(), std::move(finished).value()));
}

Result<std::unique_ptr<PeerTier>> PeerTier::create(Device& device, Device& peer, Options options) {
  if (&device == &peer) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "peer tier: a device is no peer of its own; name another"};
  }
  if (Status granted = peer.grant_access_to(device); !granted) return granted.error();
  auto impl = std::make_unique<Impl>(device, peer, options);
  for (Stream* stream : {&impl->storing, &impl->loading}) {
    // High, as the copy engine's: a copy that waits behind compute in the queue misses its window.
    const auto made = device.create_stream(StreamPriority::kHigh);
    if (!made) return made.error();
    *stream = *made;
  }
  return std::unique_ptr<PeerTier>(new PeerTier(std::move(impl)));
}

PeerTier::PeerTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

PeerTier::~PeerTier() = default;

TierInfo PeerTier::info() const {
  return {.id = TierId::kPeer,
          .how = "HBM of " + impl_->peer.info().name + " " + std::to_string(impl_->peer.info().id.index),
          .store_bytes_per_second = 0,  // no device states its link to another
          .load_bytes_per_second = 0,
          .granularity = kGranularity,
          .needs_pinning = false,
          .device_addressable = true,
          .stream_ordered = true};
}

Result<TierBlock> PeerTier::allocate(Bytes size, Pool pool) {
  if (size == 0_B) return Error{.code = Errc::kInvalidArgument, .text = "peer tier: a block of no bytes"};
  const std::lock_guard lock(impl_->mutex);
  // Before rounding, which could not hold an absurd size.
  if (size > impl_->usage.budget) {
    return out_of_budget(size, pool,
                         format_bytes(size) + " are more than the whole budget of " +
                             format_bytes(impl_->usage.budget) + " of a peer's HBM");
  }
  const Bytes span = round_up(size, kGranularity);
  const auto slab = impl_->slab_for(span, pool);
  if (!slab) return slab.error();
  const auto fit = (*slab)->free.best_fit(span);
  TERRACE_CHECK(fit.has_value(), "the slab chosen has room");
  (*slab)->free.take(fit->offset, span);
  impl_->usage.add(pool, span);
  return impl_->ledger.insert(size, pool, (*slab)->base + fit->offset,
                              {.slab = *slab, .offset = fit->offset, .span = span});
}

Status PeerTier::free(const TierBlock& block) {
  const std::lock_guard lock(impl_->mutex);
  const auto placed = impl_->ledger.remove(block);
  if (!placed) return placed.error();
  placed->slab->free.insert({placed->offset, placed->span, 0});
  impl_->usage.remove(block.pool, placed->span);
  return {};
}

Result<TierTicket> PeerTier::store(const TierBlock& block, const std::byte* from, Event after) {
  const std::lock_guard lock(impl_->mutex);
  const auto placed = impl_->ledger.begin_store(block);
  if (!placed) return placed.error();
  const Address to = (*placed)->slab->base + (*placed)->offset;
  auto transfer = impl_->copy(CopyReason::kSpill, {to, from, block.size}, after);
  if (!transfer) {
    impl_->ledger.emptied(block);
    return std::move(transfer).error();
  }
  impl_->ledger.storing(block, *transfer);
  return TierTicket(std::move(transfer).value());
}

Result<TierTicket> PeerTier::load(Address to, const TierBlock& block, Event after) {
  const std::lock_guard lock(impl_->mutex);
  const auto placed = impl_->ledger.begin_load(block);
  if (!placed) return placed.error();
  const Address from = (*placed)->slab->base + (*placed)->offset;
  auto transfer = impl_->copy(CopyReason::kRestore, {to, from, block.size}, after);
  if (!transfer) return std::move(transfer).error();
  impl_->ledger.loading(block, *transfer);
  return TierTicket(std::move(transfer).value());
}

PoolUsage PeerTier::usage() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->usage;
}

}  // namespace terrace
