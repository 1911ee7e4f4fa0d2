// One direction of the copy engine: its two lanes, what is held back, and the rule by which that goes out.
//
//   submit, urgent      ---------------------------> urgent lane, or a gated one
//   submit, background  --> held back --(dispatch)--> background lane: at most a window of bytes
//                               +------(promote)----> urgent lane, or a gated one
//
// What may not start yet, its gate being shut, goes into a gated lane: in the urgent lane nothing waits for
// more than the link. Gates of one event open in the order in which copies were submitted behind it, so these
// share a lane; others, and who comes out of that order, take another as long as there is one.
//
// A copy engine stays with a stream for as long as that has copies queued. So an urgent copy passes by making
// room: while one could start and has not, nothing more goes out in the background.
//
// Two more things hold the background back: what the process may use of the link's time, which it shares with
// others, as a rate of the fastest that the link has been seen; and collectives on the device, by whichever
// process, to which copies give way: then a chunk goes out each kLongestYield and no more. Neither concerns
// urgent copies.
//
// Every public call but close() may come from any thread. Whoever finds room dispatches: the submitter where
// nothing is ahead, else the engine's thread, which a Bell wakes when a chunk has completed. Nothing here
// waits on the host, but for a failed submit() (for what it had started), synchronize() and close().
//
// A failure of a stream (work that threw, on the emulated device) fails what is queued behind it there. Once
// that has come to its end the streams are as new.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "runtime/copy_cap.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/copy_events.hpp"
#include "runtime/event_watch.hpp"
#include "runtime/link_time.hpp"
#include "runtime/metrics.hpp"

namespace terrace {

// Wakes the engine's thread. Threads of the device ring it: a lock of a few instructions, no device call.
class Bell {
 public:
  void ring() {
    {
      const std::lock_guard lock(mutex_);
      rung_ = true;
    }
    woken_.notify_one();
  }
  // Until rung, stopped or `until`; nothing: no time limit.
  void wait(const std::stop_token& stop, std::optional<Nanoseconds> until);

 private:
  std::mutex mutex_;
  std::condition_variable_any woken_;
  bool rung_ = false;
};

// One submit(). What follows `on_done` is the queue's, under its lock.
struct CopyJob {
  CopyReason reason = CopyReason::kSpill;
  CopyPriority priority = CopyPriority::kUrgent;
  Bytes bytes;
  std::function<void(const Status&)> on_done;
  std::string label;

  Event gate{};             // what it was submitted behind, where that had not completed; to compare alone
  std::uint64_t order = 0;  // of submission
  std::vector<Transfer> pieces;  // from `next` on: not on the device yet
  std::size_t next = 0;
  Bytes rest;              // bytes of those
  bool held = true;        // some of it, be it zero bytes, is not on the device yet
  bool given_out = false;  // submit() has succeeded
  int in_flight = 0;       // chunks
  EventPool::Held begun;   // the first chunk has, and so its gate is open; null: nothing was sent
  EventPool::Held ready;   // completed once the first chunk may start; null: nothing to wait for
  std::array<EventPool::Held, 2> last;  // by priority: when its chunks of that have arrived; null: they have
  double seconds = 0;
  std::optional<Error> error;
};
using CopyJobRef = std::shared_ptr<CopyJob>;

class CopyQueue {
 public:
  struct Parts {
    Device& device;
    EventPool& events;
    std::shared_ptr<Bell> bell;
    Direction direction;
    const CopyEngine::Options& options;
  };
  explicit CopyQueue(Parts parts);
  ~CopyQueue();  // after close()
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;
  [[nodiscard]] Status open();  // takes its streams; once, before anything else

  // The job's pieces and labels are set. On error nothing of it moves any more.
  [[nodiscard]] Status submit(const CopyJobRef& job, Event after);
  // As CopyEngine::Ticket says.
  [[nodiscard]] bool done(const CopyJobRef& job);
  [[nodiscard]] Status synchronize(const CopyJobRef& job);
  [[nodiscard]] Status order_before(const CopyJobRef& job, Stream stream);
  [[nodiscard]] Status promote(const CopyJobRef& job);
  void cancel(const CopyJobRef& job);
  [[nodiscard]] Result<double> seconds(const CopyJobRef& job);
  void set_cap(double bytes_per_second);
  [[nodiscard]] double cap() const;  // the smaller of it and what the lease allows
  [[nodiscard]] Bytes held_back() const;

  struct Ended {  // somebody wants to know
    CopyJobRef job;
    Status status;
  };
  struct Turn {
    std::vector<Ended> ended;            // call their on_done
    std::optional<Nanoseconds> look_at;  // when to come back, rung or not
  };
  // What the engine's thread does each time it wakes.
  [[nodiscard]] Turn take_turn();
  // Cancels what is held back, refuses what is submitted from now on, waits for what is in flight, and gives
  // back the last who want to know.
  [[nodiscard]] std::vector<Ended> close();

