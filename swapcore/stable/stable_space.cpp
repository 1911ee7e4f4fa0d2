#include "swapcore/stable/stable_space.hpp"

#include <algorithm>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

constexpr int kTries = 4;  // of what a device does not refuse for long

Error no_block(const void* at) {
  return Error{.code = Errc::kInvalidArgument,
               .text = "no block of a stable address begins at " +
                       std::to_string(reinterpret_cast<std::uintptr_t>(at)) + "; use what allocate() gave"};
}

}  // namespace

StableSpace::StableSpace(Device& device, CopyEngine& copies, UserStreams& streams, const Options& options)
    : device_(device),
      copies_(copies),
      streams_(streams),
      span_(round_up(options.span, device.info().granularity)),
      batch_(options.batch),
      events_(device) {}

Result<std::unique_ptr<StableSpace>> StableSpace::create(Device& device, CopyEngine& copies,
                                                         UserStreams& streams, const Options& options) {
  const Capabilities& can = device.info().can;
  if (!can.remap || !can.host_physical) {
    return Error{.code = Errc::kNotSupported,
                 .text = device.info().kind +
                         " device: memory under an address cannot be exchanged here, so "
                         "blocks of stable addresses are never spilled"};
  }
  auto space = std::unique_ptr<StableSpace>(new StableSpace(device, copies, streams, options));
  if (Status opened = space->open(options); !opened.ok()) return opened.error();
  return space;
}

Status StableSpace::open(const Options& options) {
  auto backing = BackingStore::create(
      device_, {.hbm_budget = options.hbm_budget, .lease = options.lease, .nodes = options.nodes});
  if (!backing.ok()) return backing.error();
  backing_ = std::move(*backing);
  const Result<Address> base = device_.reserve(span_);
  if (!base.ok()) return base.error();
  base_ = *base;
  const Result<Stream> order = device_.create_stream(StreamPriority::kNormal);
  if (!order.ok()) return order.error();
  order_ = *order;
  table_ = std::make_unique<StableTable>(base_, span_, device_.info().granularity);
  free_addresses_.insert({.offset = 0, .size = span_});
  mover_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
  return {};
}

StableSpace::~StableSpace() {
  if (mover_.joinable()) {
    mover_.request_stop();
    mover_.join();
  }
  TERRACE_CHECK(blocks_.empty(), "blocks of a space are freed before it");
  everything_fences_.clear();
  if (order_ != Stream{}) device_.destroy_stream(order_);
  if (base_ != nullptr) device_.release(base_, span_);
}

// ---------------------------------------------------------------- blocks

Result<Address> StableSpace::take_addresses(Bytes size) {
  const std::lock_guard lock(mutex_);
  const std::optional<Extent> found = free_addresses_.best_fit(size);
  if (!found) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "no " + format_bytes(size) + " of addresses are left of " + format_bytes(span_),
                 .bytes = size};
  }
  (void)free_addresses_.take(found->offset, size);
  return base_ + found->offset;
}

void StableSpace::give_back_addresses(Address at, Bytes size) {
  const std::lock_guard lock(mutex_);
  free_addresses_.insert({.offset = static_cast<std::uint64_t>(at - base_), .size = size});
}

StableBlock& StableSpace::new_block() {
  if (idle_.empty()) return storage_.emplace_back();
  StableBlock* const block = idle_.back();
  idle_.pop_back();
  return *block;
}

