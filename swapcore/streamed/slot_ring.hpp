// Long-lived bytes whose home is pinned host memory, and which pass through a few slots of HBM.
//
//            expect               acquire             release
//   at home ---------> arriving -----------> in use ---------> held   (a copy home under way, where written)
//      ^                  |                     ^                |
//      |                  |                     +--- acquire ----+
//      +------- the slot is given to another item ---------------+
//
// An item is what travels together: a chunk of an optimizer's state, the experts of a layer. Its user is one
// stream, which works on the slot between acquire() and release(). Both directions move at once, and all is
// ordered by events: a slot is filled again behind its last use and its copy home, an item is fetched behind
// its own last copy home. The host waits in drain(), forget() and the destructor alone, and for what comes
// from a file or goes there (a tier that no stream can wait for) in acquire() and renew_behind() too.
//
// An item may have parts, and be brought without some of them: experts that no token goes to. A part may be
// kept in HBM beside the slots, and then comes from there; or live on another tier than pinned memory. A
// store there that fails is the error of every expect(), acquire() and drain() from then on.
//
// Called from one thread. After an error the bytes of the item in hand are undefined, at home too where it
// was written: whoever needs them gives up. Nothing leaks. Why: docs/design/0012-streamed-weights.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "allocator/tier.hpp"
#include "runtime/copy_engine.hpp"
#include "swapcore/residency.hpp"
#include "swapcore/streamed/wait_probes.hpp"

namespace terrace {

class SlotRing {
 public:
  enum class Flow : std::uint8_t { kIn, kOut, kBoth };  // towards HBM, home, either way
  // In a slot each piece begins at a multiple of kPieceAlignment, in the order given.
  struct Piece {
    Address home = nullptr;  // pinned; outlives the ring
    Bytes size;
    Flow flow = Flow::kBoth;
    std::uint32_t part = 0;
    TierBlock cold{};  // on the tier, in the place of a home; has been stored
  };
  // Of a block: where it lies in a slot, and where it lives (pinned; null: settled on the tier).
  struct PartRange {
    std::uint32_t part = 0;
    Bytes at, size;
    Address home = nullptr;
  };
  using PartSet = std::vector<bool>;  // by part
  static constexpr Bytes kPieceAlignment = 256_B;
  [[nodiscard]] static Bytes slot_bytes(std::span<const Piece> pieces);

  struct ItemId {
    std::uint32_t index = 0;
    auto operator<=>(const ItemId&) const = default;
  };
  enum class Fill : std::uint8_t { kFromHome, kNothing };  // kNothing: the user writes all of it first
  enum class Use : std::uint8_t { kRead, kWritten };       // kWritten: pieces that flow home are copied there

  struct Parts {
    Device& device;
    CopyEngine& copies;
    Stream allocated_on;  // the slots are ready in order of this stream
    Stream user;
    CopyReason reason = CopyReason::kFetch;
    Tier* cold = nullptr;  // where parts live that have no home in pinned memory; outlives the ring
  };
  // Errors: what the device said. `slots` is not empty.
  [[nodiscard]] static Result<std::unique_ptr<SlotRing>> create(const Parts& parts,
                                                                std::vector<BlockRef> slots);
  // Cancels copies held back and waits for the others and for the user's stream. What was written and not
  // drained may not be home.
  ~SlotRing();
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;

  // Precondition of both: it fits into every slot.
  [[nodiscard]] ItemId add(std::vector<Piece> pieces);
  // A block that only flows in; acquire() gives its address alone. The ranges are in order, and what lies
  // between them nobody reads.
  [[nodiscard]] ItemId add_block(Bytes size, std::span<const PartRange> ranges);
  // The part's ranges, in the order of add_block(), live on the cold tier.
  void settle_on_tier(ItemId item, std::uint32_t part, std::vector<TierBlock> ranges);

  // From now on fetches bring these parts, at first all; a slot that has others besides keeps them until it
  // is given away. Precondition: not in use.
  void want(ItemId item, PartSet parts);
  // Keeps a copy of the part in HBM, its ranges one behind another, from the next time on that it is
  // acquired. Null: no longer. The memory is ready on the user's stream, and stays until the ring is gone; it
  // goes from part to part of this item alone. Errors: what the device said.
  [[nodiscard]] Status keep(ItemId item, std::uint32_t part, Address at);
  // Where the part is kept, if its copy is made and current.
  [[nodiscard]] Address kept_at(ItemId item, std::uint32_t part) const;
  // Later work on `stream` may write kept copies of the item.
  [[nodiscard]] Status order_behind_kept(Stream stream, ItemId item) const;

  // What is used next, in that order: brought as far as slots are free of these and of what is in use.
  // Errors: copy errors, those of the slot's last copy home among them.
  [[nodiscard]] Status expect(std::span<const ItemId> next);
  // Whether acquire() would give the item without the host waiting for a file; and that wait, after which it
  // would. Errors: as of acquire().
  [[nodiscard]] bool is_here(ItemId item) const;
  [[nodiscard]] Status bring_here(ItemId item);
  // The addresses of the item's pieces, ready on the user's stream. Precondition: not in use, and fewer items
  // in use than slots. Errors: as of expect().
  [[nodiscard]] Result<std::span<const Address>> acquire(ItemId item, Fill fill = Fill::kFromHome);
  // The user's stream has all its work on the item. Errors: copy errors.
  [[nodiscard]] Status release(ItemId item, Use use);

