// A device's link to the host, as this process shares it with others: where its slot on their board is, and
// what the board says.
//
// While a daemon has given the process a seat, its copies keep to what it may use, and announcements of
// collectives reach every process at the board. Else the process is alone: it may use all, and announcements
// reach its own copies by a board of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/link_board.hpp"

namespace terrace {

class LinkTime {
 public:
  struct Seat {
    std::shared_ptr<LinkBoard> board;  // null: alone, and nobody has announced anything yet
    std::size_t slot = 0;
    bool shared = false;  // the board is the daemon's
    [[nodiscard]] LinkSlot& own() const { return board->slots()[slot]; }
  };

  // By whoever has talked to the daemon. Precondition: slot < LinkBoard::kSlots.
  void take_seat(std::shared_ptr<LinkBoard> board, std::size_t slot);
  // Alone again, unless somebody has taken another seat since.
  void leave_seat(const LinkBoard* board);

  [[nodiscard]] Seat seat() const;
  // Another number for each seat; wait-free.
  [[nodiscard]] std::uint64_t seatings() const { return seatings_.load(std::memory_order_acquire); }

  // Copy engines of this process on this device. Announcing makes sense where there is one, or a shared seat.
  void count_copier() { copiers_.fetch_add(1, std::memory_order_relaxed); }
  void discount_copier() { copiers_.fetch_sub(1, std::memory_order_relaxed); }
  [[nodiscard]] bool anybody_listens() const {
    return copiers_.load(std::memory_order_relaxed) > 0 || shared_.load(std::memory_order_relaxed);
  }

  // A lane of the process's slot, for who announces; none: all are taken.
  [[nodiscard]] std::optional<std::size_t> take_lane();
  void give_lane(std::size_t lane);

  // The seat, and what makes its board writable for the device: made at most once for those who hold it.
  using Reach = std::shared_ptr<void>;
  [[nodiscard]] std::pair<Seat, Reach> reach(const std::function<Reach(std::shared_ptr<LinkBoard>)>& make);

 private:
  mutable std::mutex mutex_;
  Seat seat_;                         // under mutex_, as the next four
  std::shared_ptr<LinkBoard> alone_;  // made for the first who announces
  std::uint32_t lanes_ = 0;           // taken, a bit each
  std::weak_ptr<void> reach_;
  const LinkBoard* reached_ = nullptr;
  std::atomic<std::uint64_t> seatings_{0};
  std::atomic<int> copiers_{0};
  std::atomic<bool> shared_{false};
};

// What one direction of a copy engine reads there and writes. Not thread-safe; the LinkTime outlives it.
class LinkView {
 public:
  // A daemon that has not looked for so long has died or hangs: what it wrote last binds nobody.
  static constexpr Nanoseconds kStale = std::chrono::seconds(1);
  // Nobody's copies stand still: what is usable at least.
  static constexpr double kLeast = 1.0 / 256;
  // Whatever is announced unchanged for so long has died with who announced it.
  static constexpr Nanoseconds kLongestCollective = std::chrono::seconds(2);

  LinkView(LinkTime& link, std::size_t direction) : link_(link), direction_(direction) {}
  LinkView(const LinkView&) = delete;
  LinkView& operator=(const LinkView&) = delete;

  // Of the link's time, from kLeast to 1.
  [[nodiscard]] double usable(Nanoseconds now);
  // A collective of some process runs on the device.
  [[nodiscard]] bool collective_runs(Nanoseconds now);
  void note_limited(Nanoseconds now);
  void note_spent(double seconds);

 private:
  void refresh();
  LinkTime& link_;
  const std::size_t direction_;
  LinkTime::Seat seat_;
  std::optional<std::uint64_t> seating_;  // seat_ is of
  double unspent_ = 0;                    // microseconds that were too few to be told
  std::uint64_t announced_ = 0;           // what was, when it last changed
  Nanoseconds announced_since_{0};
};

}  // namespace terrace
