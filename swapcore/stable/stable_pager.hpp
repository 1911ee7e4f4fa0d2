// Keeps in a space of stable addresses what is used next in HBM, and the rest in DDR.
//
// It reads which blocks are used, in order, learns the step from that, and brings back what comes next while
// others compute: from a thread of its own, so that a use pays nothing for it. A part of HBM is for blocks
// that travel; the rest is for those that stay, of each step the same (stay_plan.hpp). A use of a block that
// is in DDR brings it back and waits; where no room can be made, the block is used where it lies, over the
// link. Until a step is learned nothing comes ahead of its use; but room for one block
// is kept, so that what comes need not wait for what leaves.
//
// Any thread may call. Why: docs/design/0013-stable-addresses.md.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"
#include "swapcore/stable/page_plan.hpp"
#include "swapcore/stable/stable_space.hpp"
#include "swapcore/stable/stay_plan.hpp"
#include "swapcore/stable/use_schedule.hpp"

namespace terrace {

class StablePager {
 public:
  struct Options {
    Bytes bytes_ahead = 1_GiB;                  // that may come back before their use
    std::chrono::microseconds look_every{500};  // at what has been used, while anything is
  };
  explicit StablePager(StableSpace& space) : StablePager(space, Options{}) {}
  StablePager(StableSpace& space, const Options& options);
  ~StablePager();
  StablePager(const StablePager&) = delete;
  StablePager& operator=(const StablePager&) = delete;

  // As the space's; where HBM is short others go to DDR first. Errors: as the space's, kOutOfBudget where
  // nothing that could leave is left or DDR is full as well.
  [[nodiscard]] Result<Address> allocate(Bytes size);
  [[nodiscard]] Status free(Address at);
  // Others go to DDR until so much of the budget is free. Nothing comes back into it ahead of its use until
  // `take` has returned, which is called where that went well. Errors: as of allocate(), kCancelled while
  // paused.
  [[nodiscard]] Status make_room(Bytes size, const std::function<void()>& take = nullptr);
  // As StableSpace::Uses::begin(), with the blocks brought back.
  void begin(StableSpace::Uses& uses, std::span<const void* const> pointers, StreamSlot slot);

  struct Counters {
    std::uint64_t demanded = 0;  // blocks that a use had to wait for
    std::uint64_t in_place = 0;  // uses over the link
    std::uint64_t ahead = 0;     // blocks ordered back before their use
    std::size_t period = 0;      // of the step learned last, in uses; 0: none has been
    std::uint64_t surprises = 0;
    Nanoseconds restore_wait{}, budget_wait{};  // of uses for blocks to come back, of allocations for room
  };
  [[nodiscard]] Counters counters() const;

 private:
  void serve(const std::stop_token& stop);
  void catch_up();     // with what has been used; mutex_ held
  void order_ahead();  // mutex_ held
  void keep_room();    // mutex_ held
  struct Pages {
    std::vector<PagedBlock> blocks;
    Bytes free;    // that nobody waits for
    Bytes room;    // with that of what leaves
    Bytes coming;  // on their way to HBM
    Bytes largest;
    std::vector<Address> leaving, arriving;
  };
  [[nodiscard]] Pages pages() const;  // mutex_ held
  [[nodiscard]] Status send_away(Bytes size);
  class Claim;
  void choose_what_stays(const std::vector<StableSpace::View>& blocks);  // mutex_ held
  [[nodiscard]] bool stays(std::uint32_t number) const;                  // mutex_ held
  void note_wait(StallReason reason, Nanoseconds from);
  [[nodiscard]] bool bring_back(std::span<const void* const> pointers);
  [[nodiscard]] bool order_back(const StableSpace::View& view, std::span<const Address> spared);

  StableSpace& space_;
  const Options options_;
  mutable std::mutex mutex_;  // all below
  std::condition_variable_any woken_;
  bool wake_ = false;
  UseSchedule schedule_;
  std::uint64_t read_ = 0;  // of the space's uses
  std::vector<std::uint32_t> fresh_;
  std::vector<bool> stays_;   // by place of the schedule's cycle
  std::uint64_t lesson_ = 0;  // of the schedule, for which that holds,
  Bytes stays_in_, travel_;   // in so much HBM; and what of it is for those that travel
  Bytes claimed_;             // that somebody waits for: nothing comes ahead of its use in there
  Counters counters_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace terrace
