// The space's mover: one thread, two batches of moves at a time. While one batch crosses the link, the gates
// of the next are shut and its copies queued behind it; then the first is remapped and opened. So the link
// does not pause for remapping, which costs as much as copying where host memory is mapped.
#include <algorithm>
#include <utility>

#include <pthread.h>

#include "runtime/thread_signals.hpp"
#include "swapcore/stable/stable_space.hpp"

namespace terrace {

namespace {
constexpr int kTries = 4;  // of what must not fail
}

void StableSpace::serve(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "terrace-mover");
  leave_signals_to_others();
  (void)device_.bind_thread();
  Batch current;
  for (;;) {
    Batch next;
    {
      std::unique_lock lock(mutex_);
      if (current.empty()) {
        busy_ = false;
        if (!paused()) refuse_the_rest();
        changed_.notify_all();
        (void)changed_.wait(lock, stop, [this] { return has_work(); });
      }
      next = next_batch();
      busy_ = !current.empty() || !next.empty();
      if (current.empty() && next.empty() && stop.stop_requested()) return;
    }
    if (!next.empty()) start(next);
    if (!current.empty()) finish(current);
    current = std::move(next);
    if (current.empty() && everything_shut_) {
      everything_shut_ = false;
      everything_.open();
    }
  }
}

bool StableSpace::can_move(const StableBlock& block, Bytes room) const {
  if (block.moving) return false;
  if (block.freed || block.wanted == Place::kDdr) return true;
  return block.place.load(std::memory_order_relaxed) == Place::kHbm || block.size <= room;
}

// Whoever waits for everything goes first: once the gate before all blocks is open nothing is started until
// they are in.
bool StableSpace::has_work() const {
  return !paused() && everything_waits_.load(std::memory_order_acquire) == 0 && !orders_.empty();
}

// Nothing moves or can, so nothing makes room for what still waits for it.
void StableSpace::refuse_the_rest() {
  const Bytes room = backing_->hbm_room();
  const auto moves = [&](const StableBlock* block) { return can_move(*block, room); };
  if (orders_.empty() || std::any_of(orders_.begin(), orders_.end(), moves)) return;
  for (StableBlock* const block : orders_) {
    block->queued = false;
    block->last_move =
        out_of_budget(block->size, Pool::kScratch,
                      "a block of " + format_bytes(block->size) + " cannot come back: " + format_bytes(room) +
                          " of HBM are free; order others to DDR first");
    ++counters_.failed_moves;
  }
  orders_.clear();
  changed_.notify_all();
}

StableSpace::Batch StableSpace::next_batch() {
  Batch batch;
  if (paused() || everything_waits_.load(std::memory_order_acquire) > 0) return batch;
  // A batch of each direction: so both are busy at once, and the next batch's copies while this is remapped.
  Bytes room = backing_->hbm_room(), spilled, restored;
  for (auto order = orders_.begin(); order != orders_.end() && std::min(spilled, restored) < batch_;) {
    StableBlock& block = **order;
    const Bytes same_way = block.wanted == Place::kHbm ? restored : spilled;
    if (!can_move(block, room) || (!block.freed && same_way >= batch_)) {
      ++order;
      continue;
    }
    order = orders_.erase(order);
    block.queued = false;
    if (!block.freed && block.wanted == block.place.load(std::memory_order_relaxed)) {
      block.last_move = {};
      changed_.notify_all();
      continue;
    }
    block.moving = true;
    if (!block.freed) (block.wanted == Place::kHbm ? restored : spilled) += block.size;
    if (!block.freed && block.wanted == Place::kHbm) room -= block.size;
    batch.moves.push_back({.block = &block, .to = block.wanted, .burial = block.freed});
  }
  return batch;
}

