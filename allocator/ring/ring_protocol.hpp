// The protocol of a ring channel as pure state machines: no device, no memory, no clock, no lock.
//
// runtime/ring_exchange.hpp says what the words of a channel mean. Here are its two ends as values, the order
// in which they may change, what a wait that took too long has to say, and what one rank has queued. Words of
// the other end may be seen late, twice, or out of order among pieces; an end ignores what is old. What the
// protocol excludes is asserted: a tail beyond the head, a head beyond the slots, a header of another
// message.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/ring_exchange.hpp"
#include "runtime/units.hpp"

namespace terrace {

// When something last moved, and how long nothing may; nanoseconds of any one clock.
struct RingPatience {
  std::uint64_t now_ns = 0;
  std::uint64_t progress_ns = 0;
  std::uint64_t limit_ns = 0;
};

// What both ends of a channel are told at the start. `first` is the number of the first message.
struct RingChannel {
  std::uint32_t sender = 0;
  std::uint32_t receiver = 1;
  std::uint32_t slots = 1;  // a power of two
  Bytes slot_bytes;
  std::uint64_t first = 0;
};

class RingSender {
 public:
  explicit RingSender(const RingChannel& channel);
  [[nodiscard]] std::uint64_t head() const { return head_; }
  [[nodiscard]] std::uint64_t tail() const { return tail_; }  // as last seen
  [[nodiscard]] std::uint32_t credits() const;                // messages that may be announced now
  void observe_tail(std::uint64_t tail);
  // The header of the next message, which moves the head. Precondition: credits() > 0.
  RingHeader announce(Bytes wanted, std::uint32_t blocks);
  [[nodiscard]] std::optional<RingStop> overdue(const RingPatience& patience) const;

 private:
  const RingChannel channel_;
  std::uint64_t head_;
  std::uint64_t tail_;
};

class RingReceiver {
 public:
  explicit RingReceiver(const RingChannel& channel);
  [[nodiscard]] std::uint64_t head() const { return head_; }  // as last seen
  [[nodiscard]] std::uint64_t tail() const { return tail_; }
  void observe_head(std::uint64_t head);
  // Whether the next message is announced, and its header may be read.
  [[nodiscard]] bool announced() const { return head_ != next_; }
  // Takes the header of the next message. Precondition: announced().
  void accept(const RingHeader& header);
  // The word of one piece in a slot, seen at any time: old ones change nothing.
  void observe_piece(std::uint64_t slot, std::uint64_t piece, std::uint64_t stamp);
  // Whether all of the oldest unreleased message is there.
  [[nodiscard]] bool complete() const;
  // Gives the oldest slot back and returns the new tail. Precondition: complete().
  std::uint64_t release();
  [[nodiscard]] std::optional<RingStop> overdue(const RingPatience& patience) const;

 private:
  struct Slot {
    RingHeader header;
    std::vector<bool> there;  // by piece
    std::uint64_t missing = 0;
  };
  const RingChannel channel_;
  std::uint64_t head_;  // announced, as seen
  std::uint64_t next_;  // to accept
  std::uint64_t tail_;  // to release
  std::vector<Slot> slots_;
};

// What one rank has queued on its device: exchanges that give their slots back by themselves, and exchanges
// in place, whose slots are held until they are released in the same order.
class RingWindow {
 public:
  explicit RingWindow(std::uint32_t slots, std::uint64_t first = 0)
      : slots_(slots), next_(first), released_(first) {}
  [[nodiscard]] std::uint64_t next() const { return next_; }          // number of the next exchange
  [[nodiscard]] std::uint64_t released() const { return released_; }  // number of the oldest one held
  [[nodiscard]] std::uint64_t held() const { return next_ - released_; }
  // An exchange in place beyond this one would wait for itself.
  [[nodiscard]] bool full() const { return held() == slots_; }
  void pass();     // an exchange that holds nothing. Precondition: held() == 0
  void hold();     // an exchange in place. Precondition: !full()
  void release();  // of the oldest. Precondition: held() > 0

 private:
  std::uint32_t slots_;
  std::uint64_t next_;
  std::uint64_t released_;
};

// "rank 1 waits for rank 0: channel 0->1, slot 3, epoch 17, head 139, tail 136: no message for 2.0 s"
[[nodiscard]] std::string describe(const RingStop& stop, std::uint32_t rank, std::uint32_t slots);
// "channel 0->1, slot 3, epoch 17: 96.0 MiB to send, 64.0 MiB sent; ..."
[[nodiscard]] std::string describe(const RingOverflow& overflow, const RingChannel& channel);

}  // namespace terrace