Result<Address> StableSpace::allocate(Bytes size) {
  if (size == 0_B) return Error{.code = Errc::kInvalidArgument, .text = "a block of no bytes"};
  size = round_up(size, device_.info().granularity);
  Result<HbmHandle> hbm = backing_->take_hbm(size, BackingStore::Alias::kNone);
  while (!hbm.ok() && hbm.error().code == Errc::kOutOfBudget) {
    // What has been freed is about to give its memory back.
    std::unique_lock lock(mutex_);
    const std::uint64_t before = buried_;
    if (freed_ == before || paused()) return hbm.error();
    changed_.wait(lock, [&] { return buried_ != before || paused(); });
    if (buried_ == before) return hbm.error();
    lock.unlock();
    hbm = backing_->take_hbm(size, BackingStore::Alias::kNone);
  }
  if (!hbm.ok()) return hbm.error();
  const Result<Address> at = take_addresses(size);
  if (!at.ok()) {
    backing_->give_back(*hbm);
    return at;
  }
  if (Status mapped = device_.map(*at, hbm->physical, size); !mapped.ok()) {
    give_back_addresses(*at, size);
    backing_->give_back(*hbm);
    return mapped.error();
  }
  const std::lock_guard lock(mutex_);
  StableBlock& block = new_block();
  block.at = *at;
  block.size = size;
  block.hbm = *hbm;
  block.host = {};
  block.place.store(Place::kHbm, std::memory_order_relaxed);
  block.reachable.store(true, std::memory_order_relaxed);
  block.users.store(0, std::memory_order_relaxed);
  block.last_use.store(log_.now(), std::memory_order_relaxed);
  block.number.store(++made_, std::memory_order_relaxed);
  block.wanted = Place::kHbm;
  block.pins = block.burials = 0;
  block.queued = block.moving = block.showing = block.freed = block.held = false;
  block.last_move = {};
  counters_.live += size;
  counters_.live_peak = std::max(counters_.live_peak, counters_.live);
  blocks_.emplace(*at, &block);
  table_->set(*at, size, &block);
  block.gate.open();
  return *at;
}

StableBlock* StableSpace::block_at(Address at) const {
  const auto found = blocks_.find(at);
  return found == blocks_.end() ? nullptr : found->second;
}

void StableSpace::enqueue(StableBlock& block) {
  if (block.queued) return;
  ++news_;
  block.queued = true;
  orders_.push_back(&block);
  changed_.notify_all();
}

Status StableSpace::free(Address at) {
  const std::lock_guard lock(mutex_);
  StableBlock* const block = block_at(at);
  if (block == nullptr) return no_block(at);
  blocks_.erase(at);
  table_->set(at, block->size, nullptr);
  block->freed = true;
  counters_.live -= block->size;
  ++freed_;
  enqueue(*block);
  changed_.notify_all();
  return {};
}

Status StableSpace::order(Address at, Place place) {
  const std::lock_guard lock(mutex_);
  StableBlock* const block = block_at(at);
  if (block == nullptr) return no_block(at);
  if ((block->pins > 0 && place != Place::kHbm) || block->held) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "a pinned block stays in HBM, and one that is held where it is; unpin it first"};
  }
  block->wanted = place;
  enqueue(*block);
  return {};
}

Status StableSpace::await(Address at) {
  std::unique_lock lock(mutex_);
  StableBlock* block = block_at(at);
  changed_.wait(lock, [&] {
    block = block_at(at);
    return block == nullptr || (!block->moving && (!block->queued || paused()));
  });
  if (block == nullptr) return no_block(at);
  if (block->queued)
    return Error{.code = Errc::kCancelled, .text = "nothing moves while the space is paused"};
  return block->last_move;
}

Status StableSpace::pin(Address at) {
  {
    const std::lock_guard lock(mutex_);
    StableBlock* const block = block_at(at);
    if (block == nullptr) return no_block(at);
    ++block->pins;
    block->wanted = Place::kHbm;
    if (block->place.load(std::memory_order_relaxed) == Place::kHbm && !block->moving) return {};
    enqueue(*block);
  }
  Status there = await(at);
  if (!there.ok()) (void)unpin(at);
  return there;
}

Status StableSpace::unpin(Address at) {
  const std::lock_guard lock(mutex_);
  StableBlock* const block = block_at(at);
  if (block == nullptr) return no_block(at);
  if (block->pins == 0) {
    return Error{.code = Errc::kInvalidArgument, .text = "unpinned more often than pinned"};
  }
  --block->pins;
  return {};
}

Status StableSpace::hold(Address at) {
  if (Status shown = reveal(at); !shown.ok()) return shown;
  const std::lock_guard lock(mutex_);
  StableBlock* const block = block_at(at);
  if (block == nullptr) return no_block(at);
  if (block->held) return {};
  if (block->moving)
    return Error{.code = Errc::kInvalidArgument, .text = "a block that moves cannot be held"};
  block->held = true;
  block->wanted = block->place.load(std::memory_order_relaxed);
  return {};
}