// What the block moves to, reachable at an address of its own.
Status StableSpace::prepare(Move& move) {
  if (move.burial) return {};
  const Bytes size = move.block->size;
  if (move.to == Place::kHbm) {
    Result<HbmHandle> hbm = backing_->take_hbm(size, BackingStore::Alias::kMapped);
    if (!hbm.ok()) return hbm.error();
    move.hbm = *hbm;
    move.block->has_room.store(true, std::memory_order_relaxed);
    return {};
  }
  Result<HostBacking> host = backing_->take_host(size);
  if (!host.ok()) return host.error();
  move.host = *host;
  return {};
}

// An event behind each of these streams.
Status StableSpace::fence(std::uint64_t slots, std::vector<EventPool::Held>& fences) {
  for (int index = 0; index < StreamSlot::kCount; ++index) {
    const StreamSlot slot{index};
    if ((slots & slot.bit()) == 0) continue;
    Result<EventPool::Held> event = events_.take();
    if (!event.ok()) return event.error();
    if (Status recorded = streams_.record(slot, **event); !recorded.ok()) return recorded;
    fences.push_back(std::move(*event));
  }
  return {};
}

// Later work of order_ comes behind all that these streams, and users of everything, have done so far.
Status StableSpace::order_behind_users(std::uint64_t slots) {
  std::erase_if(everything_fences_,
                [this](const EventPool::Held& event) { return device_.completed(*event); });
  const std::uint64_t of_everything = everything_users_.exchange(0, std::memory_order_acquire);
  if (Status fenced = fence(of_everything, everything_fences_); !fenced.ok()) {
    everything_users_.fetch_or(of_everything, std::memory_order_relaxed);
    return fenced;
  }
  std::vector<EventPool::Held> fences = everything_fences_;
  if (Status fenced = fence(slots, fences); !fenced.ok()) return fenced;
  for (const EventPool::Held& event : fences) {
    if (Status waits = device_.wait(order_, *event); !waits.ok()) return waits;
  }
  return {};
}

Status StableSpace::send(Move& move, Event quiet) {
  if (move.burial) return {};
  const StableBlock& block = *move.block;
  const bool restores = move.to == Place::kHbm;
  const Transfer whole{.to = restores ? move.hbm.alias : move.host.alias,
                       .from = restores ? block.host.alias : block.at,
                       .size = block.size};
  Result<CopyEngine::Ticket> ticket =
      copies_.submit({.direction = restores ? Direction::kH2D : Direction::kD2H,
                      .after = quiet,
                      .reason = restores ? CopyReason::kRestore : CopyReason::kSpill,
                      .priority = restores ? CopyPriority::kUrgent : CopyPriority::kBackground},
                     {&whole, 1});
  if (!ticket.ok()) return ticket.error();
  move.copy = std::move(*ticket);
  return {};
}

void StableSpace::start(Batch& batch) {
  for (Move& move : batch.moves) move.failed = prepare(move);
  if (!everything_shut_) {
    everything_.shut();
    everything_.await_empty();
    everything_shut_ = true;
  }
  std::uint64_t slots = 0;
  for (Move& move : batch.moves) {
    if (!move.failed.ok()) continue;
    move.block->gate.shut();
  }
  for (Move& move : batch.moves) {
    if (!move.failed.ok()) continue;
    move.block->gate.await_empty();
    move.users = move.block->users.exchange(0, std::memory_order_acquire);
    slots |= move.users;
  }
  Status ordered = order_behind_users(slots);
  if (ordered.ok()) {
    Result<EventPool::Held> quiet = events_.take();
    ordered = quiet.ok() ? device_.record(order_, **quiet) : Status(quiet.error());
    if (ordered.ok()) batch.quiet = std::move(*quiet);
  }
  for (Move& move : batch.moves) {
    if (move.failed.ok()) move.failed = ordered.ok() ? send(move, *batch.quiet) : ordered;
  }
}

