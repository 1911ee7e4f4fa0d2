// The space's mover: one thread, and for each direction moves that are under way: while one crosses the link
// the next is queued behind it, so that the link does not pause for remapping. The directions do not wait for
// each other, but where one makes room for the other.
#include <algorithm>
#include <utility>

#include <pthread.h>

#include "runtime/clock.hpp"
#include "runtime/thread_signals.hpp"
#include "swapcore/stable/stable_space.hpp"

namespace terrace {

namespace {
constexpr int kTries = 4;                             // of what must not fail
constexpr std::size_t kAbreast = 2;                   // moves of a direction, however large
constexpr std::chrono::microseconds kLookEvery{100};  // whether a move is over

// Adds to a figure what passes.
class Spent {
 public:
  explicit Spent(double& seconds) : seconds_(seconds) {}
  ~Spent() { seconds_ += seconds_of(steady_clock().now() - from_); }
  Spent(const Spent&) = delete;
  Spent& operator=(const Spent&) = delete;

 private:
  double& seconds_;
  const Nanoseconds from_ = steady_clock().now();
};
}  // namespace

void StableSpace::serve(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "terrace-mover");
  leave_signals_to_others();
  (void)device_.bind_thread();
  Flights flights;
  std::uint64_t seen = 0;
  for (bool finished = false;;) {
    std::vector<Move> next;
    {
      std::unique_lock lock(mutex_);
      note_time(flights);
      if (flights.empty()) {
        busy_.store(false, std::memory_order_relaxed);
        if (!paused()) refuse_the_rest();
        changed_.notify_all();
        (void)changed_.wait(lock, stop, [this] { return has_work(); });
        noted_at_ = steady_clock().now();
      }
      // Orders may be many: what could not be carried out cannot yet, unless something has changed.
      if (flights.empty() || finished || seen != news_) next = next_moves(flights);
      seen = news_;
      const bool busy = !flights.empty() || !next.empty();
      busy_.store(busy, std::memory_order_relaxed);
      if (!busy && stop.stop_requested()) return;
    }
    const bool started = !next.empty();
    if (started) start(next);
    std::move(next.begin(), next.end(), std::back_inserter(flights));
    finished = finish_some(flights) > 0;
    if (flights.empty() && everything_shut_) {
      everything_shut_ = false;
      everything_.open();
    }
    if (!started && !finished && !flights.empty()) await_news(seen);
  }
}

// What has passed since the last time, with these under way.
void StableSpace::note_time(const Flights& flights) {
  const auto flies = [&](Place to) {
    return std::any_of(flights.begin(), flights.end(),
                       [to](const Move& move) { return !move.burial && move.to == to; });
  };
  const Nanoseconds now = steady_clock().now();
  const double passed = seconds_of(now - std::exchange(noted_at_, now));
  const bool up = flies(Place::kHbm), down = flies(Place::kDdr);
  if (up || down) counters_.moving_seconds += passed;
  if (up && down) counters_.both_ways_seconds += passed;
  counters_.prepare_seconds = prepare_seconds_;
  counters_.remap_seconds = remap_seconds_;
}

// Until an order is given, or for a moment: no device tells of one of several events.
void StableSpace::await_news(std::uint64_t seen) {
  std::unique_lock lock(mutex_);
  (void)changed_.wait_for(lock, kLookEvery, [&] { return news_ != seen; });
}

bool StableSpace::can_move(const StableBlock& block, Bytes room) const {
  if (block.moving || block.showing) return false;
  if (block.freed || block.wanted == Place::kDdr) return true;
  return block.place.load(std::memory_order_relaxed) == Place::kHbm || block.size <= room;
}

bool StableSpace::any_can_move() const {
  const Bytes room = backing_->hbm_room();
  return std::any_of(orders_.begin(), orders_.end(),
                     [&](const StableBlock* block) { return can_move(*block, room); });
}

