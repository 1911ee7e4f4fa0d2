// Where each cached output and saved activation is, and where it is going.
//
//            keep                spill             (copy done)
//   absent ---------> in_hbm ------------> leaving -----------> in_ddr
//                       ^  ^                  |                    | restore
//                       |  +---- recall ------+                    v
//                       +---------- (asked for, copy done) --- arriving
//
// take() ends an entry from any state and hands its bytes over, ordered on the compute stream. The store owns
// both sides of every copy in flight until the copy's event has completed, or until the compute stream is
// ordered behind it: no block is reused under a copy, and no restore can start before its own spill has
// finished. Called from one thread.
//
// Copies are in the background until somebody waits for them. One that fails on its way leaves its entry
// where the bytes still are: a spill in HBM, a restore in DDR.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/ddr_pool.hpp"
#include "allocator/hbm_pool.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/timeline/device_clock.hpp"
#include "swapcore/verifier.hpp"

namespace terrace {

// A block shared by its users; the last one gives it back to its pool.
using BlockRef = std::shared_ptr<const Block>;

// Whether HBM that held an activation is overwritten, in order of the compute stream, before it goes back to
// its pool: who reads it still then reads kPoisonByte and not, by luck, the right bytes. Builds with
// TERRACE_PARANOID do.
enum class Poison : std::uint8_t { kOff, kOn };
inline constexpr std::uint8_t kPoisonByte = 0xDB;
#ifdef TERRACE_PARANOID_CHECKS
inline constexpr Poison kPoisonReleased = Poison::kOn;
#else
inline constexpr Poison kPoisonReleased = Poison::kOff;
#endif
// A block of the pool, used on that stream, that goes back there with its last user.
[[nodiscard]] BlockRef shared_block(Device& device, HbmPool& pool, Stream stream, const Block& block,
                                    Poison poison = kPoisonReleased);

enum class Residency : std::uint8_t { kInHbm, kLeaving, kInDdr, kArriving };
[[nodiscard]] const char* name_of(Residency state);

// Entries are ordered by next use: the last in order is needed first in backward.
struct EntryKey {
  std::uint32_t micro_batch = 0;
  std::int32_t layer = 0;
  enum class What : std::uint8_t { kSaved = 0, kOutput = 1 } what = What::kOutput;
  std::uint32_t index = 0;  // the site, or the slot of a saved activation
  auto operator<=>(const EntryKey&) const = default;
};

class ResidencyStore {
 public:
  struct Parts {
    Device& device;
    HbmPool& hbm;
    DdrPool& ddr;
    CopyEngine& copies;
    Stream compute;
    Verify verify = Verify::kOff;
    const DeviceClock* clock = nullptr;                   // null: waits have no place in time
    std::function<std::string(const EntryKey&)> label{};  // of an entry's copies; null: they have none
    Poison poison = kPoisonReleased;
  };
  [[nodiscard]] static Result<std::unique_ptr<ResidencyStore>> create(Parts parts);
  ~ResidencyStore();

  // Takes hold of a block whose bytes are final in order of the compute stream. A key is kept once.
  void keep(const EntryKey& key, BlockRef block);
  // in_hbm -> leaving. Errors: kOutOfBudget (DDR), copy errors; the entry stays in_hbm.
  [[nodiscard]] Status spill(const EntryKey& key);
  // leaving -> in_ddr, now: the compute stream waits for the copy, and what it does from here on may have the
  // HBM. A host that runs ahead of the device thus holds what a plan says, and not what has not left yet.
  // Nothing to do in the other states, or where checksums are taken of what arrives. Errors: copy errors; the
  // entry stays leaving.
  [[nodiscard]] Status depart(const EntryKey& key);
  // in_ddr -> arriving, leaving -> in_hbm; nothing to do in the other states.
  // Errors: kOutOfBudget (HBM), copy errors; the entry stays where it is.
  [[nodiscard]] Status restore(const EntryKey& key);
  [[nodiscard]] std::optional<Residency> state(const EntryKey& key) const;
  [[nodiscard]] Bytes size(const EntryKey& key) const;  // zero: no such entry
  // Whether no look at its bytes (Parts::verify) is under way or to come.
  [[nodiscard]] bool looked_at(const EntryKey& key);

  // The entries of a layer, in order of key.
  [[nodiscard]] std::vector<EntryKey> in_layer(int layer, std::uint32_t micro_batch) const;

  struct Taken {
    BlockRef block;       // ready on the compute stream
    bool waited = false;  // the compute stream may have to wait for the copy: collect_waits() tells
  };
  // Ends the entry. Errors: kNotFound; kOutOfBudget where it was in_ddr and HBM is full: the entry stays; kIo
  // where its bytes changed in DDR, as far as Parts::verify looks, or its spill failed after depart(): the
  // entry is dropped. The host may wait for a checksum.
  [[nodiscard]] Result<Taken> take(const EntryKey& key);
  // Ends the entry and forgets its bytes.
  void drop(const EntryKey& key);
  void drop_all(EntryKey::What what);