void StableSpace::finish(Batch& batch) {
  const bool buries =
      std::any_of(batch.moves.begin(), batch.moves.end(), [](const Move& move) { return move.burial; });
  const Status quiet = buries && batch.quiet != nullptr ? device_.synchronize(*batch.quiet) : Status();
  for (Move& move : batch.moves) {
    if (move.burial) {
      bury(move, move.failed.ok() ? quiet : move.failed);
      continue;
    }
    Status moved = std::move(move.failed);
    if (moved.ok()) moved = move.copy.synchronize();
    if (moved.ok()) moved = exchange(move);
    settle(move, moved);
  }
}

// The block shows the other side's memory from here on. What was there is put back where that fails: a driver
// that refuses memory it had mapped a moment before has lost the device.
Status StableSpace::exchange(const Move& move) {
  const StableBlock& block = *move.block;
  const bool restores = move.to == Place::kHbm;
  const Physical fresh = restores ? move.hbm.physical : move.host.handle.physical;
  const Physical old = restores ? block.host.handle.physical : block.hbm.physical;
  if (Status unmapped = device_.unmap(block.at, block.size); !unmapped.ok()) return unmapped;
  Status mapped = device_.map(block.at, fresh, block.size);
  for (int tries = 0; !mapped.ok() && tries < kTries; ++tries) {
    if (device_.map(block.at, old, block.size).ok()) break;
  }
  return mapped;
}

void StableSpace::settle(Move& move, const Status& moved) {
  StableBlock& block = *move.block;
  const bool restores = move.to == Place::kHbm;
  if (moved.ok()) {
    // What held the bytes until now is free for others; handles change sides.
    std::swap(block.hbm, move.hbm);
    std::swap(block.host, move.host);
    const std::lock_guard lock(mutex_);
    note_place(block, block.place.load(std::memory_order_relaxed), move.to);
    block.place.store(move.to, std::memory_order_relaxed);
  } else {
    block.users.fetch_or(move.users, std::memory_order_relaxed);
  }
  block.gate.open();
  if (move.hbm.physical != Physical{}) backing_->give_back(move.hbm);
  if (move.host.alias != nullptr) backing_->give_back(move.host);
  const std::lock_guard lock(mutex_);
  block.has_room.store(false, std::memory_order_relaxed);
  block.moving = false;
  block.last_move = moved;
  if (!moved.ok()) {
    ++counters_.failed_moves;
  } else if (restores) {
    ++counters_.restores;
    counters_.restored += block.size;
  } else {
    ++counters_.spills;
    counters_.spilled += block.size;
  }
  changed_.notify_all();
}

void StableSpace::note_place(const StableBlock& block, Place from, Place to) {
  if (from == to) return;
  if (to == Place::kDdr) {
    counters_.in_ddr += block.size;
    counters_.in_ddr_peak = std::max(counters_.in_ddr_peak, counters_.in_ddr);
    spilled_.fetch_add(1, std::memory_order_relaxed);
  } else {
    counters_.in_ddr -= block.size;
    spilled_.fetch_sub(1, std::memory_order_relaxed);
  }
}

// Its users have ended: the gate stays shut until the block is another. Where the streams cannot be asked it
// is tried again, and at last taken for true.
void StableSpace::bury(Move& move, const Status& quiet) {
  StableBlock& block = *move.block;
  if (!quiet.ok() && ++block.burials < kTries) {
    block.users.fetch_or(move.users, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    block.moving = false;
    enqueue(block);
    return;
  }
  Status unmapped = device_.unmap(block.at, block.size);
  for (int tries = 1; !unmapped.ok() && tries < kTries; ++tries) {
    unmapped = device_.unmap(block.at, block.size);
  }
  const bool in_hbm = block.place.load(std::memory_order_relaxed) == Place::kHbm;
  if (unmapped.ok()) {
    if (in_hbm) backing_->give_back(block.hbm);
    if (!in_hbm) backing_->give_back(block.host);
    give_back_addresses(block.at, block.size);
  }
  const std::lock_guard lock(mutex_);
  if (!in_hbm) note_place(block, Place::kDdr, Place::kHbm);
  block.moving = false;
  idle_.push_back(&block);
  ++buried_;
  changed_.notify_all();
}

}  // namespace terrace
