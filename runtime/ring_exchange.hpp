// One rank's side of an exchange through ring buffers, as a device runs it: plain addresses, and the layout
// and arithmetic of the ring memory on which both ends of a channel agree. Read by g++ and by nvcc.
//
// A channel leads from one sender to one receiver and lies in the receiver's ring memory. Exchange number
// `sequence` puts one message in each channel, in slot sequence mod slots; epoch = sequence / slots says how
// often the slot was used before. Words of a channel, all 64 bits and growing by themselves:
//   head     at the receiver, written by the sender: messages announced
//   tail     at the sender, written by the receiver: messages consumed; slots - (head - tail) are the credits
//   pieces   at the receiver, one word a piece and slot: stamp (sequence + 1) once its bytes are there
//   grant    at the sender, written by the receiver: its receive buffer is open for exchanges before this
// A message is announced by its header and the head before its bytes: so counts travel in band, ahead of the
// data, and the host never learns them. Every wait is for a word to reach a value; nobody waits for a message
// of the same exchange in order to send, so blocks that run one after another, senders first, never lock up.
// A channel has 2 slots at least. A packed receive places its part by the headers of the senders before it,
// and what keeps such a header is that sender's credit alone, which another block may have given back
// already: with one slot the next message's header could lie over it. With two that is the next but one,
// which a sender begins once it has received all of the exchange between, and this rank sends that after this
// exchange. (Straight into receive buffers a sender waits for the grant, which the first block of every rank
// gives.)
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define TERRACE_RING_INLINE __host__ __device__ inline
#else
#define TERRACE_RING_INLINE inline
#endif

