// What one block of an exchange does (runtime/ring_exchange.hpp): the one text of the protocol, compiled into
// the kernel by nvcc and into the emulated device by g++, so that what the CPU's tests show holds for the
// GPU.
//
// A Block is a group of threads that run this code together:
//   thread(), threads()    who am I; thread 0 leads
//   load(word)             acquire, for all devices
//   store(word, value)     release, for all devices: what the block wrote before its last sync() is seen
//   first add(word)              one more, acquire and release within the device; gives what was there
//   claim(word)            true for the first to ask
//   sync(); agree(bool)    a barrier; whether all threads said true. What thread 0 acquired before agree()
//   holds
//                          for the copies behind it
//   copy(to, from, bytes)  asked of all threads; complete for others after sync()
//   now_ns(), pause()      a clock for differences; a breath between two looks at a word
#pragma once

#include "runtime/ring_exchange.hpp"

#ifdef __CUDACC__
#define TERRACE_RING_BLOCK \
  template <class Block>   \
  __device__ __forceinline__
#else
#define TERRACE_RING_BLOCK \
  template <class Block>   \
  inline
#endif

namespace terrace {

// What a rank waits for, and what to say if it never comes.
struct RingAwaited {
  RingWait what;
  std::uint32_t peer;
  std::uint64_t piece;
  const std::uint64_t* word;
  std::uint64_t wanted;
};

struct RingSpan {
  std::uint64_t offset = 0;  // in the packed buffer
  std::uint64_t wanted = 0;
  std::uint64_t stored = 0;
};

// Whether `peer` has begun this exchange on another path: a grant is given for what goes straight alone, and
// a message without pieces is no message of a slot.
TERRACE_RING_BLOCK bool ring_paths_differ(const RingExchange& x, Block& block, std::uint32_t peer) {
  const std::uint64_t stamp = ring_stamp(x.sequence);
  const bool announced = ring_reached(block.load(ring_head(x, x.rank, peer)), stamp);
  const bool slots = x.step == RingStep::kExchange;
  if (announced) return (ring_header(x, x.rank, peer)->piece != 0) != slots;
  return slots && block.load(ring_grant(x, x.rank, peer)) == stamp;
}

TERRACE_RING_BLOCK void ring_give_up(const RingExchange& x, Block& block, const RingAwaited& awaited,
                                     std::uint64_t waited_ns) {
  if (!block.claim(ring_stop_word(x, x.rank))) return;
  const RingWait what = ring_paths_differ(x, block, awaited.peer) ? RingWait::kPath : awaited.what;
  const bool sending = what == RingWait::kCredit || what == RingWait::kGrant;
  RingStop& stop = x.report->stop;
  stop.peer = awaited.peer;
  stop.sequence = x.sequence;
  stop.piece = awaited.piece;
  stop.head = sending ? x.sequence : block.load(ring_head(x, x.rank, awaited.peer));
  stop.tail = sending ? block.load(ring_tail(x, x.rank, awaited.peer)) : x.released;
  stop.waited_ns = waited_ns;
  block.store(&stop.what, static_cast<std::uint64_t>(what));
}

// One thread's wait. False: too late, or somebody else of this rank has given up.
TERRACE_RING_BLOCK bool ring_poll(const RingExchange& x, Block& block, const RingAwaited& awaited) {
  if (ring_reached(block.load(awaited.word), awaited.wanted)) return true;
  const std::uint64_t since = block.now_ns();
  while (!ring_reached(block.load(awaited.word), awaited.wanted)) {
    if (block.load(ring_stop_word(x, x.rank)) != 0) return false;
    const std::uint64_t now = block.now_ns();
    if (ring_expired(now, since, x.timeout_ns)) {
      ring_give_up(x, block, awaited, now - since);
      return false;
    }
    block.pause();
  }
  return true;
}

// One thread's wait for the sender of `message` to open its own buffer: whoever does goes straight too. So
// the path is known while the data is still on its way; the header behind the data would be two more trips to
// memory. False where the message came first, which no order forbids, or too late.
TERRACE_RING_BLOCK bool ring_poll_grant(const RingExchange& x, Block& block, const RingAwaited& message) {
  const std::uint64_t* grant = ring_grant(x, x.rank, message.peer);
  const std::uint64_t since = block.now_ns();
  while (!ring_reached(block.load(grant), message.wanted)) {
    if (ring_reached(block.load(message.word), message.wanted)) return false;
    if (block.load(ring_stop_word(x, x.rank)) != 0) return false;
    if (ring_expired(block.now_ns(), since, x.timeout_ns)) return false;  // the caller's wait says so
    block.pause();
  }
  return true;
}

// One thread's wait for the message of `sender`. False also where that took another path.
TERRACE_RING_BLOCK bool ring_poll_message(const RingExchange& x, Block& block, std::uint32_t sender) {
  const RingAwaited message{RingWait::kMessage, sender, 0, ring_head(x, x.rank, sender),
                            ring_stamp(x.sequence)};
  if (x.step != RingStep::kExchange && ring_poll_grant(x, block, message))
    return ring_poll(x, block, message);
  if (!ring_poll(x, block, message)) return false;
  if (!ring_paths_differ(x, block, sender)) return true;
  ring_give_up(x, block, message, 0);
  return false;
}

// The whole block's: what the awaited word stands for is seen by all its threads.
TERRACE_RING_BLOCK bool ring_wait(const RingExchange& x, Block& block, const RingAwaited& awaited) {
  bool there = true;
  if (block.thread() == 0) there = ring_poll(x, block, awaited);
  return block.agree(there);
}

TERRACE_RING_BLOCK void ring_note(Block& block, RingOverflow& note, std::uint64_t stamp,
                                  const RingSpan& span) {
  if (block.thread() != 0 || span.wanted <= span.stored) return;
  note.wanted = span.wanted;
  note.stored = span.stored;
  block.store(&note.stamp, stamp);
}

TERRACE_RING_INLINE std::uint64_t ring_least(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }
TERRACE_RING_INLINE std::uint64_t ring_sum(std::uint64_t a, std::uint64_t b) {
  return a + b < a ? ~std::uint64_t{0} : a + b;
}
TERRACE_RING_INLINE std::uint64_t ring_count_for(const RingExchange& x, std::uint32_t peer) {
  return x.send_bytes == nullptr ? x.equal_bytes : x.send_bytes[peer];
}

// What this rank has for `peer`, and how much of it fits: no more than a slot, nothing beyond the send
// buffer.
TERRACE_RING_INLINE RingSpan ring_outgoing(const RingExchange& x, std::uint32_t peer) {
  RingSpan span;
  for (std::uint32_t before = 0; before < peer; ++before)
    span.offset = ring_sum(span.offset, ring_count_for(x, before));
  span.offset = ring_least(span.offset, x.send_size);
  span.wanted = ring_count_for(x, peer);
  span.stored = ring_least(span.wanted, x.send_size - span.offset);
  if (peer != x.rank) span.stored = ring_least(span.stored, x.layout.slot_bytes);
  return span;
}

TERRACE_RING_INLINE RingSpan ring_part_of(const RingExchange& x, std::uint32_t sender) {
  if (sender == x.rank) return ring_outgoing(x, sender);
  const RingHeader* header = ring_header(x, x.rank, sender);
  RingSpan span;
  span.wanted = header->wanted;
  span.stored = header->stored;
  return span;
}

// Where the part of `sender` goes, and how much of it fits. Precondition: it and all before it are announced.
TERRACE_RING_INLINE RingSpan ring_incoming(const RingExchange& x, std::uint32_t sender) {
  std::uint64_t offset = 0;
  for (std::uint32_t before = 0; before < sender; ++before)
    offset = ring_sum(offset, ring_part_of(x, before).stored);
  RingSpan span = ring_part_of(x, sender);
  span.offset = ring_least(offset, x.receive_size);
  span.stored = ring_least(span.stored, x.receive_size - span.offset);
  return span;
}

TERRACE_RING_BLOCK bool ring_wait_announced(const RingExchange& x, Block& block, std::uint32_t sender) {
  if (sender == x.rank) return true;
  bool there = true;
  if (block.thread() == 0) there = ring_poll_message(x, block, sender);
  return block.agree(there);
}

// One thread writes the header, and then the head that makes it valid.
TERRACE_RING_BLOCK void ring_announce(const RingExchange& x, Block& block, std::uint32_t peer,
                                      const RingSpan& span, std::uint64_t piece) {
  RingHeader* header = ring_header(x, peer, x.rank);
  header->stamp = ring_stamp(x.sequence);
  header->wanted = span.wanted;
  header->stored = span.stored;
  header->piece = piece;
  block.store(ring_head(x, peer, x.rank), ring_stamp(x.sequence));
}

// Block `lane` of the senders to `peer`: every senders-th piece into the peer's slot, a stamp behind each.
TERRACE_RING_BLOCK void ring_send(const RingExchange& x, Block& block, std::uint32_t peer,
                                  std::uint32_t lane) {
  const RingSpan span = ring_outgoing(x, peer);
  const std::uint64_t piece = ring_piece_bytes(span.stored, x.shape.senders);
  if (!ring_wait(x, block,
                 {RingWait::kCredit, peer, 0, ring_tail(x, x.rank, peer),
                  ring_tail_wanted(x.sequence, x.layout.slots)}))
    return;
  if (lane == 0) {
    if (block.thread() == 0) ring_announce(x, block, peer, span, piece);
    ring_note(block, x.report->sent[peer], ring_stamp(x.sequence), span);
  }
  std::byte* slot = ring_slot_data(x, peer, x.rank);
  std::uint64_t* stamps = ring_pieces(x, peer, x.rank);
  const std::uint64_t pieces = ring_piece_count(span.stored, piece);
  for (std::uint64_t at = lane; at < pieces; at += x.shape.senders) {
    const std::uint64_t from = at * piece;
    block.copy(slot + from, x.send + span.offset + from, ring_least(piece, span.stored - from));
    block.sync();
    if (block.thread() == 0) block.store(&stamps[at], ring_stamp(x.sequence));
  }
}

// Block `lane` of the receivers from `sender`: every receivers-th piece out of the slot as soon as it is
// there; who is last gives the slot back.
TERRACE_RING_BLOCK void ring_receive(const RingExchange& x, Block& block, std::uint32_t sender,
                                     std::uint32_t lane) {
  for (std::uint32_t rank = 0; rank <= sender; ++rank) {
    if (!ring_wait_announced(x, block, rank)) return;
  }
  const RingSpan span = ring_incoming(x, sender);
  const std::uint64_t piece = ring_header(x, x.rank, sender)->piece;
  const std::byte* slot = ring_slot_data(x, x.rank, sender);
  const std::uint64_t* stamps = ring_pieces(x, x.rank, sender);
  // All that was sent is waited for, also what finds no room: the slot may not be given back before.
  const std::uint64_t pieces = ring_piece_count(ring_header(x, x.rank, sender)->stored, piece);
  for (std::uint64_t at = lane; at < pieces; at += x.shape.receivers) {
    if (!ring_wait(x, block, {RingWait::kPiece, sender, at, &stamps[at], ring_stamp(x.sequence)})) return;
    const std::uint64_t from = at * piece;
    if (from < span.stored)
      block.copy(x.receive + span.offset + from, slot + from, ring_least(piece, span.stored - from));
  }
  block.sync();
  if (lane == 0) {
    if (block.thread() == 0 && x.receive_bytes != nullptr) x.receive_bytes[sender] = span.stored;
    ring_note(block, x.report->received[sender], ring_stamp(x.sequence), span);
  }
  if (block.thread() != 0) return;
  std::uint64_t* counter = ring_counter(x, x.rank, sender);
  if (block.add(counter) + 1 < x.shape.receivers) return;
  *counter = 0;
  block.store(ring_tail(x, sender, x.rank), ring_stamp(x.sequence));
}

// In place: waits until all of a message is in its slot, where it stays until the release.
TERRACE_RING_BLOCK void ring_await(const RingExchange& x, Block& block, std::uint32_t sender) {
  if (!ring_wait_announced(x, block, sender)) return;
  const RingSpan span = ring_part_of(x, sender);
  const std::uint64_t* stamps = ring_pieces(x, x.rank, sender);
  const std::uint64_t pieces = ring_piece_count(span.stored, ring_header(x, x.rank, sender)->piece);
  bool there = true;
  for (std::uint64_t at = block.thread(); there && at < pieces; at += block.threads()) {
    there = ring_poll(x, block, {RingWait::kPiece, sender, at, &stamps[at], ring_stamp(x.sequence)});
  }
  if (!block.agree(there)) return;
  if (block.thread() == 0 && x.receive_bytes != nullptr) x.receive_bytes[sender] = span.stored;
  ring_note(block, x.report->received[sender], ring_stamp(x.sequence), span);
}

// The rank's own part, straight from buffer to buffer.
TERRACE_RING_BLOCK void ring_copy_own(const RingExchange& x, Block& block, std::uint32_t lane) {
  for (std::uint32_t rank = 0; rank < x.rank; ++rank) {
    if (!ring_wait_announced(x, block, rank)) return;
  }
  const RingSpan from = ring_outgoing(x, x.rank);
  const RingSpan to = ring_incoming(x, x.rank);
  for (std::uint64_t at = lane * kRingUsualPiece; at < to.stored; at += x.shape.copiers * kRingUsualPiece) {
    block.copy(x.receive + to.offset + at, x.send + from.offset + at,
               ring_least(kRingUsualPiece, to.stored - at));
  }
  if (lane != 0) return;
  if (block.thread() == 0 && x.receive_bytes != nullptr) x.receive_bytes[x.rank] = to.stored;
  ring_note(block, x.report->received[x.rank], ring_stamp(x.sequence), to);
}

// Senders come first and receivers last: where not all blocks fit at once, none waits for one behind it.
// Neighbouring blocks serve different peers, and every rank begins with another one.
TERRACE_RING_BLOCK void ring_exchange(const RingExchange& x, Block& block, std::uint32_t index) {
  const std::uint32_t ranks = x.layout.ranks;
  const std::uint32_t peers = ranks - 1;
  const std::uint32_t sending = peers * x.shape.senders;
  if (index < sending) {
    ring_send(x, block, (x.rank + 1 + index % peers) % ranks, index / peers);
    return;
  }
  index -= sending;
  const std::uint32_t copying = x.receive == nullptr ? 0 : x.shape.copiers;
  if (index < copying) {
    ring_copy_own(x, block, index);
    return;
  }
  index -= copying;
  const std::uint32_t sender = (x.rank + ranks - 1 - index % peers) % ranks;
  if (x.receive == nullptr) {
    if (index == 0 && block.thread() == 0 && x.receive_bytes != nullptr)
      x.receive_bytes[x.rank] = ring_outgoing(x, x.rank).stored;
    ring_await(x, block, sender);
  } else {
    ring_receive(x, block, sender, index / peers);
  }
}

TERRACE_RING_BLOCK void ring_release(const RingExchange& x, Block& block) {
  for (std::uint32_t peer = block.thread(); peer < x.layout.ranks; peer += block.threads()) {
    if (peer != x.rank) block.store(ring_tail(x, peer, x.rank), ring_stamp(x.sequence));
  }
}

// Tells all that this rank's receive buffer is open.
TERRACE_RING_BLOCK void ring_open_own(const RingExchange& x, Block& block) {
  for (std::uint32_t peer = block.thread(); peer < x.layout.ranks; peer += block.threads()) {
    if (peer != x.rank) block.store(ring_grant(x, peer, x.rank), ring_stamp(x.sequence));
  }
}

// Waits until the bytes of all are in place, and counts them received.
TERRACE_RING_BLOCK void ring_await_closed(const RingExchange& x, Block& block) {
  for (std::uint32_t peer = block.thread(); peer < x.layout.ranks; peer += block.threads()) {
    if (peer != x.rank && !ring_poll_message(x, block, peer)) return;
    if (x.receive_bytes != nullptr) x.receive_bytes[peer] = x.equal_bytes;
    if (peer != x.rank) block.store(ring_tail(x, peer, x.rank), ring_stamp(x.sequence));
  }
}

TERRACE_RING_BLOCK void ring_open(const RingExchange& x, Block& block) {
  ring_open_own(x, block);
  for (std::uint32_t peer = block.thread(); peer < x.layout.ranks; peer += block.threads()) {
    if (peer == x.rank) continue;
    if (!ring_poll(x, block,
                   {RingWait::kGrant, peer, 0, ring_grant(x, x.rank, peer), ring_stamp(x.sequence)}))
      return;
    if (!ring_poll(x, block,
                   {RingWait::kCredit, peer, 0, ring_tail(x, x.rank, peer),
                    ring_tail_wanted(x.sequence, x.layout.slots)}))
      return;
  }
}

TERRACE_RING_BLOCK void ring_close(const RingExchange& x, Block& block) {
  if (block.load(ring_stop_word(x, x.rank)) != 0) return;  // not every buffer was open: nothing is in place
  for (std::uint32_t peer = block.thread(); peer < x.layout.ranks; peer += block.threads()) {
    if (peer != x.rank) ring_announce(x, block, peer, {0, x.equal_bytes, x.equal_bytes}, 0);
  }
  ring_await_closed(x, block);
}

// Share `lane` of `lanes` of this rank's part for `rank`, straight into the receive buffer there.
TERRACE_RING_BLOCK void ring_copy_share(const RingExchange& x, Block& block, std::uint32_t rank,
                                        std::uint32_t lane, std::uint32_t lanes) {
  const std::uint64_t share = ring_share_bytes(x.equal_bytes, lanes);
  const std::uint64_t from = lane * share;
  if (from >= x.equal_bytes) return;
  block.copy(x.direct[rank] + x.rank * x.equal_bytes + from, x.send + rank * x.equal_bytes + from,
             ring_least(share, x.equal_bytes - from));
}

// Block `lane` of those that write to `peer`, once its buffer is open; who is last says that all is in place.
TERRACE_RING_BLOCK void ring_push(const RingExchange& x, Block& block, std::uint32_t peer,
                                  std::uint32_t lane) {
  if (!ring_wait(x, block, {RingWait::kGrant, peer, 0, ring_grant(x, x.rank, peer), ring_stamp(x.sequence)}))
    return;
  ring_copy_share(x, block, peer, lane, x.shape.senders);
  block.sync();
  if (block.thread() != 0) return;
  std::uint64_t* counter = ring_counter(x, x.rank, peer);
  if (block.add(counter) + 1 < x.shape.senders) return;
  *counter = 0;
  if (ring_poll(x, block,
                {RingWait::kCredit, peer, 0, ring_tail(x, x.rank, peer),
                 ring_tail_wanted(x.sequence, x.layout.slots)}))
    ring_announce(x, block, peer, {0, x.equal_bytes, x.equal_bytes}, 0);
}

// The first block opens this rank's buffer to all before it waits for anything, and only the last one waits
// for data: so here, too, blocks may run one after another.
TERRACE_RING_BLOCK void ring_direct(const RingExchange& x, Block& block, std::uint32_t index) {
  const std::uint32_t ranks = x.layout.ranks;
  const std::uint32_t peers = ranks - 1;
  if (index == 0) ring_open_own(x, block);
  if (index < peers * x.shape.senders) {
    ring_push(x, block, (x.rank + 1 + index % peers) % ranks, index / peers);
    return;
  }
  index -= peers * x.shape.senders;
  if (index < x.shape.copiers) {
    ring_copy_share(x, block, x.rank, index, x.shape.copiers);
  } else {
    ring_await_closed(x, block);
  }
}

// Block `index` of ring_block_count().
TERRACE_RING_BLOCK void ring_run(const RingExchange& x, Block& block, std::uint32_t index) {
  switch (x.step) {
    case RingStep::kNothing:
      return;
    case RingStep::kExchange:
      return ring_exchange(x, block, index);
    case RingStep::kRelease:
      return ring_release(x, block);
    case RingStep::kOpen:
      return ring_open(x, block);
    case RingStep::kClose:
      return ring_close(x, block);
    case RingStep::kDirect:
      return ring_direct(x, block, index);
  }
}

}  // namespace terrace
