#include "runtime/link_time.hpp"

#include <algorithm>
#include <bit>

#include "runtime/assert.hpp"

namespace terrace {

void LinkTime::take_seat(std::shared_ptr<LinkBoard> board, std::size_t slot) {
  TERRACE_CHECK(board != nullptr && slot < LinkBoard::kSlots, "a seat is a slot of a board");
  const std::lock_guard lock(mutex_);
  seat_ = {std::move(board), slot, true};
  shared_.store(true, std::memory_order_relaxed);
  seatings_.fetch_add(1, std::memory_order_release);
}

void LinkTime::leave_seat(const LinkBoard* board) {
  const std::lock_guard lock(mutex_);
  if (!seat_.shared || seat_.board.get() != board) return;
  seat_ = {alone_, 0, false};
  shared_.store(false, std::memory_order_relaxed);
  seatings_.fetch_add(1, std::memory_order_release);
}

LinkTime::Seat LinkTime::seat() const {
  const std::lock_guard lock(mutex_);
  return seat_;
}

std::optional<std::size_t> LinkTime::take_lane() {
  const std::lock_guard lock(mutex_);
  if (alone_ == nullptr) {
    auto made = LinkBoard::create();
    if (!made) return std::nullopt;
    alone_ = *std::move(made);
    if (seat_.board == nullptr) seat_.board = alone_;
    seatings_.fetch_add(1, std::memory_order_release);
  }
  const auto lane = static_cast<std::size_t>(std::countr_one(lanes_));
  if (lane >= LinkSlot::kLanes) return std::nullopt;
  lanes_ |= 1U << lane;
  return lane;
}

void LinkTime::give_lane(std::size_t lane) {
  const std::lock_guard lock(mutex_);
  lanes_ &= ~(1U << lane);
}

std::pair<LinkTime::Seat, LinkTime::Reach> LinkTime::reach(
    const std::function<Reach(std::shared_ptr<LinkBoard>)>& make) {
  const std::lock_guard lock(mutex_);
  if (seat_.board == nullptr) return {};
  if (reached_ == seat_.board.get()) {
    if (Reach known = reach_.lock()) return {seat_, std::move(known)};
  }
  Reach made = make(seat_.board);
  reach_ = made;
  reached_ = seat_.board.get();
  return {seat_, std::move(made)};
}

void LinkView::refresh() {
  const std::uint64_t now = link_.seatings();
  if (seating_ == now) return;
  seating_ = now;
  seat_ = link_.seat();
}

double LinkView::usable(Nanoseconds now) {
  refresh();
  if (!seat_.shared) return 1;
  const Nanoseconds looked = seat_.board->looked_at();
  // The daemon may have looked since `now` was read.
  if (looked > now + kStale || looked < now - kStale) return 1;
  const std::uint32_t part = seat_.own().usable[direction_].load(std::memory_order_relaxed);
  return std::clamp(static_cast<double>(part) / kLinkWhole, kLeast, 1.0);
}

bool LinkView::collective_runs(Nanoseconds now) {
  refresh();
  if (seat_.board == nullptr) return false;
  std::uint64_t announced = 0;
  std::uint64_t number = 0;
  for (LinkSlot& slot : seat_.board->slots()) {
    for (CollectiveLane& lane : slot.lanes) {
      ++number;
      const std::uint32_t begun = lane.begun.load(std::memory_order_relaxed);
      if (begun == lane.ended.load(std::memory_order_relaxed)) continue;
      announced = (announced ^ (number << 32 ^ begun)) * 0x100000001b3ULL | 1;
    }
  }
  if (announced == 0) {
    announced_ = 0;
    return false;
  }
  if (announced != announced_) {
    announced_ = announced;
    announced_since_ = now;
  }
  return now - announced_since_ < kLongestCollective;
}

void LinkView::note_limited(Nanoseconds now) {
  if (seat_.shared) {
    const auto at = static_cast<std::uint64_t>(now.count());
    seat_.own().limited_at[direction_].store(at, std::memory_order_relaxed);
  }
}

void LinkView::note_spent(double seconds) {
  refresh();
  if (!seat_.shared) return;
  unspent_ += std::clamp(seconds, 0.0, 60.0) * 1e6;
  const auto whole = static_cast<std::uint32_t>(unspent_);
  unspent_ -= whole;
  seat_.own().spent[direction_].fetch_add(whole, std::memory_order_relaxed);
}

}  // namespace terrace