namespace terrace {

inline constexpr std::uint32_t kRingMostRanks = 64;
inline constexpr std::uint32_t kRingMostPieces = 2048;            // of one message
inline constexpr std::uint64_t kRingLine = 128;                   // words of different writers lie apart
inline constexpr std::uint64_t kRingSmallestPiece = 32ULL << 10;  // less is all flags and fences
inline constexpr std::uint64_t kRingUsualPiece = 64ULL << 10;     // of a long message
inline constexpr std::uint64_t kRingSlotAlignment = 512;
inline constexpr std::uint64_t kRingShareUnit = 4ULL << 10;

// --- The arithmetic of a channel; all of it holds across the wrap of 64 bits, slots being a power of two ---

TERRACE_RING_INLINE std::uint64_t ring_slot(std::uint64_t sequence, std::uint32_t slots) {
  return sequence & (slots - 1);
}
TERRACE_RING_INLINE std::uint64_t ring_epoch(std::uint64_t sequence, std::uint32_t slots) {
  return sequence / slots;
}
TERRACE_RING_INLINE std::uint64_t ring_stamp(std::uint64_t sequence) { return sequence + 1; }
// Whether a word that only grows has come as far as `wanted`.
TERRACE_RING_INLINE bool ring_reached(std::uint64_t word, std::uint64_t wanted) {
  return static_cast<std::int64_t>(word - wanted) >= 0;
}
// The tail that the sender of message `sequence` waits for: one slot free.
TERRACE_RING_INLINE std::uint64_t ring_tail_wanted(std::uint64_t sequence, std::uint32_t slots) {
  return sequence + 1 - slots;
}
// Whether whoever last saw something move at `since` has waited too long.
TERRACE_RING_INLINE bool ring_expired(std::uint64_t now_ns, std::uint64_t since_ns, std::uint64_t limit_ns) {
  return now_ns - since_ns > limit_ns;
}
TERRACE_RING_INLINE std::uint64_t ring_round_up(std::uint64_t size, std::uint64_t unit) {
  return (size + unit - 1) / unit * unit;
}
// Bytes of one piece of a message that `senders` blocks send: two pieces a block at least, so that the
// receiver copies the first while the second is on its way.
TERRACE_RING_INLINE std::uint64_t ring_piece_bytes(std::uint64_t message, std::uint32_t senders) {
  const std::uint64_t parts = 2ULL * senders;
  std::uint64_t piece = ring_round_up((message + parts - 1) / parts, kRingSmallestPiece);
  if (piece == 0) piece = kRingSmallestPiece;
  if (piece > kRingUsualPiece) piece = kRingUsualPiece;
  const std::uint64_t least =
      ring_round_up((message + kRingMostPieces - 1) / kRingMostPieces, kRingSmallestPiece);
  return piece < least ? least : piece;
}
TERRACE_RING_INLINE std::uint64_t ring_piece_count(std::uint64_t message, std::uint64_t piece) {
  return message == 0 || piece == 0 ? 0 : (message + piece - 1) / piece;
}

// Bytes of a part that each of `blocks` blocks copies in one go.
TERRACE_RING_INLINE std::uint64_t ring_share_bytes(std::uint64_t part, std::uint32_t blocks) {
  return ring_round_up((part + blocks - 1) / blocks, kRingShareUnit);
}

// --- The layout of one rank's ring memory ---

// In the receiver's memory, one a slot; valid once the head has passed the message.
struct alignas(64) RingHeader {
  std::uint64_t stamp = 0;   // sequence + 1
  std::uint64_t wanted = 0;  // bytes the sender had
  std::uint64_t stored = 0;  // bytes it sends; fewer than wanted: overflow
  std::uint64_t piece = 0;   // bytes of one piece; 0: the bytes do not go through the slot
};

struct RingLayout {
  std::uint32_t ranks = 0;
  std::uint32_t slots = 0;       // of each channel; a power of two, 2 at least
  std::uint64_t slot_bytes = 0;  // a multiple of kRingSlotAlignment
};

TERRACE_RING_INLINE std::uint64_t ring_headers_offset(const RingLayout& layout) {
  return (4ULL * layout.ranks + 1) * kRingLine;  // behind heads, tails, grants, counters and the stop word
}
TERRACE_RING_INLINE std::uint64_t ring_pieces_offset(const RingLayout& layout) {
  return ring_headers_offset(layout) + std::uint64_t{layout.ranks} * layout.slots * sizeof(RingHeader);
}
// Where the words end and the slots begin: what must be zero before the first exchange.
TERRACE_RING_INLINE std::uint64_t ring_data_offset(const RingLayout& layout) {
  const std::uint64_t words = std::uint64_t{layout.ranks} * layout.slots * kRingMostPieces;
  return ring_round_up(ring_pieces_offset(layout) + words * sizeof(std::uint64_t), kRingSlotAlignment);
}
TERRACE_RING_INLINE std::uint64_t ring_memory_bytes(const RingLayout& layout) {
  return ring_data_offset(layout) + std::uint64_t{layout.ranks - 1} * layout.slots * layout.slot_bytes;
}

// --- What a device is asked to do ---

enum class RingStep : std::uint32_t {
  kNothing,   // one block that returns: loads the code
  kExchange,  // send to all; with a receive buffer: copy what arrives there, packed, and give the slots back
  kRelease,   // give the slots of an exchange without a receive buffer back
  kOpen,      // tell all that the receive buffer is open, and wait until theirs are
  kClose,     // tell all that their bytes are in place, wait for the same from them, and count them received
  kDirect,    // equal parts, written straight into receive buffers: open, send, and close in one step
};

// Blocks of one exchange. All of them are resident at once where the device has room (exchange_blocks()).
struct RingShape {
  std::uint32_t senders = 0;    // for each peer
  std::uint32_t receivers = 0;  // for each peer; in place one block a peer waits, direct one for all
  std::uint32_t copiers = 0;    // of the rank's own part
};

// kPath: waiting is no use, for the peer takes another path (through slots, or straight) in this exchange.
enum class RingWait : std::uint64_t { kNone, kCredit, kMessage, kPiece, kGrant, kPath };

// The first wait that ran out of time; `what` is written last.
struct RingStop {
  std::uint64_t what = 0;  // RingWait
  std::uint64_t peer = 0;
  std::uint64_t sequence = 0;
  std::uint64_t piece = 0;
  std::uint64_t head = 0;
  std::uint64_t tail = 0;
  std::uint64_t waited_ns = 0;
};
// A message that was more than its slot, or than the buffer it comes from or goes to; `stamp` is written
// last.
struct RingOverflow {
  std::uint64_t stamp = 0;
  std::uint64_t wanted = 0;
  std::uint64_t stored = 0;
};
// In pinned host memory, one a rank: what the host may look at any time without asking the device.
struct RingReport {
  RingStop stop;
  RingOverflow sent[kRingMostRanks];
  RingOverflow received[kRingMostRanks];
};

struct RingExchange {
  RingStep step = RingStep::kNothing;
  std::uint32_t rank = 0;
  RingLayout layout;
  RingShape shape;
  std::uint64_t sequence = 0;
  std::uint64_t released = 0;  // messages this rank has given back before this step; for the diagnosis
  std::byte* base[kRingMostRanks] = {};  // every rank's ring memory, as this device reaches it