  // Moves on what copies have finished: leaving -> in_ddr, arriving -> in_hbm, and gives spent host blocks
  // back.
  void poll();
  // The host waits until one more copy has let go of its HBM. False where none is in flight. Errors: those of
  // the copy, which has failed: its entry is in HBM again.
  [[nodiscard]] Result<bool> wait_for_a_spill();

  // Takes back the HBM of one entry that was restored, or is being restored, ahead of its use: an output is
  // dropped, a saved activation is in DDR again. The host waits for its copy. False where there is none.
  [[nodiscard]] bool undo_a_restore();

  // The entry in HBM of that kind whose next use is farthest, if any.
  [[nodiscard]] std::optional<EntryKey> farthest_in_hbm(EntryKey::What what) const;
  // Bytes of HBM that entries hold: in_hbm, leaving and arriving.
  [[nodiscard]] Bytes hbm_bytes() const { return hbm_bytes_; }
  [[nodiscard]] Bytes hbm_bytes(EntryKey::What what) const;
  // Bytes of DDR that entries of that kind hold: leaving, in_ddr, arriving.
  [[nodiscard]] Bytes ddr_bytes(EntryKey::What what) const;

  // Bytes that entries hold in the two tiers, settled, on their way out or on their way in.
  struct ByState {
    std::array<Bytes, 3> hbm, ddr;  // by KeptState
  };
  [[nodiscard]] std::array<ByState, 2> bytes_by_state() const;  // by EntryKey::What

  // What became of a take() or a depart() that found its copy in flight.
  struct Wait {
    EntryKey key;
    Direction direction = Direction::kH2D;  // kH2D: a restore was waited for; kD2H: a spill
    bool late = false;                      // the compute stream really waited
    double seconds = 0;                     // how long
    double began = 0;                       // of Parts::clock
  };
  // Those known since the last call; the rest follows in a later one.
  [[nodiscard]] std::vector<Wait> collect_waits();
  [[nodiscard]] Bytes spilled() const { return spilled_; }
  [[nodiscard]] Bytes restored() const { return restored_; }
  [[nodiscard]] std::uint64_t damaged() const { return damaged_; }

 private:
  struct Entry {
    Residency state = Residency::kInHbm;
    Bytes size;
    BlockRef hbm;              // in_hbm, leaving, arriving
    std::optional<Block> ddr;  // leaving, in_ddr, arriving
    CopyEngine::Ticket copy;   // leaving, arriving
    CopyEngine::Ticket
        left;  // in_ddr, arriving: a spill that depart() ordered, until it is seen to have ended
    Verifier::CheckRef check{};  // in_ddr, arriving; null: not looked at
    bool damaged = false;        // in_hbm: came back with another checksum
  };
  struct Retired {  // what a copy that nobody waits for any more still reads and writes
    Block ddr;
    CopyEngine::Ticket copy, left;  // either may be invalid
    BlockRef still_read;
  };
  struct Probe {  // the compute stream's arrival at a wait, and its way out
    EntryKey key;
    Direction direction;
    Event arrived, resumed;
  };
  using Entries = std::map<EntryKey, Entry>;

  ResidencyStore(Parts parts, Event fence)
      : parts_(std::move(parts)), fence_(fence), verifier_(parts_.verify) {}
  [[nodiscard]] Status start_restore(const EntryKey& key, Entry& entry);
  [[nodiscard]] std::string label_of(const EntryKey& key) const;
  [[nodiscard]] Status wait_on_compute(const EntryKey& key, Direction direction,
                                       const CopyEngine::Ticket& copy);
  void settle(Entries::iterator it);
  [[nodiscard]] Error refuse_damaged(Entries::iterator it);
  static bool ended(const CopyEngine::Ticket& copy) { return !copy.valid() || copy.done(); }
  static void end(const CopyEngine::Ticket& copy);
  void retire(Entry& entry, BlockRef still_read);
  void forget(Entries::iterator it);
  void hold(const EntryKey& key, Bytes size);
  void let_go(const EntryKey& key, Bytes size);

  Parts parts_;
  Event fence_;
  Entries entries_;
  std::list<EntryKey> leaving_;  // oldest first
  std::list<Retired> retired_;
  std::list<Probe> probes_;
  Bytes hbm_bytes_, saved_bytes_;
  Bytes spilled_, restored_;
  std::uint64_t damaged_ = 0;
  Verifier verifier_;
};

}  // namespace terrace
