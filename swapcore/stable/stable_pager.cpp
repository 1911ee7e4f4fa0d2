#include "swapcore/stable/stable_pager.hpp"

#include <algorithm>

#include <pthread.h>

#include "runtime/clock.hpp"
#include "runtime/thread_signals.hpp"

namespace terrace {
namespace {
constexpr std::chrono::milliseconds kIdle{10};  // between looks where nothing is used
constexpr std::uint64_t kShareAhead = 8;        // of the budget, on its way ahead of its use
constexpr int kTries = 4;                       // others may send away what has just come back
}  // namespace

StablePager::StablePager(StableSpace& space, const Options& options)
    : space_(space), options_(options), thread_([this](const std::stop_token& stop) { serve(stop); }) {}

StablePager::~StablePager() {
  thread_.request_stop();
  thread_.join();
}

void StablePager::serve(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "terrace-pager");
  leave_signals_to_others();
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    fresh_.clear();
    read_ = space_.uses().read(read_, fresh_);
    for (const std::uint32_t block : fresh_) schedule_.use(block);
    if (!fresh_.empty() && space_.any_in_ddr() && !space_.paused()) order_ahead();
    const auto pause = fresh_.empty() ? std::chrono::microseconds(kIdle) : options_.look_every;
    (void)stopped_.wait_for(lock, stop, pause, [] { return false; });
  }
}

// What awaits room is looked at before the room: if it takes some in between, that is missing twice, and one
// block more makes way. The other way round it would be counted as free.
StablePager::Pages StablePager::pages() const {
  Pages pages{};
  Bytes awaited;
  for (const StableSpace::View& view : space_.blocks()) {
    if (view.leaving) pages.leaving.push_back(view.at);
    if (view.awaits_room) awaited += view.size;
    if (view.coming) pages.coming += view.size;
    pages.largest = std::max(pages.largest, view.size);
    pages.blocks.push_back({.at = view.at,
                            .size = view.size,
                            .in_hbm = view.place == Place::kHbm,
                            .movable = !view.pinned && !view.moving,
                            .next = schedule_.until_next(view.number),
                            .last_use = view.last_use});
  }
  pages.room = saturating_sub(space_.hbm_room(), awaited);
  return pages;
}

void StablePager::order_ahead() {
  if (!schedule_.learned()) return;
  counters_.period = schedule_.period();
  const Pages now = pages();
  // Where little fits, much at once would send away what is about to be used.
  const Bytes share = std::max(space_.hbm_budget() / kShareAhead, now.largest * 2);
  const Bytes ahead = std::min(options_.bytes_ahead, share);
  if (now.coming >= ahead) return;
  const PagePlan plan = plan_pages(
      now.blocks, {.room = now.room, .uses_ahead = schedule_.period(), .bytes_ahead = ahead - now.coming});
  // Each behind what makes room for it, and no further: both directions of the link are used at once. A block
  // may have been freed since: then there is nothing to order.
  std::size_t gone = 0;
  for (std::size_t i = 0; i < plan.to_hbm.size(); ++i) {
    for (; gone < plan.behind[i]; ++gone) (void)space_.order(plan.to_ddr[gone], Place::kDdr);
    (void)space_.order(plan.to_hbm[i], Place::kHbm);
  }
  counters_.ahead += plan.to_hbm.size();
}

// Orders others to DDR until `size` is free, and waits for that. What moves already is waited for first.
Status StablePager::make_room(Bytes size) {
  for (;;) {
    std::vector<Address> out;
    {
      const std::lock_guard lock(mutex_);
      const Pages now = pages();
      if (now.room >= size) return {};
      out = terrace::make_room(now.blocks, now.room, size, {});
      if (out.empty()) out = now.leaving;
      if (out.empty()) {
        return out_of_budget(size, Pool::kScratch,
                             "no block that could leave HBM for DDR makes room for " + format_bytes(size));
      }
      for (const Address at : out) (void)space_.order(at, Place::kDdr);
    }
    for (const Address at : out) {
      Status gone = space_.await(at);
      if (!gone.ok() && gone.error().code != Errc::kInvalidArgument) return gone;  // that: freed meanwhile
    }
  }
}

Result<Address> StablePager::allocate(Bytes size) {
  Result<Address> at = space_.allocate(size);
  while (!at.ok() && at.error().code == Errc::kOutOfBudget) {
    const Nanoseconds from = steady_clock().now();
    const Status room = make_room(at.error().bytes + space_.hbm_room());
    note_wait(StallReason::kBudget, from);
    if (!room.ok()) return room.error();
    at = space_.allocate(size);
  }
  return at;
}

void StablePager::note_wait(StallReason reason, Nanoseconds from) {
  const Nanoseconds spent = steady_clock().now() - from;
  metrics().add<Metric::kStallSeconds>(reason, spent);
  const std::lock_guard lock(mutex_);
  (reason == StallReason::kBudget ? counters_.budget_wait : counters_.restore_wait) += spent;
}

Status StablePager::free(Address at) {
  const std::optional<StableSpace::View> view = space_.find(at);
  Status freed = space_.free(at);
  if (!freed.ok() || !view) return freed;
  const std::lock_guard lock(mutex_);
  schedule_.forget(view->number);
  return freed;
}

// Whether it comes back. Its order stands behind those that make room for it, before anybody else can plan
// with that room.
bool StablePager::order_back(const StableSpace::View& view, std::span<const Address> spared) {
  const std::lock_guard lock(mutex_);
  const Pages now = pages();
  if (now.room < view.size && !view.awaits_room) {
    const std::vector<Address> out = terrace::make_room(now.blocks, now.room, view.size, spared);
    if (out.empty() && now.leaving.empty()) return false;
    for (const Address at : out) (void)space_.order(at, Place::kDdr);
  }
  return space_.order(view.at, Place::kHbm).ok();
}

// Whether all of them are on their way or there: false where no room could be made for one.
bool StablePager::bring_back(std::span<const void* const> pointers) {
  std::vector<Address> spared;
  std::vector<StableSpace::View> absent;
  for (const void* const pointer : pointers) {
    const std::optional<StableSpace::View> view = space_.find(pointer);
    if (!view || std::find(spared.begin(), spared.end(), view->at) != spared.end()) continue;
    spared.push_back(view->at);
    if (view->place == Place::kDdr) absent.push_back(*view);
  }
  bool all = true;
  const Nanoseconds from = steady_clock().now();
  for (const StableSpace::View& view : absent) {
    const bool back = order_back(view, spared) && space_.await(view.at).ok();
    all = all && back;
    const std::lock_guard lock(mutex_);
    ++(back ? counters_.demanded : counters_.in_place);
    if (!back) metrics().add<Metric::kUsesInDdr>(1);
  }
  if (!absent.empty()) note_wait(StallReason::kRestoreLate, from);
  return all;
}

void StablePager::begin(StableSpace::Uses& uses, std::span<const void* const> pointers, StreamSlot slot) {
  for (int tries = 0; !uses.begin_in_hbm(pointers, slot); ++tries) {
    if (tries < kTries && !space_.paused() && bring_back(pointers)) continue;
    uses.begin(pointers, slot);  // over the link
    return;
  }
}

StablePager::Counters StablePager::counters() const {
  const std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.surprises = schedule_.surprises();
  return counters;
}

}  // namespace terrace