bool StableSpace::any_is_shown() const {
  return std::any_of(orders_.begin(), orders_.end(), [](const StableBlock* block) { return block->showing; });
}

// Whoever waits for everything goes first: once the gate before all blocks is open nothing is started until
// they are in. What a user maps is waited for: the end of that is news.
bool StableSpace::has_work() const {
  if (paused() || everything_waits_.load(std::memory_order_acquire) > 0 || orders_.empty()) return false;
  return !any_is_shown() || any_can_move();
}

// Nothing moves or can, so nothing makes room for what still waits for it. What a user maps can as soon as he
// has: its order, or its burial, makes room yet.
void StableSpace::refuse_the_rest() {
  if (orders_.empty() || any_is_shown() || any_can_move()) return;
  const Bytes room = backing_->hbm_room();
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

// What each direction has room for beside what is under way.
std::vector<StableSpace::Move> StableSpace::next_moves(const Flights& flights) {
  std::vector<Move> next;
  if (paused() || everything_waits_.load(std::memory_order_acquire) > 0) return next;
  struct Way {
    Bytes bytes;
    std::size_t count = 0;
    [[nodiscard]] bool full(Bytes batch) const { return count >= kAbreast && bytes >= batch * 2; }
    void add(Bytes size) {
      bytes += size;
      ++count;
    }
  } up, down;
  for (const Move& move : flights) {
    if (!move.burial) (move.to == Place::kHbm ? up : down).add(move.block->size);
  }
  Bytes room = backing_->hbm_room();
  for (auto order = orders_.begin(); order != orders_.end() && !(up.full(batch_) && down.full(batch_));) {
    StableBlock& block = **order;
    const bool comes = block.wanted == Place::kHbm;
    Way& way = comes ? up : down;
    if (!can_move(block, room) || (!block.freed && way.full(batch_))) {
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
    if (!block.freed) way.add(block.size);
    if (!block.freed && comes) room -= block.size;
    next.push_back({.block = &block, .to = block.wanted, .burial = block.freed});
  }
  return next;
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

// When all that these streams, and users of everything, have been given so far is over; null: nothing was.
Result<EventPool::Held> StableSpace::quiet_after(std::uint64_t slots) {
  std::erase_if(everything_fences_,
                [this](const EventPool::Held& event) { return device_.completed(*event); });
  const std::uint64_t of_everything = everything_users_.exchange(0, std::memory_order_acquire);
  if (Status fenced = fence(of_everything, everything_fences_); !fenced.ok()) {
    everything_users_.fetch_or(of_everything, std::memory_order_relaxed);
    return fenced.error();
  }
  std::vector<EventPool::Held> fences = everything_fences_;
  if (Status fenced = fence(slots, fences); !fenced.ok()) return fenced.error();
  if (fences.empty()) return EventPool::Held();
  for (const EventPool::Held& event : fences) {
    if (Status waits = device_.wait(order_, *event); !waits.ok()) return waits.error();
  }
  Result<EventPool::Held> quiet = events_.take();
  if (!quiet.ok()) return quiet;
  if (Status recorded = device_.record(order_, **quiet); !recorded.ok()) return recorded.error();
  return quiet;
}

Status StableSpace::send(Move& move) {
  if (move.burial) return {};
  const StableBlock& block = *move.block;
  const bool restores = move.to == Place::kHbm;
  const Transfer whole{.to = restores ? move.hbm.alias : move.host.alias,
                       .from = restores ? block.host.alias : block.at,
                       .size = block.size};
  Result<CopyEngine::Ticket> ticket =
      copies_.submit({.direction = restores ? Direction::kH2D : Direction::kD2H,
                      .after = move.quiet != nullptr ? *move.quiet : Event{},
                      .reason = restores ? CopyReason::kRestore : CopyReason::kSpill,
                      .priority = restores ? CopyPriority::kUrgent : CopyPriority::kBackground},
                     {&whole, 1});
  if (!ticket.ok()) return ticket.error();
  move.copy = std::move(*ticket);
  return {};
}

void StableSpace::start(std::vector<Move>& moves) {
  {
    const Spent spent(prepare_seconds_);
    for (Move& move : moves) move.failed = prepare(move);
  }
  if (!everything_shut_) {
    everything_.shut();
    everything_.await_empty();
    everything_shut_ = true;
  }
  std::uint64_t slots = 0;
  for (Move& move : moves) {
    if (move.failed.ok()) move.block->gate.shut();
  }
  for (Move& move : moves) {
    if (!move.failed.ok()) continue;
    move.block->gate.await_empty();
    move.users = move.block->users.exchange(0, std::memory_order_acquire);
    slots |= move.users;
  }
  // What nobody has used since it moved waits for users of everything alone.
  const Result<EventPool::Held> unused = quiet_after(0);
  const Result<EventPool::Held> used = slots != 0 ? quiet_after(slots) : unused;
  for (Move& move : moves) {
    const Result<EventPool::Held>& quiet = move.users != 0 ? used : unused;
    if (move.failed.ok() && !quiet.ok()) move.failed = quiet.error();
    if (move.failed.ok()) move.quiet = *quiet;
    if (move.failed.ok()) move.failed = send(move);
  }
}

bool StableSpace::over(const Move& move) const {
  if (!move.failed.ok()) return true;
  if (move.burial) return move.quiet == nullptr || device_.completed(*move.quiet);
  return move.copy.done();
}

// Of each direction the first few are looked at: others are behind them. The first goes out at once: somebody
// may wait for it, or for its room.
std::size_t StableSpace::finish_some(Flights& flights) {
  std::size_t finished = 0, waiting[2] = {0, 0};
  for (auto move = flights.begin(); move != flights.end();) {
    std::size_t& behind = waiting[!move->burial && move->to == Place::kHbm ? 1 : 0];
    if (!move->burial && behind >= kAbreast) {
      ++move;
      continue;
    }
    if (!over(*move)) {
      if (!move->burial && behind++ == 0) (void)move->copy.promote();
      ++move;
      continue;
    }
    finish(*move);
    move = flights.erase(move);
    ++finished;
  }
  return finished;
}

void StableSpace::finish(Move& move) {
  Status moved = std::move(move.failed);
  if (move.burial) {
    // It has completed: this says how.
    if (moved.ok() && move.quiet != nullptr) moved = device_.synchronize(*move.quiet);
    bury(move, moved);
    return;
  }
  if (moved.ok()) moved = move.copy.synchronize();
  if (moved.ok()) moved = exchange(move);
  settle(move, moved);
}

// The block shows the other side's memory from here on, or nothing where that is in DDR and may be out of
// reach. What was there is put back where that fails: a driver that refuses memory it had mapped a moment
// before has lost the device.
Status StableSpace::exchange(const Move& move) {
  const Spent spent(remap_seconds_);
  StableBlock& block = *move.block;
  const bool restores = move.to == Place::kHbm;
  const Physical old = restores ? block.host.handle.physical : block.hbm.physical;
  const bool had = block.reachable.load(std::memory_order_relaxed);
  if (had) {
    if (Status unmapped = device_.unmap(block.at, block.size); !unmapped.ok()) return unmapped;
  }
  if (!restores && reach_.load(std::memory_order_acquire) == Reach::kForUses) {
    block.reachable.store(false, std::memory_order_relaxed);
    return {};
  }
  Status mapped = device_.map(block.at, restores ? move.hbm.physical : move.host.handle.physical, block.size);
  if (mapped.ok()) block.reachable.store(true, std::memory_order_relaxed);
  for (int tries = 0; had && !mapped.ok() && tries < kTries; ++tries) {
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
  const bool shown = block.reachable.load(std::memory_order_relaxed);
  Status unmapped = shown ? device_.unmap(block.at, block.size) : Status();
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
