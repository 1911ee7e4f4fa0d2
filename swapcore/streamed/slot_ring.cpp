#include "swapcore/streamed/slot_ring.hpp"

#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"

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
  }
  // The slots go back in order of the stream they came from, which knows nothing of the user's.
  (void)parts_.device.synchronize(parts_.user);
  (void)parts_.device.synchronize(gate_);
  for (const Slot& slot : slots_) parts_.device.destroy_event(slot.used);
  parts_.device.destroy_event(fence_);
  parts_.device.destroy_stream(gate_);
}

SlotRing::ItemId SlotRing::add(std::vector<Piece> pieces) {
  Item item;
  for (const Piece& piece : pieces) {
    if (piece.flow != Flow::kOut) item.in_bytes += piece.size;
    if (piece.flow != Flow::kIn) item.out_bytes += piece.size;
  }
  const Bytes size = slot_bytes(pieces);
  for (const Slot& slot : slots_) TERRACE_CHECK(size <= slot.block->size, "an item fits into every slot");
  item.pieces = std::move(pieces);
  items_.push_back(std::move(item));
  return {static_cast<std::uint32_t>(items_.size() - 1)};
}

// An empty slot, or the one longest untouched; null where all are in use or spared.
SlotRing::Slot* SlotRing::free_slot(std::span<const ItemId> spared) {
  Slot* best = nullptr;
  for (Slot& slot : slots_) {
    if (slot.state == State::kInUse) continue;
    if (slot.state == State::kEmpty) return &slot;
    const bool is_spared = std::find(spared.begin(), spared.end(), ItemId{slot.item}) != spared.end();
    if (!is_spared && (best == nullptr || slot.age < best->age)) best = &slot;
  }
  return best;
}

// Has the gate wait for everything that a copy into the slot comes behind, and the fence stand there.
Status SlotRing::fence(Slot& slot, Item& item) {
  Device& device = parts_.device;
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
  if (item.renewed != Event{}) {
    if (Status waits = device.wait(gate_, item.renewed); !waits) return waits;
  }
  return device.record(gate_, fence_);
}

// The slot holds no item any more; what still moves in or out of it stays known.
void SlotRing::give_up(Slot& slot) {
  if (slot.state == State::kEmpty) return;
  TERRACE_CHECK(slot.state != State::kInUse, "what is in use stays in its slot");
  items_[slot.item].slot = -1;
  slot.state = State::kEmpty;
}

void SlotRing::occupy(Slot& slot, ItemId id) {
  Item& item = items_[id.index];
  item.slot = static_cast<int>(&slot - slots_.data());
  slot.item = id.index;
  slot.age = ++age_;
  slot.pieces.clear();
  Bytes at;
  for (const Piece& piece : item.pieces) {
    at = round_up(at, kPieceAlignment);
    slot.pieces.push_back(slot.block->address + at.count());
    at += piece.size;
  }
}

Status SlotRing::bring(Slot& slot, ItemId id) {
  Item& item = items_[id.index];
  give_up(slot);
  if (Status ready = fence(slot, item); !ready) return ready;
  occupy(slot, id);
  std::vector<Transfer> transfers;
  for (std::size_t i = 0; i < item.pieces.size(); ++i) {
    const Piece& piece = item.pieces[i];
    if (piece.flow != Flow::kOut) transfers.push_back({slot.pieces[i], piece.home, piece.size});
  }
  auto copy = parts_.copies.submit({.direction = Direction::kH2D,
                                    .after = fence_,
                                    .reason = parts_.reason,
                                    .priority = CopyPriority::kBackground},
                                   transfers);
  if (!copy) {
    item.slot = -1;
    return copy.error();
  }
  slot.in = std::make_shared<CopyEngine::Ticket>(std::move(copy).value());
  slot.out.reset();  // the fence is behind it
  slot.state = State::kArriving;
  counters_.fetched += item.in_bytes;
  ++counters_.fetches;
  return {};
}

Status SlotRing::expect(std::span<const ItemId> next) {
  for (const ItemId id : next) {
    if (items_[id.index].slot >= 0) continue;
    Slot* const slot = free_slot(next);
    if (slot == nullptr) return {};
    if (Status brought = bring(*slot, id); !brought) return brought;
  }
  return {};
}

Result<std::span<const Address>> SlotRing::acquire(ItemId id, Fill fill) {
  Item& item = items_[id.index];
  if (item.slot < 0) {
    Slot* const slot = free_slot({});
    TERRACE_CHECK(slot != nullptr, "fewer items are in use than the ring has slots");
    if (fill == Fill::kFromHome) {
      if (Status brought = bring(*slot, id); !brought) return brought.error();
    } else {
      give_up(*slot);
      if (Status ready = fence(*slot, item); !ready) return ready.error();
      if (Status ready = parts_.device.wait(parts_.user, fence_); !ready) return ready.error();
      occupy(*slot, id);
    }
  } else {
    ++counters_.found;
  }
  Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
  TERRACE_CHECK(slot.state != State::kInUse, "an item is acquired once before it is released");
  if (slot.state == State::kArriving) {
    const auto wait = [&] { return slot.in->order_before(parts_.user); };
    if (Status waits = probes_.around(parts_.user, wait); !waits) return waits.error();
  } else if (slot.out != nullptr && !slot.out->done()) {  // the user may write under its copy home
    if (Status waits = slot.out->order_before(parts_.user); !waits) return waits.error();
  }
  slot.state = State::kInUse;
  return std::span<const Address>(slot.pieces);
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
  std::vector<Transfer> transfers;
  for (std::size_t i = 0; i < item.pieces.size(); ++i) {
    const Piece& piece = item.pieces[i];
    if (piece.flow != Flow::kIn) transfers.push_back({piece.home, slot.pieces[i], piece.size});
  }
  auto copy = parts_.copies.submit({.direction = Direction::kD2H,
                                    .after = slot.used,
                                    .reason = parts_.reason,
                                    .priority = CopyPriority::kBackground},
                                   transfers);
  if (!copy) return copy.error();
  slot.out = std::make_shared<CopyEngine::Ticket>(std::move(copy).value());
  item.written = slot.out;
  counters_.written_back += item.out_bytes;
  return {};
}

Status SlotRing::order_behind_write(Stream stream, ItemId id) {
  Item& item = items_[id.index];
  return item.written != nullptr ? item.written->order_before(stream) : Status();
}

void SlotRing::renew_behind(ItemId id, Event event) {
  Item& item = items_[id.index];
  if (item.slot >= 0) give_up(slots_[static_cast<std::size_t>(item.slot)]);
  item.renewed = event;
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
    settle(slot.out);
    if (slot.state != State::kArriving) settle(slot.in);
  }
  return first;
}

Status SlotRing::forget(ItemId id) {
  Item& item = items_[id.index];
  if (item.written != nullptr) {
    if (Status moved = item.written->synchronize(); !moved) return moved;
  }
  if (item.slot < 0) return {};
  Slot& slot = slots_[static_cast<std::size_t>(item.slot)];
  give_up(slot);
  return slot.in != nullptr ? slot.in->synchronize() : Status();
}

}  // namespace terrace
