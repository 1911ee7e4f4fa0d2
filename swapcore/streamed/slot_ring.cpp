#include "swapcore/streamed/slot_ring.hpp"

#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/metrics.hpp"

namespace terrace {

Bytes SlotRing::slot_bytes(std::span<const Piece> pieces) {
  Bytes end;
  for (const Piece& piece : pieces) end = round_up(end, kPieceAlignment) + piece.size;
  return end;
}

Result<std::unique_ptr<SlotRing>> SlotRing::create(const Parts& parts, std::vector<BlockRef> slots) {
  TERRACE_CHECK(!slots.empty(), "a ring has a slot");
  auto gate = parts.device.create_stream(StreamPriority::kNormal);
  if (!gate) return std::move(gate).error();
  auto fence = parts.device.create_event();
  if (!fence) {
    parts.device.destroy_stream(*gate);
    return std::move(fence).error();
  }
  std::unique_ptr<SlotRing> ring(new SlotRing(parts, *gate, *fence));
  for (BlockRef& block : slots) {
    auto used = parts.device.create_event();
    if (!used) return std::move(used).error();
    ring->slots_.push_back({.block = std::move(block), .used = *used});
    if (Status ready = parts.device.record(parts.allocated_on, *used); !ready) return ready.error();
    if (Status ready = parts.device.wait(parts.user, *used); !ready) return ready.error();
  }
  return ring;
}

void SlotRing::end(Ticket& ticket) const {
  if (ticket == nullptr) return;
  ticket->cancel();
  (void)ticket->synchronize();
  ticket.reset();
}

SlotRing::~SlotRing() {
  for (Item& item : items_) end(item.written);
  for (Slot& slot : slots_) {
    end(slot.in);
    end(slot.out);
    for (const TierTicket& load : slot.loads) (void)load.synchronize();
    for (const TierTicket& store : slot.stores) (void)store.synchronize();
  }
  // The slots go back in order of the stream they came from, which knows nothing of the user's.
  (void)parts_.device.synchronize(parts_.user);
  (void)parts_.device.synchronize(gate_);
  for (const Slot& slot : slots_) parts_.device.destroy_event(slot.used);
  for (const Item& item : items_) {
    for (const Event event : {item.kept_read, item.kept_made}) {
      if (event != Event{}) parts_.device.destroy_event(event);
    }
  }
  parts_.device.destroy_event(fence_);
  parts_.device.destroy_stream(gate_);
}

SlotRing::ItemId SlotRing::add(std::vector<Piece> pieces) {
  Item item;
  Bytes at;
  std::uint32_t parts = 1;
  for (Piece& piece : pieces) {
    if (piece.flow != Flow::kIn) item.out_bytes += piece.size;
    at = round_up(at, kPieceAlignment);
    parts = std::max(parts, piece.part + 1);
    item.pieces.push_back({.piece = piece, .at = at});
    at += piece.size;
  }
  return add(std::move(item), at, parts);
}

SlotRing::ItemId SlotRing::add_block(Bytes size, std::span<const PartRange> ranges) {
  Item item;
  item.is_block = true;
  std::uint32_t parts = 1;
  for (const PartRange& range : ranges) {
    parts = std::max(parts, range.part + 1);
    item.pieces.push_back({.piece = {range.home, range.size, Flow::kIn, range.part}, .at = range.at});
  }
  return add(std::move(item), size, parts);
}

SlotRing::ItemId SlotRing::add(Item item, Bytes size, std::uint32_t parts) {
  for (const Slot& slot : slots_) TERRACE_CHECK(size <= slot.block->size, "an item fits into every slot");
  item.wanted.assign(parts, true);
  item.kept.resize(parts);
  items_.push_back(std::move(item));
  return {static_cast<std::uint32_t>(items_.size() - 1)};
}

// An empty slot, or the one longest untouched; null where all are in use, spared or passed.
SlotRing::Slot* SlotRing::free_slot(std::span<const ItemId> spared, Leaving leaving) {
  Slot* best = nullptr;
  for (Slot& slot : slots_) {
    if (slot.state == State::kInUse) continue;
    if (leaving == Leaving::kPassed && !all_done(slot.stores)) continue;
    if (slot.state == State::kEmpty) return &slot;
    const bool is_spared = std::find(spared.begin(), spared.end(), ItemId{slot.item}) != spared.end();
    if (!is_spared && (best == nullptr || slot.age < best->age)) best = &slot;
  }
  return best;
}

bool SlotRing::all_done(const std::vector<TierTicket>& transfers) {
  return std::all_of(transfers.begin(), transfers.end(),
                     [](const TierTicket& transfer) { return transfer.done(); });
}

void SlotRing::end_stores(Slot& slot) {
  for (const TierTicket& store : slot.stores) {
    Status how = store.synchronize();
    if (stored_) stored_ = std::move(how);
  }
  slot.stores.clear();
}

// Has the gate wait for everything that a copy into the slot comes behind, and the fence stand there.
Status SlotRing::fence(Slot& slot, Item& item) {
  Device& device = parts_.device;
  note_rate(slot);
  if (Status waits = device.wait(gate_, slot.used); !waits) return waits;
  for (Ticket* ticket : {&slot.in, &slot.out, &item.written}) {
    if (*ticket == nullptr) continue;
    if ((*ticket)->done()) {
      if (Status moved = (*ticket)->synchronize(); !moved) return moved;
      ticket->reset();
    } else if (Status waits = (*ticket)->order_before(gate_); !waits) {
      return waits;
    }
  }
  for (const Event event : {item.renewed, item.part_renewed, item.kept_made}) {
    if (event == Event{}) continue;
    if (Status waits = device.wait(gate_, event); !waits) return waits;
  }
  return device.record(gate_, fence_);
}

// The slot holds no item any more; what still moves in or out of it stays known.
void SlotRing::give_up(Slot& slot) {
  if (slot.state == State::kEmpty) return;
  TERRACE_CHECK(slot.state != State::kInUse, "what is in use stays in its slot");
  for (const TierTicket& load : slot.loads) (void)load.synchronize();
  slot.loads.clear();
  end_stores(slot);
  items_[slot.item].slot = -1;
  slot.state = State::kEmpty;
}

void SlotRing::occupy(Slot& slot, ItemId id) {
  Item& item = items_[id.index];
  item.slot = static_cast<int>(&slot - slots_.data());
  slot.item = id.index;
  slot.age = ++age_;
  slot.present.assign(item.wanted.size(), false);
  slot.from_kept = false;
  slot.pieces.clear();
  if (item.is_block) {
    slot.pieces = {slot.block->address};
    return;
  }
  for (const Placed& placed : item.pieces) slot.pieces.push_back(slot.block->address + placed.at.count());
}

bool SlotRing::has_all_wanted(const Item& item) const {
  if (item.slot < 0) return false;
  const PartSet& present = slots_[static_cast<std::size_t>(item.slot)].present;
  for (std::size_t part = 0; part < present.size(); ++part) {
    if (item.wanted[part] && !present[part]) return false;
  }
  return true;
}

// Into a slot that is free, or that holds the item without some of what is wanted.
Status SlotRing::bring(Slot& slot, ItemId id) {
  Item& item = items_[id.index];
  const bool begins = item.slot < 0;
  if (begins) give_up(slot);
  end_stores(slot);
  if (!stored_) return stored_;
  if (Status ready = fence(slot, item); !ready) return ready;
  if (begins) occupy(slot, id);
  PartSet missing(item.wanted.size());
  for (std::size_t part = 0; part < missing.size(); ++part) {
    missing[part] = item.wanted[part] && !slot.present[part];
  }
  slot.state = State::kArriving;
  const Bytes before = counters_.fetched + counters_.from_kept;
  Status brought = bring_kept(slot, item, missing);
  if (brought) brought = bring_over_the_link(slot, item, missing);
  if (brought) brought = bring_cold(slot, item, missing);
  // Where nothing comes there is nothing else to find the slot's last copy home done behind.
  const bool comes = counters_.fetched + counters_.from_kept > before;
  if (brought && !comes) brought = parts_.device.wait(parts_.user, fence_);
  if (!brought) {
    give_up(slot);
    return brought;
  }
  for (std::size_t part = 0; part < missing.size(); ++part) {
    if (missing[part]) slot.present[part] = true;
  }
  slot.out.reset();  // the fence is behind it
  ++counters_.fetches;
  return {};
}

// Between the part's ranges in a slot and its copy, where they lie one behind another.
std::vector<Transfer> SlotRing::kept_transfers(const Slot& slot, const Item& item, std::uint32_t part,
                                               Copying way) const {
  std::vector<Transfer> transfers;
  Address copy = item.kept[part].at;
  for (const Placed& placed : item.pieces) {
    if (placed.piece.part != part) continue;
    const Address in_slot = slot.block->address + placed.at.count();
    transfers.push_back({way == Copying::kToSlot ? in_slot : copy, way == Copying::kToSlot ? copy : in_slot,
                         placed.piece.size});
    copy += placed.piece.size.count();
  }
  return transfers;
}

// What is kept in HBM: on the gate, beside what comes over the link.
Status SlotRing::bring_kept(Slot& slot, Item& item, const PartSet& missing) {
  std::vector<Transfer> transfers;
  for (std::uint32_t part = 0; part < missing.size(); ++part) {
    if (!missing[part] || !item.kept[part].current) continue;
    for (const Transfer& one : kept_transfers(slot, item, part, Copying::kToSlot)) {
      transfers.push_back(one);
      counters_.from_kept += one.size;
    }
  }
  if (transfers.empty()) return {};
  slot.from_kept = true;
  if (Status copied = parts_.device.copy_batch(gate_, Direction::kD2D, transfers); !copied) return copied;
  return parts_.device.record(gate_, item.kept_read);
}

// What lies side by side at home goes as one, with the gap between.
Status SlotRing::bring_over_the_link(Slot& slot, Item& item, const PartSet& missing) {
  std::vector<Transfer> transfers;
  const Placed* before = nullptr;
  for (const Placed& placed : item.pieces) {
    const Piece& piece = placed.piece;
    const bool comes = piece.flow != Flow::kOut && missing[piece.part] && !item.kept[piece.part].current &&
                       piece.cold.id == 0;
    if (!comes) {
      before = nullptr;
      continue;
    }
    const bool follows = item.is_block && before != nullptr &&
                         piece.home == before->piece.home + (placed.at - before->at).count();
    if (follows) {
      transfers.back().size = Bytes(static_cast<std::uint64_t>(
          slot.block->address + (placed.at + piece.size).count() - transfers.back().to));
    } else {
      transfers.push_back({slot.block->address + placed.at.count(), piece.home, piece.size});
    }
    before = &placed;
  }
  if (transfers.empty()) return {};
  auto copy = parts_.copies.submit({.direction = Direction::kH2D,
                                    .after = fence_,
                                    .reason = parts_.reason,
                                    .priority = CopyPriority::kBackground},
                                   transfers);
  if (!copy) return copy.error();
  slot.in_bytes = 0_B;
  for (const Transfer& transfer : transfers) slot.in_bytes += transfer.size;
  slot.in = std::make_shared<CopyEngine::Ticket>(std::move(copy).value());
  counters_.fetched += slot.in_bytes;
  return {};
}

Status SlotRing::bring_cold(Slot& slot, Item& item, const PartSet& missing) {
  for (const Placed& placed : item.pieces) {
    const Piece& piece = placed.piece;
    const bool comes = piece.flow != Flow::kOut && missing[piece.part] && !item.kept[piece.part].current;
    if (piece.cold.id == 0 || !comes) continue;
    auto load = parts_.cold->load(slot.block->address + placed.at.count(), piece.cold, fence_);
    if (!load) return load.error();
    slot.loads.push_back(std::move(load).value());
    counters_.fetched += piece.size;
    counters_.from_tier += piece.size;
  }
  return {};
}

// The link's rate, from copies that are over.
void SlotRing::note_rate(Slot& slot) {
  if (slot.in == nullptr || !slot.in->done()) return;
  if (const auto seconds = parts_.copies.seconds(*slot.in); seconds && *seconds > 0) {
    counters_.timed += slot.in_bytes;
    counters_.timed_seconds += *seconds;
  }
}

Status SlotRing::expect(std::span<const ItemId> next) {
  if (!stored_) return stored_;
  for (const ItemId id : next) {
    const Item& item = items_[id.index];
    if (has_all_wanted(item)) continue;
    Slot* const slot =
        item.slot >= 0 ? &slots_[static_cast<std::size_t>(item.slot)] : free_slot(next, Leaving::kPassed);
    if (slot == nullptr) return {};
    if (slot->state == State::kInUse || !all_done(slot->stores)) continue;
    if (Status brought = bring(*slot, id); !brought) return brought;
  }
  return {};
}

bool SlotRing::is_here(ItemId id) const {
  const Item& item = items_[id.index];
  if (!has_all_wanted(item)) return false;
  const Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
  return all_done(slot.loads) && all_done(slot.stores);
}

Status SlotRing::bring_here(ItemId id) {
  if (!stored_) return stored_;
  Item& item = items_[id.index];
  if (!has_all_wanted(item)) {
    Slot* const slot =
        item.slot >= 0 ? &slots_[static_cast<std::size_t>(item.slot)] : free_slot({}, Leaving::kTaken);
    TERRACE_CHECK(slot != nullptr, "fewer items are in use than the ring has slots");
    if (Status brought = bring(*slot, id); !brought) return brought;
  }
  Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
  end_stores(slot);
  for (const TierTicket& load : slot.loads) {
    if (Status loaded = load.synchronize(); !loaded) return loaded;
  }
  return stored_;
}

Result<std::span<const Address>> SlotRing::acquire(ItemId id, Fill fill) {
  if (!stored_) return stored_.error();
  Item& item = items_[id.index];
  if (has_all_wanted(item)) {
    ++counters_.found;
    metrics().add<Metric::kStreamedUses>(parts_.reason, StreamedOutcome::kFound, 1);
  } else {
    Slot* const slot =
        item.slot >= 0 ? &slots_[static_cast<std::size_t>(item.slot)] : free_slot({}, Leaving::kTaken);
    TERRACE_CHECK(slot != nullptr, "fewer items are in use than the ring has slots");
    TERRACE_CHECK(item.slot < 0 || slot->state != State::kInUse,
                  "an item is acquired once before it is released");
    if (fill == Fill::kFromHome) {
      metrics().add<Metric::kStreamedUses>(parts_.reason, StreamedOutcome::kLoaded, 1);
      if (Status brought = bring(*slot, id); !brought) return brought.error();
    } else {
      give_up(*slot);
      if (Status ready = fence(*slot, item); !ready) return ready.error();
      if (Status ready = parts_.device.wait(parts_.user, fence_); !ready) return ready.error();
      occupy(*slot, id);
      slot->present = item.wanted;
    }
  }
  Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
  TERRACE_CHECK(slot.state != State::kInUse, "an item is acquired once before it is released");
  end_stores(slot);  // the user may write what is stored
  if (!stored_) return stored_.error();
  if (slot.state == State::kArriving) {
    const auto wait = [&] { return wait_for(slot, item); };
    if (Status waits = probes_.around(parts_.user, wait); !waits) return waits.error();
  } else if (slot.out != nullptr && !slot.out->done()) {  // the user may write under its copy home
    if (Status waits = slot.out->order_before(parts_.user); !waits) return waits.error();
  }
  if (Status made = make_kept(slot, item); !made) return made.error();
  slot.state = State::kInUse;
  return std::span<const Address>(slot.pieces);
}

Status SlotRing::wait_for(Slot& slot, const Item& item) {
  if (slot.from_kept) {
    if (Status waits = parts_.device.wait(parts_.user, item.kept_read); !waits) return waits;
  }
  if (slot.in != nullptr) {
    if (Status waits = slot.in->order_before(parts_.user); !waits) return waits;
  }
  while (!slot.loads.empty()) {
    if (Status loaded = slot.loads.back().wait_on(parts_.user); !loaded) return loaded;
    slot.loads.pop_back();
  }
  return {};
}

// Copies of what is to be kept, and is here.
Status SlotRing::make_kept(Slot& slot, Item& item) {
  std::vector<Transfer> transfers;
  for (std::uint32_t part = 0; part < item.kept.size(); ++part) {
    KeptCopy& kept = item.kept[part];
    if (kept.at == nullptr || kept.current || !slot.present[part]) continue;
    const std::vector<Transfer> more = kept_transfers(slot, item, part, Copying::kToKept);
    transfers.insert(transfers.end(), more.begin(), more.end());
    kept.current = true;
  }
  if (transfers.empty()) return {};
  // Whoever had the place before may still be read there.
  if (Status waits = parts_.device.wait(parts_.user, item.kept_read); !waits) return waits;
  if (Status copied = parts_.device.copy_batch(parts_.user, Direction::kD2D, transfers); !copied)
    return copied;
  return parts_.device.record(parts_.user, item.kept_made);
}

Status SlotRing::release(ItemId id, Use use) {
  Item& item = items_[id.index];
  TERRACE_CHECK(item.slot >= 0 && slots_[static_cast<std::size_t>(item.slot)].state == State::kInUse,
                "only what is in use is released");
  Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
  slot.state = State::kHeld;
  slot.age = ++age_;
  if (Status recorded = parts_.device.record(parts_.user, slot.used); !recorded) return recorded;
  if (use == Use::kRead || item.out_bytes == 0_B) return {};
  counters_.written_back += item.out_bytes;
  if (Status stored = store_cold(slot, item); !stored) return stored;
  std::vector<Transfer> transfers;
  for (const Placed& placed : item.pieces) {
    const Piece& piece = placed.piece;
    if (piece.flow == Flow::kIn || piece.cold.id != 0) continue;
    transfers.push_back({piece.home, slot.block->address + placed.at.count(), piece.size});
  }
  if (transfers.empty()) return {};
  auto copy = parts_.copies.submit({.direction = Direction::kD2H,
                                    .after = slot.used,
                                    .reason = parts_.reason,
                                    .priority = CopyPriority::kBackground},
                                   transfers);
  if (!copy) return copy.error();
  slot.out = std::make_shared<CopyEngine::Ticket>(std::move(copy).value());
  item.written = slot.out;
  return {};
}

// What lives on the cold tier goes there behind the user's work.
Status SlotRing::store_cold(Slot& slot, const Item& item) {
  for (const Placed& placed : item.pieces) {
    const Piece& piece = placed.piece;
    if (piece.flow == Flow::kIn || piece.cold.id == 0) continue;
    auto store = parts_.cold->store(piece.cold, slot.block->address + placed.at.count(), slot.used);
    if (!store) return store.error();
    slot.stores.push_back(std::move(store).value());
    counters_.to_tier += piece.size;
  }
  return {};
}

Status SlotRing::order_behind_write(Stream stream, ItemId id) {
  Item& item = items_[id.index];
  return item.written != nullptr ? item.written->order_before(stream) : Status();
}

void SlotRing::renew_behind(ItemId id, Event event, Kept kept) {
  Item& item = items_[id.index];
  if (item.slot >= 0) give_up(slots_[static_cast<std::size_t>(item.slot)]);
  item.renewed = event;
  if (kept == Kept::kStale) age_kept(item);
}

void SlotRing::renew_part_behind(ItemId id, std::uint32_t part, Event event) {
  Item& item = items_[id.index];
  if (item.slot >= 0) slots_[static_cast<std::size_t>(item.slot)].present[part] = false;
  item.kept[part].current = false;
  item.part_renewed = event;
}

void SlotRing::age_kept(Item& item) {
  for (KeptCopy& copy : item.kept) copy.current = false;
}

void SlotRing::want(ItemId id, PartSet parts) {
  Item& item = items_[id.index];
  TERRACE_CHECK(parts.size() == item.wanted.size(), "a set has a place for every part");
  item.wanted = std::move(parts);
}

Status SlotRing::keep(ItemId id, std::uint32_t part, Address at) {
  Item& item = items_[id.index];
  for (Event* event : {&item.kept_read, &item.kept_made}) {
    if (*event != Event{}) continue;
    auto made = parts_.device.create_event();
    if (!made) return made.error();
    *event = *made;
  }
  item.kept[part] = {.at = at};
  return {};
}

Address SlotRing::kept_at(ItemId id, std::uint32_t part) const {
  const KeptCopy& copy = items_[id.index].kept[part];
  return copy.current ? copy.at : nullptr;
}

Status SlotRing::order_behind_kept(Stream stream, ItemId id) const {
  const Item& item = items_[id.index];
  for (const Event event : {item.kept_read, item.kept_made}) {
    if (event == Event{}) continue;
    if (Status waits = parts_.device.wait(stream, event); !waits) return waits;
  }
  return {};
}

void SlotRing::settle_on_tier(ItemId id, std::uint32_t part, std::vector<TierBlock> ranges) {
  TERRACE_CHECK(parts_.cold != nullptr, "there is a tier to settle on");
  auto next = ranges.begin();
  for (Placed& placed : items_[id.index].pieces) {
    if (placed.piece.part == part) placed.piece.cold = *next++;
  }
  TERRACE_CHECK(next == ranges.end(), "as many blocks as the part has ranges");
}

Status SlotRing::drain() {
  Status first;
  const auto settle = [&first](Ticket& ticket) {
    if (ticket == nullptr) return;
    Status moved = ticket->synchronize();
    if (first) first = std::move(moved);
    ticket.reset();
  };
  for (Item& item : items_) settle(item.written);
  for (Slot& slot : slots_) {
    end_stores(slot);
    settle(slot.out);
    if (slot.state != State::kArriving) settle(slot.in);
  }
  return first ? stored_ : first;
}

Status SlotRing::forget(ItemId id) {
  Item& item = items_[id.index];
  if (item.written != nullptr) {
    if (Status moved = item.written->synchronize(); !moved) return moved;
  }
  age_kept(item);
  if (item.slot < 0) return {};
  Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
  give_up(slot);
  return slot.in != nullptr ? slot.in->synchronize() : Status();
}

}  // namespace terrace