  // Later work on `stream` waits for the item's last copy home.
  [[nodiscard]] Status order_behind_write(Stream stream, ItemId item);
  // Others write the item's home: what a slot holds of it is given up, and every later fetch waits for what
  // was recorded last in the event. Precondition: not in use. The event outlives the ring's last call.
  enum class Kept : std::uint8_t { kStale, kRenewed };  // kRenewed: they write the kept copies too
  void renew_behind(ItemId item, Event event, Kept kept = Kept::kStale);
  // The same of one part alone, which is fetched anew; what else a slot holds stays.
  void renew_part_behind(ItemId item, std::uint32_t part, Event event);
  // The host waits until every home holds what was written last. Errors: those of any copy since the last
  // call.
  [[nodiscard]] Status drain();
  // The host is about to write the item's home: waits for its copies. Precondition: not in use.
  [[nodiscard]] Status forget(ItemId item);

  struct Counters {
    Bytes fetched, written_back;           // over the link
    Bytes from_kept;                       // copied inside HBM
    Bytes from_tier, to_tier;              // of those fetched and written back, by the cold tier
    std::uint64_t fetches = 0, found = 0;  // found: acquired from a slot that held it already
    Bytes timed;                           // of those fetched, and how long the link took for them
    double timed_seconds = 0;
  };
  [[nodiscard]] const Counters& counters() const { return counters_; }
  // Seconds that the user's stream waited in acquire(), known since the last call.
  [[nodiscard]] double collect_waits() { return probes_.collect(); }

 private:
  enum class Copying : std::uint8_t { kToSlot, kToKept };
  enum class State : std::uint8_t { kEmpty, kArriving, kInUse, kHeld };
  using Ticket = std::shared_ptr<CopyEngine::Ticket>;
  struct Slot {
    BlockRef block;
    Event used{};  // the user's last work on it
    State state = State::kEmpty;
    std::uint32_t item = 0;  // unless empty
    std::uint64_t age = 0;   // of the last fetch or release
    Ticket in{}, out{};      // null: none in flight, as far as anybody has looked
    Bytes in_bytes{};        // of `in`
    std::vector<TierTicket> loads{}, stores{};
    bool from_kept = false;  // some of it is copied on the gate
    PartSet present{};
    std::vector<Address> pieces{};  // what acquire() hands out
  };
  struct Placed {  // a piece, and where it lies in a slot
    Piece piece;
    Bytes at;
  };
  struct KeptCopy {
    Address at = nullptr;
    bool current = false;
  };
  struct Item {
    std::vector<Placed> pieces;
    bool is_block = false;
    PartSet wanted;
    std::vector<KeptCopy> kept;  // by part
    Bytes out_bytes;
    int slot = -1;
    Ticket written{};                // its last copy home
    Event renewed{};                 // behind which others have written its home
    Event part_renewed{};            // and a part of it
    Event kept_read{}, kept_made{};  // on the gate, on the user's stream; only where something is kept
  };

  SlotRing(const Parts& parts, Stream gate, Event fence)
      : parts_(parts), gate_(gate), fence_(fence), probes_(parts.device) {}
  enum class Leaving : std::uint8_t { kPassed, kTaken };  // slots that the cold tier still reads
  [[nodiscard]] Slot* free_slot(std::span<const ItemId> spared, Leaving leaving);
  [[nodiscard]] static bool all_done(const std::vector<TierTicket>& transfers);
  void end_stores(Slot& slot);
  [[nodiscard]] Status store_cold(Slot& slot, const Item& item);
  [[nodiscard]] Status fence(Slot& slot, Item& item);
  void give_up(Slot& slot);
  [[nodiscard]] Status bring(Slot& slot, ItemId id);
  [[nodiscard]] Status bring_kept(Slot& slot, Item& item, const PartSet& missing);
  [[nodiscard]] Status bring_cold(Slot& slot, Item& item, const PartSet& missing);
  [[nodiscard]] Status bring_over_the_link(Slot& slot, Item& item, const PartSet& missing);
  [[nodiscard]] Status wait_for(Slot& slot, const Item& item);
  [[nodiscard]] Status make_kept(Slot& slot, Item& item);
  [[nodiscard]] bool has_all_wanted(const Item& item) const;
  [[nodiscard]] std::vector<Transfer> kept_transfers(const Slot& slot, const Item& item, std::uint32_t part,
                                                     Copying way) const;
  [[nodiscard]] ItemId add(Item item, Bytes size, std::uint32_t parts);
  static void age_kept(Item& item);
  void note_rate(Slot& slot);
  void occupy(Slot& slot, ItemId id);
  void end(Ticket& ticket) const;

  Parts parts_;
  Stream gate_;  // waits for what a fetch comes behind, and holds nobody else up
  Event fence_;
  WaitProbes probes_;
  std::vector<Slot> slots_;
  std::vector<Item> items_;
  std::uint64_t age_ = 0;
  Status stored_;  // the first store that failed
  Counters counters_;
};

}  // namespace terrace