// Nobody can be using it, so no gate is shut: whoever enters it and finds it out of reach leaves again. The
// mover has no part in it, and must not take the block for one of its moves: orders and burials wait.
Status StableSpace::reveal(Address at) {
  StableBlock* block = nullptr;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      block = block_at(at);
      return block == nullptr || (!block->moving && !block->showing);
    });
    if (block == nullptr || block->reachable.load(std::memory_order_relaxed)) return {};
    block->showing = true;
  }
  Status mapped = device_.map(block->at, block->host.handle.physical, block->size);
  for (int tries = 1; !mapped.ok() && tries < kTries; ++tries) {
    mapped = device_.map(block->at, block->host.handle.physical, block->size);
  }
  const std::lock_guard lock(mutex_);
  if (mapped.ok()) {
    block->reachable.store(true, std::memory_order_release);
    ++counters_.shown;
  }
  block->showing = false;
  ++news_;
  changed_.notify_all();
  return mapped;
}

Status StableSpace::show(const void* pointer) {
  const std::optional<View> block = find(pointer);
  return block ? reveal(block->at) : Status();
}

// What began to leave before the order to keep everything in reach is waited for, and then mapped.
void StableSpace::keep_reachable() {
  if (all_reachable_.load(std::memory_order_acquire)) [[likely]]
    return;
  reach_.store(Reach::kAlways, std::memory_order_release);
  bool all = true;
  for (const View& block : blocks()) all = reveal(block.at).ok() && all;
  if (all) all_reachable_.store(true, std::memory_order_release);
}

bool StableSpace::pause(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  pauses_.fetch_add(1, std::memory_order_acq_rel);
  changed_.notify_all();
  return changed_.wait_for(lock, patience, [this] { return !busy_; });
}

void StableSpace::resume() {
  const std::lock_guard lock(mutex_);
  pauses_.fetch_sub(1, std::memory_order_acq_rel);
  ++news_;
  changed_.notify_all();
}

StableSpace::View StableSpace::view_of(const StableBlock& block) {
  return {.at = block.at,
          .number = block.number.load(std::memory_order_relaxed),
          .size = block.size,
          .place = block.place.load(std::memory_order_relaxed),
          .last_use = block.last_use.load(std::memory_order_relaxed),
          .pinned = block.pins > 0 || block.held,
          .moving = block.moving || block.queued,
          .leaving = (block.moving || block.queued) && block.wanted == Place::kDdr &&
                     block.place.load(std::memory_order_relaxed) == Place::kHbm,
          .coming = (block.moving || block.queued) && block.wanted == Place::kHbm &&
                    block.place.load(std::memory_order_relaxed) == Place::kDdr,
          .awaits_room = (block.moving || block.queued) && block.wanted == Place::kHbm &&
                         block.place.load(std::memory_order_relaxed) == Place::kDdr &&
                         !block.has_room.load(std::memory_order_relaxed)};
}

std::vector<StableSpace::View> StableSpace::blocks() const {
  const std::lock_guard lock(mutex_);
  std::vector<View> views;
  for (const auto& [at, block] : blocks_) views.push_back(view_of(*block));
  return views;
}

std::optional<StableSpace::View> StableSpace::find(const void* pointer) const {
  const std::lock_guard lock(mutex_);
  const StableBlock* const block = table_->find(pointer);
  if (block == nullptr) return std::nullopt;
  return view_of(*block);
}

