// Which work a free range must wait for, and how little of it.
//
// Each free into the pool gets a sequence number. A range remembers which streams freed into it and the
// newest number among those. When another stream is to use it, that stream waits on the device for the first
// fence (an event) recorded on the freeing stream at or after that number; where there is none yet, one is
// recorded now. So what was queued behind an older fence is not waited for, a free costs no event, and the
// host never waits. A fence known to have completed, or one that the stream already waits for, is not waited
// for again.
//
// At most four fences a stream are kept: the oldest makes way, and what it ordered is ordered by a later one.
// A stream that has ended has finished its work. At most 64 streams have a bit; the bit of one that has
// ended, or whose frees have all completed, goes to the next that asks.
//
// Not thread-safe: the owning pool locks.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "runtime/clock.hpp"
#include "runtime/device.hpp"

namespace terrace {

// The work that may still be using a free range.
struct Pending {
  std::uint64_t streams = 0;   // a bit for each stream, by its index
  std::uint64_t sequence = 0;  // of the newest free
};

class StreamOrder {
 public:
  static constexpr std::size_t kMostStreams = 64;
  using Index = std::uint32_t;

  explicit StreamOrder(Device& device) : device_(device) {}
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;
  ~StreamOrder();

  // The bit of a stream. Errors: kInvalidArgument (it has ended), kOutOfMemory (64 others have work pending).
  [[nodiscard]] Result<Index> index_of(Stream stream);
  [[nodiscard]] bool knows(Stream stream) const;
  // A held index keeps its stream: a thread's cache has blocks that were freed on it.
  void hold(Index index) { ++records_[index].holders; }
  void release(Index index) { --records_[index].holders; }

  // What a range freed on the stream now is pending on; nothing where the stream has ended.
  [[nodiscard]] Pending freed_on(Index index);

  // Whether `stream` could use the range with nothing to wait for, as far as is known without asking.
  [[nodiscard]] bool ready_for(Index stream, const Pending& pending) const;
  // Makes later work on `stream` wait for what is pending. On error some of it may be waited for.
  [[nodiscard]] Status order_behind(Index stream, const Pending& pending);
  // Whether what is pending is over. Asks the device, again and again until `patience_ends`: a stream with
  // nothing else to do passes a fence within microseconds; one that is at work is not waited for.
  [[nodiscard]] bool is_over(const Pending& pending, Nanoseconds patience_ends);
  // The host waits for what is pending.
  [[nodiscard]] Status finish(const Pending& pending);
  // The host waits for every free so far, even where fences fail.
  void finish_all();

 private:
  static constexpr std::size_t kMostFences = 4;
  struct Fence {
    Event event;
    std::uint64_t sequence = 0;  // every free with this number or less came before it
  };
  struct Record {
    Stream stream;
    std::uint32_t holders = 0;
    std::uint64_t newest_free = 0;
    std::uint64_t completed = 0;                          // frees up to here are known to be over
    std::deque<Fence> fences{};                           // by sequence
    std::array<std::uint64_t, kMostStreams> passed_by{};  // by stream: the fence of this one it waits for
  };
  // What must be waited for on one stream: the frees up to `sequence`; zero: nothing.
  [[nodiscard]] static std::uint64_t open_until(const Record& record, const Pending& pending);
  // The first fence at or after `sequence`, recorded now if need be; none where it has completed.
  [[nodiscard]] Result<std::optional<Fence>> fence_after(Record& record, std::uint64_t sequence);
  [[nodiscard]] Result<Event> spare_event(Record& record);
  void learn_completed(Record& record);
  // An index that nobody holds and whose frees are known to be over; recyclable() asks the device first.
  [[nodiscard]] std::optional<Index> over();
  [[nodiscard]] std::optional<Index> recyclable();

  Device& device_;
  std::vector<Record> records_;
  std::vector<Event> spare_;
  std::uint64_t sequence_ = 0;
};

}  // namespace terrace
