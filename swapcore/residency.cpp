#include "swapcore/residency.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {
constexpr double kLateSeconds = 50e-6;  // a shorter wait is the cost of an event, not of a copy

void give_back(DdrPool& pool, const Block& block) {
#ifndef NDEBUG
  std::memset(block.address, kPoisonByte, block.size.count());  // who reads it still shall see it
#endif
  const Status freed = pool.free(block);
  TERRACE_CHECK(freed.ok(), "the store frees each block of host memory once");
}
}  // namespace

const char* name_of(Residency state) {
  switch (state) {
    case Residency::kInHbm:
      return "in_hbm";
    case Residency::kLeaving:
      return "leaving";
    case Residency::kInDdr:
      return "in_ddr";
    case Residency::kArriving:
      return "arriving";
  }
  return "?";
}

Result<std::unique_ptr<ResidencyStore>> ResidencyStore::create(Parts parts) {
  auto fence = parts.device.create_event();
  if (!fence) return std::move(fence).error();
  return std::unique_ptr<ResidencyStore>(new ResidencyStore(std::move(parts), *fence));
}

ResidencyStore::~ResidencyStore() {
  while (!entries_.empty()) forget(entries_.begin());
  for (const Retired& retired : retired_) {
    end(retired.copy);
    end(retired.left);
    give_back(parts_.ddr, retired.ddr);
  }
  retired_.clear();
  for (const Probe& probe : probes_) {
    (void)parts_.device.synchronize(probe.resumed);
    parts_.device.destroy_event(probe.arrived);
    parts_.device.destroy_event(probe.resumed);
  }
  parts_.device.destroy_event(fence_);
}

BlockRef shared_block(Device& device, HbmPool& pool, Stream stream, const Block& block, Poison poison) {
  return {new Block(block), [&device, &pool, stream, poison](const Block* held) {
            if (poison == Poison::kOn && held->pool == Pool::kActivation)
              (void)device.fill(stream, held->address, kPoisonByte, held->size);
            // Refused in a child of fork(), where the memory is the parent's. The compute stream has its
            // place among those the pool orders by from its first block on.
            (void)pool.free(stream, *held);
            delete held;
          }};
}

void ResidencyStore::hold(const EntryKey& key, Bytes size) {
  hbm_bytes_ += size;
  if (key.what == EntryKey::What::kSaved) saved_bytes_ += size;
}

void ResidencyStore::let_go(const EntryKey& key, Bytes size) {
  hbm_bytes_ -= size;
  if (key.what == EntryKey::What::kSaved) saved_bytes_ -= size;
}

Bytes ResidencyStore::hbm_bytes(EntryKey::What what) const {
  return what == EntryKey::What::kSaved ? saved_bytes_ : hbm_bytes_ - saved_bytes_;
}

void ResidencyStore::keep(const EntryKey& key, BlockRef block) {
  Entry entry;
  entry.size = block->size;
  entry.hbm = std::move(block);
  hold(key, entry.size);
  const bool fresh = entries_.emplace(key, std::move(entry)).second;
  TERRACE_CHECK(fresh, "an entry is kept once and taken before it is kept again");
}

Status ResidencyStore::spill(const EntryKey& key) {
  auto it = entries_.find(key);
  TERRACE_CHECK(it != entries_.end() && it->second.state == Residency::kInHbm,
                "only what is in HBM is spilled");
  Entry& entry = it->second;
  auto room = parts_.ddr.allocate(entry.size, entry.hbm->pool);
  if (!room) return room.error();
  Status ready = parts_.device.record(parts_.compute, fence_);
  if (ready) {
    const Transfer transfer{room->address, entry.hbm->address, entry.size};
    const bool saved = key.what == EntryKey::What::kSaved;
    auto copy = parts_.copies.submit({.direction = Direction::kD2H,
                                      .after = fence_,
                                      .reason = saved ? CopyReason::kOffload : CopyReason::kSpill,
                                      .priority = CopyPriority::kBackground,
                                      .label = label_of(key)},
                                     {&transfer, 1});
    if (copy) {
      entry.copy = std::move(copy).value();
      entry.ddr = *room;
      entry.state = Residency::kLeaving;
      leaving_.push_back(key);
      spilled_ += entry.size;
      return {};
    }
    ready = copy.error();
  }
  give_back(parts_.ddr, *room);
  return ready;
}

