// The stable-address form: blocks whose pointer never changes, while the memory under it is exchanged between
// HBM and pinned host memory that the device reaches at the same address.
//
//   user    Uses: enter the gates of the blocks its pointers lead to, give the work to a stream, leave
//   mover   shut the gate, wait until nobody is inside -> events behind the streams that used it -> copy to
//           the other side's own address -> unmap, map -> open
//
// Remapping is not atomic: between unmap and map an access faults, and a write between copy and remap is
// lost. So a block is remapped only while its gate is shut and the events of its users have passed, and the
// gate is shut from before the copy until the new memory may be accessed. A block in DDR may be used where it
// lies, over the link: the first such use maps it there. Nobody waits for the device: a user waits at the
// gate of a block that moves.
//
// Work whose pointers are not known uses everything: it enters the one gate that stands before all of them,
// and from then on whatever leaves stays reachable.
// Blocks that others have registered are pinned to HBM.
//
// Users and everybody else may call from any thread; moves are made by a thread of the space. The space
// decides nothing: orders come from above. Why: docs/design/0013-stable-addresses.md.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "allocator/extent_map.hpp"
#include "runtime/clock.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/copy_events.hpp"
#include "swapcore/stable/backing_store.hpp"
#include "swapcore/stable/stable_block.hpp"
#include "swapcore/stable/use_log.hpp"
#include "swapcore/stable/user_streams.hpp"

namespace terrace {

class StableSpace {
 public:
  struct Options {
    Bytes span = 64_GiB;    // of addresses: the most that all blocks take, rounded to granules
    Bytes hbm_budget;       // of what backs blocks in HBM, and is kept to back others
    Bytes batch = 256_MiB;  // each way two of them, or two blocks, are under way at a time
    std::shared_ptr<HostLease> lease;
    std::vector<int> nodes{0};  // NUMA nodes of the host to take memory from
  };
  // Device, copies and streams outlive it. Errors: kNotSupported (the device cannot remap, or create host
  // memory that it reaches at a mapped address), kOutOfBudget, kOutOfMemory.
  [[nodiscard]] static Result<std::unique_ptr<StableSpace>> create(Device& device, CopyEngine& copies,
                                                                   UserStreams& streams,
                                                                   const Options& options);
  // Waits for moves under way. Precondition: every block freed, nobody inside.
  ~StableSpace();
  StableSpace(const StableSpace&) = delete;
  StableSpace& operator=(const StableSpace&) = delete;

  // A block in HBM, at an address that is a multiple of the device's granularity, its size rounded up to
  // that. Errors: kOutOfBudget (with the bytes that are lacking: order others to DDR, and ask again),
  // kOutOfMemory, kInvalidArgument (size zero).
  [[nodiscard]] Result<Address> allocate(Bytes size);
  // No use begins after this; the memory goes when the last has ended. Errors: kInvalidArgument (no block
  // begins there).
  [[nodiscard]] Status free(Address at);

  // Asks for the block to be moved; the last order counts. Orders are carried out in the order given; one to
  // HBM waits for room while anything moves, and fails when nothing does. Errors: kInvalidArgument (no block
  // begins there; pinned).
  [[nodiscard]] Status order(Address at, Place place);
  // The host waits until the block is where the last order wants it, or until that has failed. Errors: those
  // of the move: kOutOfBudget (of either side), kOutOfMemory, copy errors; the block is then where it was.
  [[nodiscard]] Status await(Address at);
  // The block stays in HBM until unpinned as often; waits for it to be there. Errors: as of await().
  [[nodiscard]] Status pin(Address at);
  [[nodiscard]] Status unpin(Address at);
  // The block stays where it is now, for good: for who has seen its memory and not only its address. Again is
  // harmless. Errors: kInvalidArgument (no block begins there; it moves: pause first).
  [[nodiscard]] Status hold(Address at);

  // Nothing is moved or given back from when this returns until resume(), as often; blocks stay usable where
  // they are. False: what was under way has not ended within `patience`, and only nothing new is begun.
  // await() does not wait meanwhile: kCancelled.
  bool pause(std::chrono::milliseconds patience);
  void resume();
  [[nodiscard]] bool paused() const { return pauses_.load(std::memory_order_acquire) > 0; }

