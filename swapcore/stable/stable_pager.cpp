#include "swapcore/stable/stable_pager.hpp"

#include <algorithm>
#include <optional>
#include <unordered_map>

#include <pthread.h>

#include "runtime/clock.hpp"
#include "runtime/thread_signals.hpp"

namespace terrace {
namespace {
constexpr std::chrono::milliseconds kIdle{10};  // between looks where nothing is used
constexpr std::uint64_t kTravelShare = 8;       // of the budget, for blocks that do not stay
// Of the largest size, for them at least: in use, leaving, on their way out and in, come. With one less the
// link pauses in either direction; less than that, where all but one would travel.
constexpr std::uint64_t kTravellers = 5;
constexpr std::uint64_t kBlocksForRoom = 24;  // in HBM, of which one may stay free
constexpr int kRest = 3;                      // times what planning took, between plans
constexpr int kTries = 4;                     // others may send away what has just come back
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
    const std::uint64_t before = read_;
    catch_up();
    const bool under_way = read_ != before || wake_ || space_.busy();
    wake_ = false;
    const Nanoseconds from = steady_clock().now();
    if (under_way && space_.any_in_ddr() && !space_.paused()) order_ahead();
    // Where blocks are many, uses that wait for one find the lock free most of the time.
    const Nanoseconds rest = (steady_clock().now() - from) * kRest;
    const Nanoseconds pause =
        under_way ? std::max<Nanoseconds>(options_.look_every, rest) : Nanoseconds(kIdle);
    (void)woken_.wait_for(lock, stop, pause, [this] { return wake_; });
  }
}

void StablePager::catch_up() {
  fresh_.clear();
  read_ = space_.uses().read(read_, fresh_);
  for (const std::uint32_t block : fresh_) schedule_.use(block);
}

bool StablePager::stays(std::uint32_t number) const {
  const std::optional<std::size_t> place = schedule_.last_place(number);
  return place && *place < stays_.size() && stays_[*place];
}

// Anew where another step was learned, or the budget has become another.
void StablePager::choose_what_stays(const std::vector<StableSpace::View>& blocks) {
  std::unordered_map<std::uint32_t, Bytes> sizes;
  Bytes hbm = space_.hbm_budget(), largest;
  for (const StableSpace::View& block : blocks) {
    largest = std::max(largest, block.size);
    if (!block.pinned) sizes[block.number] = block.size;
    if (block.pinned && block.place == Place::kHbm) hbm = saturating_sub(hbm, block.size);
  }
  const Bytes changed = std::max(hbm, stays_in_) - std::min(hbm, stays_in_);
  if (lesson_ == schedule_.lessons() && changed < largest) return;
  lesson_ = schedule_.lessons();
  stays_in_ = hbm;
  const Bytes travellers = std::min(largest * kTravellers, saturating_sub(hbm, largest));
  travel_ = std::min(options_.bytes_ahead, std::max({hbm / kTravelShare, travellers, largest}));
  std::vector<CycleUse> cycle;
  for (const std::uint32_t number : schedule_.cycle()) {
    const auto size = sizes.find(number);
    cycle.push_back({number, size == sizes.end() ? 0_B : size->second});
  }
  stays_ = choose_stays(cycle, saturating_sub(hbm, travel_));
}

// What awaits room is looked at before the room: if it takes some in between, that is missing twice, and one
// block more makes way. The other way round it would be counted as free.
StablePager::Pages StablePager::pages() const {
  Pages pages{};
  Bytes awaited, leaving;
  for (const StableSpace::View& view : space_.blocks()) {
    if (view.leaving) {
      pages.leaving.push_back(view.at);
      leaving += view.size;
    }
    if (view.awaits_room) awaited += view.size;
    pages.largest = std::max(pages.largest, view.size);
    if (view.coming) {
      pages.coming += view.size;
      pages.arriving.push_back(view.at);
    }
    pages.blocks.push_back({.at = view.at,
                            .size = view.size,
                            .in_hbm = view.place == Place::kHbm,
                            .movable = !view.pinned && !view.moving,
                            .stays = stays(view.number),
                            .next = schedule_.goes_on(view.number) ? 0 : schedule_.until_next(view.number),
                            .last_use = view.last_use});
  }
  const Bytes free = space_.hbm_room();
  pages.free = saturating_sub(free, awaited);
  pages.room = saturating_sub(free + leaving, awaited);
  return pages;
}

// While nothing is known of what comes: the next block that is asked for comes at once, and what makes room
// for the one after it leaves meanwhile. Of a few blocks that would be too large a part.
void StablePager::keep_room() {
  const Pages now = pages();
  if (space_.hbm_budget() < now.largest * kBlocksForRoom) return;
  const Bytes room = saturating_sub(now.room, claimed_);
  for (const Address at : terrace::make_room(now.blocks, room, now.largest, {})) {
    (void)space_.order(at, Place::kDdr);
  }
}

void StablePager::order_ahead() {
  if (!schedule_.learned()) {
    keep_room();
    return;
  }
  counters_.period = schedule_.period();
  choose_what_stays(space_.blocks());
  const Pages now = pages();
  if (now.coming >= travel_) return;
  const PagePlan plan = plan_pages(now.blocks, {.room = saturating_sub(now.room, claimed_),
                                                .uses_ahead = schedule_.period(),
                                                .bytes_ahead = travel_ - now.coming});
  // Each behind what makes room for it: both directions of the link are used at once. A block may have been
  // freed since: then there is nothing to order.
  std::size_t gone = 0;
  for (std::size_t i = 0; i < plan.to_hbm.size(); ++i) {
    for (; gone < plan.behind[i]; ++gone) (void)space_.order(plan.to_ddr[gone], Place::kDdr);
    (void)space_.order(plan.to_hbm[i], Place::kHbm);
  }
  counters_.ahead += plan.to_hbm.size();
}

class StablePager::Claim {
 public:
  Claim(StablePager& pager, Bytes size) : pager_(pager), size_(size) {
    const std::lock_guard lock(pager_.mutex_);
    pager_.claimed_ += size_;
  }
  ~Claim() {
    const std::lock_guard lock(pager_.mutex_);
    pager_.claimed_ -= size_;
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  StablePager& pager_;
  const Bytes size_;
};

Status StablePager::make_room(Bytes size, const std::function<void()>& take) {
  const Claim claim(*this, size);
  Status made = send_away(size);
  if (made.ok() && take != nullptr) take();
  return made;
}

// Orders others to DDR until `size` is free, and waits for that and for what leaves already; or for what is
// on its way back, which can leave when it is there.
Status StablePager::send_away(Bytes size) {
  for (int tries = 0;;) {
    std::vector<Address> out, arriving;
    {
      const std::lock_guard lock(mutex_);
      catch_up();
      const Pages now = pages();
      if (now.free >= size) return {};
      out = terrace::make_room(now.blocks, now.room, size, {});
      for (const Address at : out) (void)space_.order(at, Place::kDdr);
      out.insert(out.end(), now.leaving.begin(), now.leaving.end());
      if (out.empty()) arriving = now.arriving;
      if (out.empty() && (arriving.empty() || ++tries > kTries)) {
        return out_of_budget(size, Pool::kScratch,
                             "no block that could leave HBM for DDR makes room for " + format_bytes(size));
      }
    }
    for (const Address at : arriving) (void)space_.await(at);
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
  catch_up();
  wake_ = true;  // what comes next is another's now
  woken_.notify_all();
  const Pages now = pages();
  if (now.room < view.size && !view.coming) {
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