  const std::byte* send = nullptr;            // the parts for rank 0, 1, ... next to each other
  std::uint64_t send_size = 0;                // what the buffer holds: no byte beyond it is read
  const std::uint64_t* send_bytes = nullptr;  // device memory, one count a rank; null: equal_bytes each
  std::uint64_t equal_bytes = 0;
  std::byte* receive = nullptr;            // the parts of rank 0, 1, ... next to each other; null: in place
  std::uint64_t receive_size = 0;          // no byte beyond it is written
  std::uint64_t* receive_bytes = nullptr;  // device memory, one count a rank, written; null: not wanted
  // Of kDirect: every rank's receive buffer, as this device reaches it.
  std::byte* direct[kRingMostRanks] = {};

  RingReport* report = nullptr;  // pinned host memory
  std::uint64_t timeout_ns = 0;  // of each wait
};

// --- Where the words of a channel are. `at` says in whose memory, `of` which peer they are about ---

TERRACE_RING_INLINE std::uint64_t* ring_word(const RingExchange& x, std::uint32_t at, std::uint32_t row,
                                             std::uint32_t of) {
  const std::uint64_t line = std::uint64_t{row} * x.layout.ranks + of;
  return reinterpret_cast<std::uint64_t*>(x.base[at] + line * kRingLine);
}
TERRACE_RING_INLINE std::uint64_t* ring_head(const RingExchange& x, std::uint32_t at, std::uint32_t of) {
  return ring_word(x, at, 0, of);
}
TERRACE_RING_INLINE std::uint64_t* ring_tail(const RingExchange& x, std::uint32_t at, std::uint32_t of) {
  return ring_word(x, at, 1, of);
}
TERRACE_RING_INLINE std::uint64_t* ring_grant(const RingExchange& x, std::uint32_t at, std::uint32_t of) {
  return ring_word(x, at, 2, of);
}
// Blocks of the running step that are done with their share: of what `of` sent, or, direct, of what goes
// there.
TERRACE_RING_INLINE std::uint64_t* ring_counter(const RingExchange& x, std::uint32_t at, std::uint32_t of) {
  return ring_word(x, at, 3, of);
}
// Not zero once a wait of rank `at` ran out of time: the ring is at its end.
TERRACE_RING_INLINE std::uint64_t* ring_stop_word(const RingExchange& x, std::uint32_t at) {
  return ring_word(x, at, 4, 0);
}
TERRACE_RING_INLINE std::uint64_t ring_cell(const RingExchange& x, std::uint32_t of) {
  return std::uint64_t{of} * x.layout.slots + ring_slot(x.sequence, x.layout.slots);
}
TERRACE_RING_INLINE RingHeader* ring_header(const RingExchange& x, std::uint32_t at, std::uint32_t of) {
  return reinterpret_cast<RingHeader*>(x.base[at] + ring_headers_offset(x.layout)) + ring_cell(x, of);
}
TERRACE_RING_INLINE std::uint64_t* ring_pieces(const RingExchange& x, std::uint32_t at, std::uint32_t of) {
  return reinterpret_cast<std::uint64_t*>(x.base[at] + ring_pieces_offset(x.layout)) +
         ring_cell(x, of) * kRingMostPieces;
}
// The slot of this exchange; a rank keeps none for itself, so `at` and `of` differ.
TERRACE_RING_INLINE std::byte* ring_slot_data(const RingExchange& x, std::uint32_t at, std::uint32_t of) {
  const std::uint64_t channel = of < at ? of : of - 1;
  return x.base[at] + ring_data_offset(x.layout) +
         (channel * x.layout.slots + ring_slot(x.sequence, x.layout.slots)) * x.layout.slot_bytes;
}

// The grid of one step.
TERRACE_RING_INLINE std::uint32_t ring_block_count(const RingExchange& x) {
  const std::uint32_t peers = x.layout.ranks - 1;
  if (x.step == RingStep::kDirect) return peers * x.shape.senders + x.shape.copiers + 1;
  if (x.step != RingStep::kExchange) return 1;
  if (x.receive == nullptr) return peers * (x.shape.senders + 1);
  return peers * (x.shape.senders + x.shape.receivers) + x.shape.copiers;
}

}  // namespace terrace