Status ResidencyStore::depart(const EntryKey& key) {
  auto it = entries_.find(key);
  if (it == entries_.end() || it->second.state != Residency::kLeaving) return {};
  settle(it);
  Entry& entry = it->second;
  if (entry.state != Residency::kLeaving || parts_.verify != Verify::kOff) return {};
  if (auto waits = wait_on_compute(key, Direction::kD2H, entry.copy); !waits) return waits;
  let_go(key, entry.size);
  entry.hbm.reset();
  entry.left = std::move(entry.copy);
  entry.state = Residency::kInDdr;
  return {};
}

// HBM for the bytes, ordered on the compute stream behind whatever used that range before; then the copy,
// behind the fence recorded after that.
Status ResidencyStore::start_restore(const EntryKey& key, Entry& entry) {
  auto room = parts_.hbm.allocate(parts_.compute, entry.size, entry.ddr->pool);
  if (!room) return room.error();
  Status ready = parts_.device.record(parts_.compute, fence_);
  if (ready) {
    const Transfer transfer{room->address, entry.ddr->address, entry.size};
    const bool saved = key.what == EntryKey::What::kSaved;
    auto copy = parts_.copies.submit({.direction = Direction::kH2D,
                                      .after = fence_,
                                      .reason = saved ? CopyReason::kFetch : CopyReason::kRestore,
                                      .priority = CopyPriority::kBackground,
                                      .label = label_of(key)},
                                     {&transfer, 1});
    if (copy) {
      entry.copy = std::move(copy).value();
      entry.hbm = shared_block(parts_.device, parts_.hbm, parts_.compute, *room, parts_.poison);
      entry.state = Residency::kArriving;
      restored_ += entry.size;
      if (entry.check) verifier_.leaves(entry.check);
      return {};
    }
    ready = copy.error();
  }
  (void)parts_.hbm.free(parts_.compute, *room);
  return ready;
}

Status ResidencyStore::restore(const EntryKey& key) {
  auto it = entries_.find(key);
  TERRACE_CHECK(it != entries_.end(), "only an entry is restored");
  Entry& entry = it->second;
  if (entry.state == Residency::kArriving) settle(it);
  switch (entry.state) {
    case Residency::kInHbm:
    case Residency::kArriving:
      return {};
    case Residency::kLeaving:
      retire(entry, entry.hbm);  // the copy may finish; the bytes have never left
      entry.state = Residency::kInHbm;
      return {};
    case Residency::kInDdr:
      break;
  }
  if (auto started = start_restore(key, entry); !started) return started;
  hold(key, entry.size);
  return {};
}

std::optional<Residency> ResidencyStore::state(const EntryKey& key) const {
  auto it = entries_.find(key);
  if (it == entries_.end()) return std::nullopt;
  return it->second.state;
}

Bytes ResidencyStore::size(const EntryKey& key) const {
  auto it = entries_.find(key);
  return it == entries_.end() ? 0_B : it->second.size;
}

bool ResidencyStore::looked_at(const EntryKey& key) {
  auto it = entries_.find(key);
  return it == entries_.end() || !it->second.check || verifier_.looked(it->second.check);
}

std::string ResidencyStore::label_of(const EntryKey& key) const {
  return parts_.label ? parts_.label(key) : std::string();
}

std::vector<EntryKey> ResidencyStore::in_layer(int layer, std::uint32_t micro_batch) const {
  std::vector<EntryKey> keys;
  const EntryKey first{micro_batch, layer, EntryKey::What::kSaved, 0};
  for (auto it = entries_.lower_bound(first); it != entries_.end(); ++it) {
    if (it->first.layer != layer || it->first.micro_batch != micro_batch) break;
    keys.push_back(it->first);
  }
  return keys;
}

