// Which blocks a tier has given out, where each is, and whether it may be stored, loaded or freed now.
//
// Placement is the tier's own word for where a block is. Not thread-safe: the owning tier locks, from begin_*
// to the call that names the transfer, so that no two transfers of a block start.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "allocator/tier.hpp"

namespace terrace {

template <typename Placement>
class TierLedger {
 public:
  explicit TierLedger(TierId tier) : tier_(tier) {}

  [[nodiscard]] TierBlock insert(Bytes size, Pool pool, Address address, Placement placement) {
    const TierBlock block{.id = ++last_id_, .size = size, .pool = pool, .address = address};
    entries_.emplace(block.id, Entry{.block = block, .placement = std::move(placement)});
    return block;
  }

  // Where the block is, for a transfer about to start. Errors: see Tier::store.
  [[nodiscard]] Result<Placement*> begin_store(const TierBlock& block) {
    auto entry = idle_entry(block, "store");
    if (!entry) return std::move(entry).error();
    return &(*entry)->placement;
  }
  [[nodiscard]] Result<Placement*> begin_load(const TierBlock& block) {
    auto entry = idle_entry(block, "load");
    if (!entry) return std::move(entry).error();
    if (!(*entry)->holds) {
      return invalid("load of", block.id, "nothing is stored in it, or its last store failed");
    }
    return &(*entry)->placement;
  }
  // From here the block has a transfer. Precondition: begin_* has just named it.
  void storing(const TierBlock& block, std::shared_ptr<TierTransfer> transfer) {
    Entry& entry = entries_.at(block.id);
    entry.holds = false;
    entry.stores = true;
    entry.transfer = std::move(transfer);
  }
  void loading(const TierBlock& block, std::shared_ptr<TierTransfer> transfer) {
    Entry& entry = entries_.at(block.id);
    entry.stores = false;
    entry.transfer = std::move(transfer);
  }
  // A store was refused half-way: what the block held may be overwritten in part.
  void emptied(const TierBlock& block) { entries_.at(block.id).holds = false; }
  // Errors: see Tier::free.
  [[nodiscard]] Result<Placement> remove(const TierBlock& block) {
    auto entry = idle_entry(block, "free");
    if (!entry) return std::move(entry).error();
    Placement placement = std::move((*entry)->placement);
    entries_.erase(block.id);
    return placement;
  }

  [[nodiscard]] std::size_t count() const { return entries_.size(); }

 private:
  struct Entry {
    TierBlock block;
    Placement placement;
    std::shared_ptr<TierTransfer> transfer = nullptr;  // the last, until it is known how it ended
    bool stores = false;                               // what the last one does
    bool holds = false;                                // the last store ended well
  };

  [[nodiscard]] Result<Entry*> idle_entry(const TierBlock& block, const char* call) {
    const auto found = entries_.find(block.id);
    if (found == entries_.end() || found->second.block != block) {
      return invalid(std::string(call) + " of", block.id,
                     "no such block: it was freed, or is another tier's");
    }
    Entry& entry = found->second;
    if (entry.transfer != nullptr) {
      if (!entry.transfer->done()) {
        return invalid(std::string(call) + " of", block.id,
                       "a transfer of it is in flight; synchronize its ticket first");
      }
      if (entry.stores) entry.holds = entry.transfer->synchronize().ok();
      entry.transfer.reset();
    }
    return &entry;
  }
  [[nodiscard]] Error invalid(const std::string& call, std::uint64_t id, const char* why) const {
    return Error{
        .code = Errc::kInvalidArgument,
        .text = std::string(name_of(tier_)) + " tier: " + call + " block " + std::to_string(id) + ": " + why};
  }

  TierId tier_;
  std::map<std::uint64_t, Entry> entries_;
  std::uint64_t last_id_ = 0;
};

}  // namespace terrace