StableSpace::Counters StableSpace::counters() const {
  Counters counters;
  {
    const std::lock_guard lock(mutex_);
    counters = counters_;
  }
  counters.waits = waits_.load(std::memory_order_relaxed);
  counters.wait_seconds = static_cast<double>(wait_nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
  counters.hbm_held = backing_->hbm_held();
  counters.hbm_peak = backing_->hbm_peak();
  counters.host_made = backing_->host_made();
  return counters;
}

void StableSpace::set_hbm_budget(Bytes budget) {
  backing_->set_hbm_budget(budget);
  const std::lock_guard lock(mutex_);
  ++news_;
  changed_.notify_all();
}

// ---------------------------------------------------------------- uses

void StableSpace::wait_at(UseGate& gate) {
  const Nanoseconds from = steady_clock().now();
  gate.await_open();
  const Nanoseconds spent = steady_clock().now() - from;
  metrics().add<Metric::kStallSeconds>(StallReason::kSpillBackpressure, spent);
  waits_.fetch_add(1, std::memory_order_relaxed);
  wait_nanoseconds_.fetch_add(static_cast<std::uint64_t>(spent.count()), std::memory_order_relaxed);
}

void StableSpace::Uses::leave_all() {
  for (StableBlock* const block : inside_) block->gate.leave();
  inside_.clear();
}

// Inside all of them, and null; or inside none, and the gate that is shut.
UseGate* StableSpace::Uses::enter_all(std::span<const void* const> pointers) {
  for (const void* const pointer : pointers) {
    StableBlock* block = space_.table_->find(pointer);
    while (block != nullptr && (inside_.empty() || inside_.back() != block)) {
      const bool entered = block->gate.try_enter();
      // Between the look and the gate it may have become another block, or none.
      StableBlock* const now = space_.table_->find(pointer);
      if (entered && now == block) {
        inside_.push_back(block);
        break;
      }
      if (entered) block->gate.leave();
      if (!entered && now == block) {
        leave_all();
        return &block->gate;
      }
      block = now;
    }
  }
  return nullptr;
}

void StableSpace::Uses::note(StreamSlot slot) {
  std::uint64_t turn = space_.log_.reserve(inside_.size());
  for (StableBlock* const block : inside_) {
    if ((block->users.load(std::memory_order_relaxed) & slot.bit()) == 0) {
      block->users.fetch_or(slot.bit(), std::memory_order_relaxed);
    }
    block->last_use.store(turn, std::memory_order_relaxed);
    space_.log_.write(turn++, block->number.load(std::memory_order_relaxed));
  }
}

Address StableSpace::Uses::first_out_of_reach() const {
  for (const StableBlock* const block : inside_) {
    if (!block->reachable.load(std::memory_order_acquire)) [[unlikely]]
      return block->at;
  }
  return nullptr;
}

// A device that refuses again and again to map what it can reach elsewhere is lost: its users are not held
// up.
void StableSpace::Uses::begin(std::span<const void* const> pointers, StreamSlot slot) {
  for (bool refused = false;;) {
    while (UseGate* const shut = enter_all(pointers)) space_.wait_at(*shut);
    const Address hidden = first_out_of_reach();
    if (hidden == nullptr || refused) break;
    leave_all();
    refused = !space_.reveal(hidden).ok();
  }
  note(slot);
}

bool StableSpace::Uses::begin_in_hbm(std::span<const void* const> pointers, StreamSlot slot) {
  while (UseGate* const shut = enter_all(pointers)) space_.wait_at(*shut);
  for (const StableBlock* const block : inside_) {
    if (block->place.load(std::memory_order_relaxed) == Place::kHbm) [[likely]]
      continue;
    leave_all();
    return false;
  }
  note(slot);
  return true;
}

void StableSpace::Uses::begin_everything(StreamSlot slot) {
  StableSpace& space = space_;
  space.keep_reachable();
  if (!space.everything_.try_enter()) {
    space.everything_waits_.fetch_add(1, std::memory_order_acq_rel);
    do {
      space.wait_at(space.everything_);
    } while (!space.everything_.try_enter());
    const std::lock_guard lock(space.mutex_);
    space.everything_waits_.fetch_sub(1, std::memory_order_acq_rel);
    ++space.news_;
    space.changed_.notify_all();
  }
  everything_ = true;
  space.everything_users_.fetch_or(slot.bit(), std::memory_order_relaxed);
}

void StableSpace::Uses::end() {
  leave_all();
  if (everything_) space_.everything_.leave();
  everything_ = false;
}

}  // namespace terrace