// The compute stream waits for the copy; how long is known when both events have passed.
Status ResidencyStore::wait_on_compute(const EntryKey& key, Direction direction,
                                       const CopyEngine::Ticket& copy) {
  auto arrived = parts_.device.create_event();
  if (!arrived) return arrived.error();
  auto resumed = parts_.device.create_event();
  if (!resumed) {
    parts_.device.destroy_event(*arrived);
    return resumed.error();
  }
  Status status = parts_.device.record(parts_.compute, *arrived);
  if (status) status = copy.order_before(parts_.compute);
  if (status) status = parts_.device.record(parts_.compute, *resumed);
  if (!status) {
    parts_.device.destroy_event(*arrived);
    parts_.device.destroy_event(*resumed);
    return status;
  }
  probes_.push_back({key, direction, *arrived, *resumed});
  return {};
}

Result<ResidencyStore::Taken> ResidencyStore::take(const EntryKey& key) {
  auto it = entries_.find(key);
  if (it == entries_.end()) return Error{Errc::kNotFound, "no such entry", {}, {}};
  Entry& entry = it->second;
  if (auto restored = restore(key); !restored) return restored.error();
  if (entry.check && !verifier_.intact(entry.check)) entry.damaged = true;
  if (entry.damaged) return refuse_damaged(it);
  if (entry.left.valid() && entry.left.done()) {
    if (Status left = entry.left.synchronize(); !left) {
      forget(it);
      return Error{Errc::kIo, "its bytes never reached DDR: " + left.error().text, {}, {}};
    }
  }
  Taken taken;
  if (entry.state == Residency::kArriving) {
    if (auto waits = wait_on_compute(key, Direction::kH2D, entry.copy); !waits) return waits.error();
    taken.waited = true;
    retire(entry, nullptr);
  }
  taken.block = std::move(entry.hbm);
  let_go(key, entry.size);
  entries_.erase(it);
  return taken;
}

// Moves one entry on if its copy has ended: to where the bytes went or, where it failed, back to where they
// still are.
void ResidencyStore::settle(Entries::iterator it) {
  Entry& entry = it->second;
  if (!entry.copy.valid() || !entry.copy.done()) return;
  const bool left = entry.state == Residency::kLeaving;
  if (!left && entry.check && !verifier_.looked(entry.check)) return;  // the host block is still read
  const bool arrived = entry.copy.synchronize().ok();
  entry.copy = {};
  if (left == arrived) {
    let_go(it->first, entry.size);
    entry.hbm.reset();
    entry.state = Residency::kInDdr;
    if (left) entry.check = verifier_.arrived({entry.ddr->address, entry.size.count()});
  } else {
    if (entry.check) entry.damaged = !verifier_.intact(entry.check);
    entry.check.reset();
    entry.left = {};  // a restore is behind its spill
    give_back(parts_.ddr, *std::exchange(entry.ddr, std::nullopt));
    entry.state = Residency::kInHbm;
  }
}

Error ResidencyStore::refuse_damaged(Entries::iterator it) {
  const EntryKey& key = it->first;
  const bool saved = key.what == EntryKey::What::kSaved;
  Error error{Errc::kIo,
              std::string(saved ? "saved activation " : "cached output ") + std::to_string(key.index) +
                  " of layer " + std::to_string(key.layer) + ", micro-batch " +
                  std::to_string(key.micro_batch) + ": its " + format_bytes(it->second.size) +
                  " changed while they were in DDR; check the host's memory, and what else writes there",
              {},
              {}};
  ++damaged_;
  metrics().add<Metric::kDamagedBlocks>(1);
  forget(it);
  return error;
}

// Of a copy that nobody wants any more: what is held back stays where it is, what moves is waited for.
void ResidencyStore::end(const CopyEngine::Ticket& copy) {
  if (!copy.valid()) return;
  copy.cancel();
  (void)copy.synchronize();
}

// What a copy that nobody waits for any more still uses lives until it ends. A spill reads HBM, which must
// not be unmapped under it; what a restore writes is safe already, since the compute stream waits for it
// before anything else.
void ResidencyStore::retire(Entry& entry, BlockRef still_read) {
  if (!entry.ddr) return;
  if (entry.check) verifier_.forget(entry.check);
  entry.check.reset();
  if (entry.copy.valid() || entry.left.valid()) {
    retired_.push_back({*entry.ddr, std::move(entry.copy), std::move(entry.left), std::move(still_read)});
  } else {
    give_back(parts_.ddr, *entry.ddr);
  }
  entry.ddr.reset();
  entry.copy = {};
  entry.left = {};
}