  // Whether whoever says nothing of it can reach a block in DDR at its address. So it is at first, and what
  // goes to DDR is mapped where it was, which costs about what copying it does. From let_out_of_reach() on it
  // is mapped there only for a use, and from keep_reachable() on always, for good, what is in DDR already
  // included.
  void let_out_of_reach() {
    Reach at_first = Reach::kAtFirst;
    if (reach_.load(std::memory_order_relaxed) == Reach::kAtFirst) [[unlikely]]
      reach_.compare_exchange_strong(at_first, Reach::kForUses);
  }
  void keep_reachable();
  // The block that the pointer leads to, if to any, can be reached until it moves. Errors: what the device
  // said.
  [[nodiscard]] Status show(const void* pointer);

  struct View {
    Address at = nullptr;
    std::uint32_t number = 0;  // never another block's
    Bytes size;
    Place place = Place::kHbm;
    std::uint64_t last_use = 0;  // turns count uses of the space
    bool pinned = false;         // or held
    bool moving = false;         // or ordered to
    bool leaving = false;        // for DDR
    bool coming = false;         // to HBM
    bool awaits_room = false;    // ordered to HBM, and has taken none of it yet
  };
  [[nodiscard]] std::vector<View> blocks() const;  // in order of addresses
  // Where the pointer leads, if into a block.
  [[nodiscard]] std::optional<View> find(const void* pointer) const;
  // All blocks lie in [base(), base() + span()).
  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] Bytes span() const { return span_; }

  struct Counters {
    std::uint64_t spills = 0, restores = 0;
    Bytes spilled, restored;
    std::uint64_t failed_moves = 0;  // the block stayed where it was
    std::uint64_t shown = 0;         // blocks in DDR that were mapped for a use over the link
    Bytes host_made;                 // of DDR, taken from the system so far
    double moving_seconds = 0;       // that something was on its way, and
    double remap_seconds = 0;        // of the mover's, in unmapping and mapping
    double prepare_seconds = 0;      // and in finding memory to move to
    double both_ways_seconds = 0;    // with copies of both directions under way
    std::uint64_t waits = 0;         // of users, at a gate
    double wait_seconds = 0;
    Bytes hbm_held, hbm_peak;  // by blocks and kept handles; never above the budget
    Bytes live, live_peak;     // of blocks, wherever they are
    Bytes in_ddr, in_ddr_peak;
  };
  [[nodiscard]] Counters counters() const;
  [[nodiscard]] const UseLog& uses() const { return log_; }  // by number
  [[nodiscard]] Bytes hbm_room() const { return backing_->hbm_room(); }
  [[nodiscard]] Bytes hbm_budget() const { return backing_->hbm_budget(); }
  [[nodiscard]] Bytes hbm_held() const { return backing_->hbm_held(); }
  [[nodiscard]] Bytes hbm_kept() const { return backing_->hbm_kept(); }  // of that, by no block
  // Two instructions: something is in DDR.
  [[nodiscard]] bool any_in_ddr() const { return spilled_.load(std::memory_order_relaxed) > 0; }
  [[nodiscard]] bool busy() const { return busy_.load(std::memory_order_relaxed); }  // something moves
  void set_hbm_budget(Bytes budget);  // lower: handles kept for others go at once, blocks stay until ordered

  // The uses of one launch, copy or library call. The same object may be used again and again: it keeps its
  // memory.
  class Uses {
   public:
    explicit Uses(StableSpace& space) : space_(space) {}
    ~Uses() { end(); }
    Uses(const Uses&) = delete;
    Uses& operator=(const Uses&) = delete;
    // Enters the blocks that these lead to, waiting at the gates of those that move, and mapping those in DDR
    // that nobody could reach. Words that lead nowhere are passed over. Precondition: ended.
    void begin(std::span<const void* const> pointers, StreamSlot slot);
    // The same where all of them are in HBM; else enters nothing, and false.
    [[nodiscard]] bool begin_in_hbm(std::span<const void* const> pointers, StreamSlot slot);
    // The same of every block there is or will be meanwhile.
    void begin_everything(StreamSlot slot);
    // The work has been given to the stream.
    void end();

   private:
    [[nodiscard]] UseGate* enter_all(std::span<const void* const> pointers);
    [[nodiscard]] Address first_out_of_reach() const;
    void leave_all();
    void note(StreamSlot slot);
    StableSpace& space_;
    std::vector<StableBlock*> inside_;
    bool everything_ = false;
  };