 private:
  using LaneId = std::size_t;
  static constexpr LaneId kUrgentLane = 0, kBackgroundLane = 1, kFirstGatedLane = 2, kLanes = 4;
  static constexpr std::size_t kGateStreams = 2;
  struct Chunk {
    CopyJobRef job;
    Bytes size;
    EventPool::Held ready;  // completed once it may start; null: it might at once
    EventPool::Held begun, arrived;
  };
  struct Lane {
    Stream stream;
    std::unique_ptr<EventWatch> watch;  // of chunks whose completion somebody needs; made when first needed
    std::deque<Chunk> in_flight;
    std::size_t watched = 0;        // that many of them, from the front
    std::size_t begin_watched = 0;  // the same of those whose beginning somebody needs
    Bytes bytes;                    // in flight
  };
  // Holds the place of jobs whose `after` may be recorded again before they go out.
  struct GateStream {
    Stream stream;
    Event source{};          // of the newest gate
    EventPool::Held newest;  // null: there is none
  };

  // All of these: the lock is held.
  void reap();
  void retire(LaneId lane_id);
  void renew_streams();
  void dispatch();
  void send_background(const CopyJobRef& job);
  [[nodiscard]] bool may_go(const CopyJob& job);
  [[nodiscard]] std::optional<LinkHold> link_hold(Nanoseconds at);
  void follow_lease(Nanoseconds at);
  [[nodiscard]] bool gives_way(Nanoseconds at);
  void count_held(std::optional<LinkHold> hold, Nanoseconds at);
  void note_arrival(const Chunk& chunk, double seconds);
  [[nodiscard]] bool room_for(const CopyJob& job) const;
  [[nodiscard]] bool behind_the_gate_of_another(const CopyJob& job) const;
  [[nodiscard]] bool urgent_waits() const;
  [[nodiscard]] bool shut(const EventPool::Held& gate) const;
  [[nodiscard]] std::vector<Transfer> next_pieces(CopyJob& job, Bytes most) const;
  [[nodiscard]] Status send(LaneId lane_id, const CopyJobRef& job, Bytes most, const EventPool::Held& behind);
  [[nodiscard]] Status queue(LaneId lane_id, const CopyJobRef& job, std::span<const Transfer> pieces,
                             Bytes size, const EventPool::Held& ready);
  [[nodiscard]] Status submit_urgent(const CopyJobRef& job, Event after);
  [[nodiscard]] Status submit_background(const CopyJobRef& job, Event after);
  [[nodiscard]] Status gate(CopyJob& job, Event after);
  [[nodiscard]] GateStream& gates_for(Event after);
  [[nodiscard]] Result<LaneId> gated_lane(const CopyJob& job);
  [[nodiscard]] Status send_rest(const CopyJobRef& job);
  [[nodiscard]] Status take_stream(Stream& stream);
  [[nodiscard]] EventWatch* watch_of(Lane& lane);
  void watch(Lane& lane);
  void watch_begin(Lane& lane);
  void watch_urgent_begin();
  void unhold(const CopyJobRef& job);
  void fail(const CopyJobRef& job, const Error& error);
  void report_if_over(const CopyJobRef& job);
  [[nodiscard]] static bool over(const CopyJob& job) { return !job.held && job.in_flight == 0; }
  [[nodiscard]] static EventPool::Held& last(CopyJob& job, LaneId lane_id) {
    return job.last[lane_id == kBackgroundLane ? 1 : 0];
  }

  const Parts parts_;
  mutable std::mutex mutex_;
  std::array<Lane, kLanes> lanes_;  // the gated ones and the gates are made when first needed
  std::array<GateStream, kGateStreams> gates_;
  std::uint64_t submitted_ = 0;
  std::deque<CopyJobRef> held_;
  Bytes held_bytes_;
  CopyCap cap_;
  double wanted_cap_ = 0;  // by set_cap()
  LinkView link_;
  double fastest_ = 0;                       // bytes a second of this direction, as stated or seen
  bool lease_limits_ = false;                // more than wanted_cap_ does
  std::optional<Nanoseconds> yields_since_;  // to collectives
  std::optional<LinkHold> held_for_;         // since held_since_; none: for other reasons
  Nanoseconds held_since_{0};
  bool failed_ = false;  // a stream has; until all in flight has ended
  bool closed_ = false;
  int awaited_ = 0;  // given out, with an on_done, and not over
  std::vector<CopyJobRef> ended_;
};

}  // namespace terrace
