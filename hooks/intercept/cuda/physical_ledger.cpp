#include "hooks/intercept/cuda/physical_ledger.hpp"

#include <new>

#include "hooks/intercept/cuda/forks.hpp"

namespace terrace::hooks::cuda {

PhysicalLedger& physical_ledger() noexcept {
  alignas(PhysicalLedger) static std::byte place[sizeof(PhysicalLedger)];
  static PhysicalLedger& ledger = *[]() noexcept {
    watch_forks();
    return new (place) PhysicalLedger;
  }();
  return ledger;
}

void PhysicalLedger::created(PhysicalHandle handle, const Allocation& allocation) {
  const std::lock_guard lock(mutex_);
  const Id id = ++last_id_;
  memories_[id] = {allocation, 1, 0, 0};
  handles_[handle] = id;
}

void PhysicalLedger::retained(PhysicalHandle handle, DevicePointer address) {
  const std::lock_guard lock(mutex_);
  auto mapping = mappings_.upper_bound(address);
  if (mapping == mappings_.begin()) return;
  --mapping;
  if (address - mapping->first >= mapping->second.bytes) return;
  ++memories_[mapping->second.memory].references;
  handles_[handle] = mapping->second.memory;
}

void PhysicalLedger::mapped(DevicePointer at, std::size_t bytes, PhysicalHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto known = handles_.find(handle);
  if (known == handles_.end()) return;
  ++memories_[known->second].mappings;
  mappings_[at] = {known->second, bytes};
}

std::optional<PhysicalLedger::Found> PhysicalLedger::find(PhysicalHandle handle) const {
  const std::lock_guard lock(mutex_);
  const auto known = handles_.find(handle);
  if (known == handles_.end()) return std::nullopt;
  const auto memory = memories_.find(known->second);
  if (memory == memories_.end()) return std::nullopt;
  return Found{memory->second.allocation, memory->second.references == 1, memory->second.withheld != 0};
}

std::optional<Allocation> PhysicalLedger::mapped_at(DevicePointer address) const {
  const std::lock_guard lock(mutex_);
  auto mapping = mappings_.upper_bound(address);
  if (mapping == mappings_.begin()) return std::nullopt;
  --mapping;
  if (address - mapping->first >= mapping->second.bytes) return std::nullopt;
  const auto found = memories_.find(mapping->second.memory);
  return found == memories_.end() ? std::nullopt : std::optional(found->second.allocation);
}

std::optional<PhysicalLedger::Freed> PhysicalLedger::end_if_unheld(Id id) {
  const auto found = memories_.find(id);
  if (found == memories_.end() || found->second.references > 0 || found->second.mappings > 0)
    return std::nullopt;
  const Freed ended{found->second.allocation, found->second.withheld};
  memories_.erase(found);
  return ended;
}

PhysicalLedger::Ended PhysicalLedger::released(PhysicalHandle handle, Release how) {
  const std::lock_guard lock(mutex_);
  const auto known = handles_.find(handle);
  if (known == handles_.end()) return {};
  const Id id = known->second;
  if (how == Release::kWithheld) memories_[id].withheld = handle;
  // The value may name other memory once its last reference is gone, though a mapping keeps this one.
  if (--memories_[id].references == 0) handles_.erase(known);
  return {Known::kYes, end_if_unheld(id)};
}

std::optional<PhysicalLedger::Freed> PhysicalLedger::drop_mapping(Id id) {
  const auto found = memories_.find(id);
  if (found == memories_.end()) return std::nullopt;
  --found->second.mappings;
  return end_if_unheld(id);
}

// What the parent holds is not the child's; its lock may be held by a thread that does not exist here.
void PhysicalLedger::start_again_in_child() { new (this) PhysicalLedger; }

}  // namespace terrace::hooks::cuda
