// Handlers of calls about physical memory, which the guest maps itself.
#pragma once

#include "hooks/intercept/cuda/handlers.hpp"
#include "hooks/intercept/cuda/physical_ledger.hpp"

namespace terrace::hooks::cuda {

template <typename Real>
CallResult create_physical(const Call<Real>& call, PhysicalHandle* out, std::size_t bytes,
                           const AllocationProperties* properties, unsigned long long flags) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(out, bytes, properties, flags);
  count(guard, CallGroup::kMap);
  if (out == nullptr || properties == nullptr) return call.real(out, bytes, properties, flags);
  const bool on_device = properties->location.type == LocationType::kDevice;
  Allocation allocation{on_device ? TierId::kHbm : TierId::kDdr, Bytes(bytes)};
  CallResult result = kOutOfMemory;
  if (on_device) {
    allocation.device = static_cast<std::int16_t>(properties->location.id);
    allocation.charged = Bytes(bytes);
  }
  const bool fits = !on_device || charge_native(allocation.device, allocation.charged);
  if (fits) result = call.real(out, bytes, properties, flags);
  if (fits && result != kSuccess) refund_native(allocation.device, allocation.charged);
  if (on_device && result == kOutOfMemory) {
    // Its device without a charge: memory that is the host's in place of the device's.
    allocation.tier = TierId::kDdr;
    allocation.charged = {};
    if (overflow().create({Overflow::Form::kPhysical, Bytes(bytes), call.caller}, *properties, out))
      result = kSuccess;
  }
  if (!fits && result != kSuccess) wall().count_refusal(allocation.device, Bytes(bytes));
  if (result != kSuccess) return result;
  recorder().created_physical(key_of_handle(*out), allocation);
  noting([&] { physical_ledger().created(*out, allocation); });
  return result;
}

inline void end_physical(const PhysicalLedger::Freed& freed) noexcept {
  recorder().shrank(freed.allocation.tier, freed.allocation.size);
  overflow().ended(freed.allocation, freed.withheld);
  Recorder::freed(freed.allocation);
  stable_blocks().follow_the_wall(freed.allocation.device);
}

template <typename Real>
CallResult release_physical(const Call<Real>& call, PhysicalHandle handle) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(handle);
  count(guard, CallGroup::kMap);
  // Before the call its value is still nobody else's.
  Recorder::releasing_physical(key_of_handle(handle));
  const bool withheld = overflow().keeps(handle);
  const CallResult result = withheld ? kSuccess : call.real(handle);
  if (result != kSuccess) return result;
  noting([&] {
    using Release = PhysicalLedger::Release;
    const auto ended = physical_ledger().released(handle, withheld ? Release::kWithheld : Release::kMade);
    if (ended.freed) end_physical(*ended.freed);
    if (ended.known == PhysicalLedger::Known::kNo) Recorder::freed_unknown();
  });
  return result;
}

template <typename Real>
CallResult retain_physical(const Call<Real>& call, PhysicalHandle* out, void* address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kMap);
  // What it hands out is the memory under the address, which others may map.
  if (guard.outermost())
    stable_blocks().fix(reinterpret_cast<std::uintptr_t>(address), FixedReason::kRegistered,
                        StableBlocks::Where::kBring);
  const CallResult result = call.real(out, address);
  if (result == kSuccess && guard.outermost())
    noting([&] { physical_ledger().retained(*out, reinterpret_cast<std::uintptr_t>(address)); });
  return result;
}

// To another process, which may hold it for longer than this one.
template <typename Real>
CallResult show_physical(const Call<Real>& call, void* out, PhysicalHandle handle, int type,
                         unsigned long long flags) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kShare);
  if (guard.outermost()) overflow().shown(handle);
  return call.real(out, handle, type, flags);
}

// Another process's memory, and its charge.
template <typename Real>
CallResult import_physical(const Call<Real>& call, PhysicalHandle* out, void* shared, int type) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kShare);
  const CallResult result = call.real(out, shared, type);
  if (result == kSuccess && guard.outermost())
    noting([&] { physical_ledger().created(*out, {TierId::kHbm, Bytes()}); });
  return result;
}

template <typename Real>
CallResult map_physical(const Call<Real>& call, DevicePointer at, std::size_t bytes, std::size_t offset,
                        PhysicalHandle handle, unsigned long long flags) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kMap);
  const CallResult result = call.real(at, bytes, offset, handle, flags);
  if (result == kSuccess && guard.outermost()) {
    Overflow::satisfied();
    noting([&] { physical_ledger().mapped(at, bytes, handle); });
  }
  return result;
}

template <typename Real>
CallResult unmap_physical(const Call<Real>& call, DevicePointer at, std::size_t bytes) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kMap);
  const CallResult result = call.real(at, bytes);
  if (result == kSuccess && guard.outermost())
    noting([&] { physical_ledger().unmapped(at, bytes, end_physical); });
  return result;
}

// What its maker asked for, whatever it is.
template <typename Real>
CallResult describe_physical(const Call<Real>& call, AllocationProperties* out,
                             PhysicalHandle handle) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kQuery);
  const CallResult result = call.real(out, handle);
  if (result != kSuccess || !guard.outermost() || out == nullptr) return result;
  noting([&] {
    const auto known = physical_ledger().find(handle);
    if (known && Overflow::is_overflow(known->allocation))
      out->location = {LocationType::kDevice, known->allocation.device};
  });
  return result;
}

}  // namespace terrace::hooks::cuda