void ResidencyStore::forget(Entries::iterator it) {
  Entry& entry = it->second;
  // Its HBM side goes back in order of the compute stream, which knows nothing of the copy: end that first.
  end(entry.copy);
  entry.copy = {};
  retire(entry, nullptr);
  if (entry.hbm) let_go(it->first, entry.size);
  entries_.erase(it);
}

void ResidencyStore::drop(const EntryKey& key) {
  if (auto it = entries_.find(key); it != entries_.end()) forget(it);
}

void ResidencyStore::drop_all(EntryKey::What what) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    auto here = it++;
    if (here->first.what == what) forget(here);
  }
}

void ResidencyStore::poll() {
  for (auto it = leaving_.begin(); it != leaving_.end();) {
    auto found = entries_.find(*it);
    if (found == entries_.end() || found->second.state != Residency::kLeaving) {
      it = leaving_.erase(it);
      continue;
    }
    if (!found->second.copy.done()) break;  // one link, one order
    settle(found);
    it = leaving_.erase(it);
  }
  for (auto it = retired_.begin(); it != retired_.end();) {
    if (!ended(it->copy) || !ended(it->left)) {
      ++it;
      continue;
    }
    give_back(parts_.ddr, it->ddr);
    it = retired_.erase(it);
  }
}

Result<bool> ResidencyStore::wait_for_a_spill() {
  poll();
  if (!leaving_.empty()) {
    auto found = entries_.find(leaving_.front());
    TERRACE_CHECK(found != entries_.end(), "poll() leaves only live spills in front");
    const Status left = found->second.copy.synchronize();
    poll();
    if (!left) return left.error();
    return true;
  }
  if (retired_.empty()) return false;
  end(retired_.front().copy);  // nobody needs its bytes: it lets go either way
  end(retired_.front().left);
  poll();
  return true;
}

bool ResidencyStore::undo_a_restore() {
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    Entry& entry = it->second;
    if (entry.state != Residency::kArriving) continue;
    if (it->first.what == EntryKey::What::kOutput) {
      forget(it);
      return true;
    }
    end(entry.copy);
    entry.copy = {};
    entry.hbm.reset();
    let_go(it->first, entry.size);
    entry.state = Residency::kInDdr;
    return true;
  }
  return false;
}

Bytes ResidencyStore::ddr_bytes(EntryKey::What what) const {
  Bytes held;
  for (const auto& [key, entry] : entries_) {
    if (key.what == what && entry.ddr) held += entry.size;
  }
  return held;
}

std::array<ResidencyStore::ByState, 2> ResidencyStore::bytes_by_state() const {
  std::array<ByState, 2> held;
  for (const auto& [key, entry] : entries_) {
    const KeptState state = entry.state == Residency::kLeaving    ? KeptState::kLeaving
                            : entry.state == Residency::kArriving ? KeptState::kArriving
                                                                  : KeptState::kSettled;
    ByState& of_content = held[static_cast<std::size_t>(key.what)];
    if (entry.hbm) of_content.hbm[static_cast<std::size_t>(state)] += entry.size;
    if (entry.ddr) of_content.ddr[static_cast<std::size_t>(state)] += entry.size;
  }
  return held;
}

std::optional<EntryKey> ResidencyStore::farthest_in_hbm(EntryKey::What what) const {
  for (const auto& [key, entry] : entries_) {
    if (key.what == what && entry.state == Residency::kInHbm) return key;
  }
  return std::nullopt;
}

std::vector<ResidencyStore::Wait> ResidencyStore::collect_waits() {
  std::vector<Wait> waits;
  for (auto it = probes_.begin(); it != probes_.end();) {
    if (!parts_.device.completed(it->resumed)) {
      ++it;
      continue;
    }
    const auto seconds = parts_.device.seconds_between(it->arrived, it->resumed);
    const bool late = seconds && *seconds > kLateSeconds;
    const auto began = late && parts_.clock != nullptr ? parts_.clock->at(it->arrived) : std::nullopt;
    waits.push_back({it->key, it->direction, late, late ? *seconds : 0.0, began.value_or(0.0)});
    parts_.device.destroy_event(it->arrived);
    parts_.device.destroy_event(it->resumed);
    it = probes_.erase(it);
  }
  return waits;
}

}  // namespace terrace