 private:
  struct Move {
    StableBlock* block = nullptr;
    Place to = Place::kHbm;
    HbmHandle hbm{};
    HostBacking host{};
    CopyEngine::Ticket copy{};
    Status failed{};
    bool burial = false;      // not a move: its block has been freed
    std::uint64_t users = 0;  // as taken from the block
    EventPool::Held quiet{};  // when all of its users have ended; null: it had none
  };
  // Started and not over, in the order in which they were.
  using Flights = std::deque<Move>;
  StableSpace(Device& device, CopyEngine& copies, UserStreams& streams, const Options& options);
  [[nodiscard]] Status open(const Options& options);

  void wait_at(UseGate& gate);
  [[nodiscard]] StableBlock* block_at(Address at) const;  // mutex_ held; null: none begins there
  [[nodiscard]] static View view_of(const StableBlock& block);
  [[nodiscard]] Result<Address> take_addresses(Bytes size);
  void give_back_addresses(Address at, Bytes size);
  [[nodiscard]] StableBlock& new_block();  // mutex_ held
  void enqueue(StableBlock& block);        // mutex_ held

  // The mover's, but for what they say.
  void serve(const std::stop_token& stop);
  [[nodiscard]] bool can_move(const StableBlock& block, Bytes room) const;  // mutex_ held
  [[nodiscard]] bool any_can_move() const;                                  // mutex_ held
  [[nodiscard]] bool any_is_shown() const;                                  // mutex_ held
  [[nodiscard]] bool has_work() const;                                      // mutex_ held
  void note_place(const StableBlock& block, Place from, Place to);          // mutex_ held
  void refuse_the_rest();                                                   // mutex_ held
  [[nodiscard]] std::vector<Move> next_moves(const Flights& flights);       // mutex_ held
  void start(std::vector<Move>& moves);
  [[nodiscard]] Status prepare(Move& move);
  [[nodiscard]] Status fence(std::uint64_t slots, std::vector<EventPool::Held>& fences);
  [[nodiscard]] Result<EventPool::Held> quiet_after(std::uint64_t slots);
  [[nodiscard]] Status send(Move& move);
  [[nodiscard]] bool over(const Move& move) const;
  std::size_t finish_some(Flights& flights);
  void finish(Move& move);
  [[nodiscard]] Status exchange(const Move& move);
  void settle(Move& move, const Status& moved);
  void bury(Move& move, const Status& quiet);
  void await_news(std::uint64_t seen);
  void note_time(const Flights& flights);  // mutex_ held

  // Any thread's: maps a block in DDR at its address.
  [[nodiscard]] Status reveal(Address at);

  Device& device_;
  CopyEngine& copies_;
  UserStreams& streams_;
  const Bytes span_, batch_;
  EventPool events_;
  Address base_ = nullptr;
  std::unique_ptr<BackingStore> backing_;
  std::unique_ptr<StableTable> table_;
  Stream order_{};  // waits for the users' events, so that copies wait for one; the mover's

  UseGate everything_;
  std::atomic<std::uint64_t> everything_users_{0};
  std::atomic<std::uint32_t> everything_waits_{0};
  UseLog log_;
  std::atomic<std::uint64_t> waits_{0}, wait_nanoseconds_{0};
  std::atomic<int> pauses_{0};             // written under mutex_
  std::atomic<std::uint64_t> spilled_{0};  // blocks in DDR
  std::atomic<bool> busy_{false};          // something moves; written under mutex_
  enum class Reach : std::uint8_t { kAtFirst, kForUses, kAlways };
  std::atomic<Reach> reach_{Reach::kAtFirst};
  std::atomic<bool> all_reachable_{false};  // for good

  // The mover's.
  double prepare_seconds_ = 0, remap_seconds_ = 0;
  Nanoseconds noted_at_{};
  bool everything_shut_ = false;
  std::vector<EventPool::Held> everything_fences_;  // behind uses of everything; those that have not passed

  mutable std::mutex mutex_;  // all below, and what stable_block.hpp says
  std::condition_variable_any changed_;
  ExtentMap free_addresses_;
  std::deque<StableBlock> storage_;
  std::vector<StableBlock*> idle_;  // that are no block at present
  std::map<Address, StableBlock*> blocks_;
  std::deque<StableBlock*> orders_;
  std::uint32_t made_ = 0;                // blocks so far
  std::uint64_t freed_ = 0, buried_ = 0;  // of them
  std::uint64_t news_ = 0;                // orders, and what lets others be carried out
  Counters counters_;
  std::jthread mover_;  // last: it uses all of the above
};

}  // namespace terrace
