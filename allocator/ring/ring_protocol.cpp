#include "allocator/ring/ring_protocol.hpp"

#include <bit>
#include <cstdio>

#include "runtime/assert.hpp"

namespace terrace {

namespace {

std::string place_of(std::uint32_t sender, std::uint32_t receiver, std::uint64_t sequence,
                     std::uint32_t slots) {
  return "channel " + std::to_string(sender) + "->" + std::to_string(receiver) + ", slot " +
         std::to_string(ring_slot(sequence, slots)) + ", epoch " +
         std::to_string(ring_epoch(sequence, slots));
}

}  // namespace

RingSender::RingSender(const RingChannel& channel)
    : channel_(channel), head_(channel.first), tail_(channel.first) {
  TERRACE_CHECK(std::has_single_bit(channel.slots), "a channel has a power of two of slots");
}

std::uint32_t RingSender::credits() const {
  return channel_.slots - static_cast<std::uint32_t>(head_ - tail_);
}

void RingSender::observe_tail(std::uint64_t tail) {
  TERRACE_CHECK(ring_reached(head_, tail), "nothing is consumed that was not announced");
  if (ring_reached(tail, tail_)) tail_ = tail;
}

RingHeader RingSender::announce(Bytes wanted, std::uint32_t blocks) {
  TERRACE_CHECK(credits() > 0, "a message is announced with a credit in hand");
  RingHeader header;
  header.stamp = ring_stamp(head_);
  header.wanted = wanted.count();
  header.stored = wanted < channel_.slot_bytes ? wanted.count() : channel_.slot_bytes.count();
  header.piece = ring_piece_bytes(header.stored, blocks);
  ++head_;
  return header;
}

std::optional<RingStop> RingSender::overdue(const RingPatience& patience) const {
  if (credits() > 0 || !ring_expired(patience.now_ns, patience.progress_ns, patience.limit_ns))
    return std::nullopt;
  return RingStop{.what = static_cast<std::uint64_t>(RingWait::kCredit),
                  .peer = channel_.receiver,
                  .sequence = head_,
                  .piece = 0,
                  .head = head_,
                  .tail = tail_,
                  .waited_ns = patience.now_ns - patience.progress_ns};
}

RingReceiver::RingReceiver(const RingChannel& channel)
    : channel_(channel),
      head_(channel.first),
      next_(channel.first),
      tail_(channel.first),
      slots_(channel.slots) {
  TERRACE_CHECK(std::has_single_bit(channel.slots), "a channel has a power of two of slots");
}

void RingReceiver::observe_head(std::uint64_t head) {
  TERRACE_CHECK(ring_reached(tail_ + channel_.slots, head), "no more is announced than there are slots");
  if (ring_reached(head, head_)) head_ = head;
}

void RingReceiver::accept(const RingHeader& header) {
  TERRACE_CHECK(announced(), "a header is read once the head has passed it");
  TERRACE_CHECK(header.stamp == ring_stamp(next_), "the header is that of the next message");
  TERRACE_CHECK(header.stored <= channel_.slot_bytes.count() && header.stored <= header.wanted,
                "a message never holds more than its slot");
  const std::uint64_t pieces = ring_piece_count(header.stored, header.piece);
  slots_[ring_slot(next_, channel_.slots)] = {
      .header = header, .there = std::vector<bool>(pieces, false), .missing = pieces};
  ++next_;
}

void RingReceiver::observe_piece(std::uint64_t slot, std::uint64_t piece, std::uint64_t stamp) {
  Slot& at = slots_.at(slot);
  if (stamp != at.header.stamp || piece >= at.there.size() || at.there[piece]) return;
  at.there[piece] = true;
  --at.missing;
}

bool RingReceiver::complete() const {
  return next_ != tail_ && slots_[ring_slot(tail_, channel_.slots)].missing == 0;
}

std::uint64_t RingReceiver::release() {
  TERRACE_CHECK(complete(), "a slot is given back once all of its message has been there");
  return ++tail_;
}

std::optional<RingStop> RingReceiver::overdue(const RingPatience& patience) const {
  if (complete() || !ring_expired(patience.now_ns, patience.progress_ns, patience.limit_ns))
    return std::nullopt;
  RingStop stop{.what = static_cast<std::uint64_t>(RingWait::kMessage),
                .peer = channel_.sender,
                .sequence = tail_,
                .piece = 0,
                .head = head_,
                .tail = tail_,
                .waited_ns = patience.now_ns - patience.progress_ns};
  if (next_ == tail_) return stop;
  stop.what = static_cast<std::uint64_t>(RingWait::kPiece);
  const Slot& at = slots_[ring_slot(tail_, channel_.slots)];
  while (at.there[stop.piece]) ++stop.piece;
  return stop;
}

void RingWindow::pass() {
  TERRACE_CHECK(held() == 0, "what is held in place is released before");
  ++next_;
  ++released_;
}

void RingWindow::hold() {
  TERRACE_CHECK(!full(), "an exchange in place finds a slot");
  ++next_;
}

void RingWindow::release() {
  TERRACE_CHECK(held() > 0, "only what is held is released");
  ++released_;
}

std::string describe(const RingStop& stop, std::uint32_t rank, std::uint32_t slots) {
  const auto what = static_cast<RingWait>(stop.what);
  const auto peer = static_cast<std::uint32_t>(stop.peer);
  const bool sending = what == RingWait::kCredit || what == RingWait::kGrant;
  std::string text = "rank " + std::to_string(rank) + " waits for rank " + std::to_string(peer) + ": " +
                     place_of(sending ? rank : peer, sending ? peer : rank, stop.sequence, slots) +
                     ", head " + std::to_string(stop.head) + ", tail " + std::to_string(stop.tail) + ": ";
  if (what == RingWait::kPath) {
    return text + "the ranks took different paths; give the same size and path on every rank, after " +
           "register_receive() on all or on none";
  }
  text += "no ";
  switch (what) {
    case RingWait::kCredit:
      text += "slot is given back";
      break;
    case RingWait::kMessage:
      text += "message";
      break;
    case RingWait::kPiece:
      text += "piece " + std::to_string(stop.piece);
      break;
    case RingWait::kGrant:
      text += "open receive buffer";
      break;
    case RingWait::kPath:
    case RingWait::kNone:
      text += "reason known";
      break;
  }
  char waited[48];
  std::snprintf(waited, sizeof waited, " for %.3g s", static_cast<double>(stop.waited_ns) * 1e-9);
  return text + waited;
}

std::string describe(const RingOverflow& overflow, const RingChannel& channel) {
  return place_of(channel.sender, channel.receiver, overflow.stamp - 1, channel.slots) + ": " +
         format_bytes(Bytes(overflow.wanted)) + " to send, " + format_bytes(Bytes(overflow.stored)) +
         " fit; a slot holds " + format_bytes(channel.slot_bytes) +
         ": make the ring with a larger RingOptions::slot_bytes, or give a larger buffer";
}

}  // namespace terrace
