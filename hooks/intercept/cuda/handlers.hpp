// What happens around a passed-through call, by the shape of its arguments. Each handler makes the real call
// at most once, with the arguments as they came, and returns what it returned; it makes none where the wall
// refuses or the pool of this process serves (stream_pools.hpp).
//
// Handlers of driver calls decide; those of runtime calls count, and settle what went past the driver's.
#pragma once

#include <type_traits>

#include "hooks/intercept/call_guard.hpp"
#include "hooks/intercept/cuda/abi.hpp"
#include "hooks/intercept/cuda/charges.hpp"
#include "hooks/intercept/cuda/driver_calls.hpp"
#include "hooks/intercept/cuda/guest_uses.hpp"
#include "hooks/intercept/cuda/launch_view.hpp"
#include "hooks/intercept/cuda/memory_report.hpp"
#include "hooks/intercept/cuda/overflow.hpp"
#include "hooks/intercept/cuda/stable_blocks.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"
#include "hooks/intercept/cuda/symbols.hpp"
#include "hooks/intercept/recorder.hpp"
#include "hooks/intercept/wall.hpp"

namespace terrace::hooks::cuda {

template <typename Real>
struct Call {
  Real real;
  DefaultStream default_stream;
  const void* caller;  // returned to
};

template <typename Pointer>
[[nodiscard]] AllocationKey key_of(Pointer pointer) noexcept {
  if constexpr (std::is_pointer_v<Pointer>) {
    return key_of_address(reinterpret_cast<std::uintptr_t>(pointer));
  } else {
    return key_of_address(pointer);
  }
}

[[nodiscard]] inline std::uint64_t id_of(StreamHandle stream) noexcept {
  return reinterpret_cast<std::uintptr_t>(stream);
}

// Counts a call that is nobody else's doing.
inline void count(const DriverCall& guard, CallGroup group) noexcept {
  if (guard.outermost() && !RuntimeCall::under_way() && !LibraryArguments::under_way())
    recorder().calling(group);
}

// Notes of ours that need memory; without any, the guest's call goes on.
template <typename Note>
void noting(const Note& note) noexcept {
  try {
    note();
  } catch (...) {
  }
}

template <CallGroup Group, typename Real, typename... Arguments>
CallResult pass(const Call<Real>& call, Arguments... arguments) noexcept {
  const DriverCall guard;
  count(guard, Group);
  return call.real(arguments...);
}

// ---------------------------------------------------------------- allocations

constexpr auto kNowhereElse = [] { return false; };

// For what the driver serves itself. What blocks made way for is theirs again where it is refused even so, or
// has gone.
[[nodiscard]] inline bool charge_native(DeviceOrdinal device, Bytes charge) noexcept {
  if (wall().charge(device, charge, Wall::Reclaim::kAllowed)) return true;
  stable_blocks().follow_the_wall(device);
  return false;
}
inline void refund_native(DeviceOrdinal device, Bytes charge) noexcept {
  wall().refund(device, charge);
  stable_blocks().follow_the_wall(device);
}

// Charges, asks the driver, and keeps the account right either way. `real` makes the call; `key` is asked
// after it has succeeded; `elsewhere` where the wall or the driver has no room, and says whether it serves.
template <typename RealCall, typename Key, typename Elsewhere = decltype(kNowhereElse)>
CallResult charged(Bytes size, std::uint64_t stream, const RealCall& real, const Key& key,
                   const Elsewhere& elsewhere = kNowhereElse) noexcept {
  const DeviceOrdinal device = current_device();
  const Bytes charge = charge_for(size);
  if (!charge_native(device, charge)) {
    if (elsewhere()) return kSuccess;
    wall().count_refusal(device, charge);
    return kOutOfMemory;
  }
  const CallResult result = real();
  if (result != kSuccess) {
    refund_native(device, charge);
    return result == kOutOfMemory && elsewhere() ? kSuccess : result;
  }
  Overflow::satisfied();
  recorder().allocated(key(), {TierId::kHbm, size, static_cast<std::int16_t>(device), charge}, stream);
  return result;
}

// On a stream, or 0.
template <typename Elsewhere, typename Real, typename... Rest>
CallResult allocate_or(const Elsewhere& elsewhere, std::uint64_t stream, const Call<Real>& call,
                       DevicePointer* out, std::size_t bytes, Rest... rest) noexcept {
  DriverCall::note_memory();
  if (out == nullptr) return call.real(out, bytes, rest...);
  return charged(
      Bytes(bytes), stream, [&] { return call.real(out, bytes, rest...); }, [&] { return key_of(*out); },
      elsewhere);
}
template <typename Real, typename... Rest>
CallResult allocate_on(std::uint64_t stream, const Call<Real>& call, DevicePointer* out, std::size_t bytes,
                       Rest... rest) noexcept {
  return allocate_or(kNowhereElse, stream, call, out, bytes, rest...);
}

template <typename Real, typename... Rest>
CallResult allocate(const Call<Real>& call, DevicePointer* out, std::size_t bytes, Rest... rest) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(out, bytes, rest...);
  count(guard, CallGroup::kAllocate);
  return allocate_on(0, call, out, bytes, rest...);
}

template <typename Real>
CallResult allocate_plain(const Call<Real>& call, DevicePointer* out, std::size_t bytes) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(out, bytes);
  count(guard, CallGroup::kAllocate);
  if (out != nullptr &&
      stable_blocks().allocate(StableBlocks::Kind::kPlain, Bytes(bytes), call.caller, out)) {
    DriverCall::note_memory();
    return kSuccess;
  }
  const auto in_ddr = [&] {
    return overflow().allocate({Overflow::Form::kPlain, Bytes(bytes), call.caller}, out);
  };
  return allocate_or(in_ddr, 0, call, out, bytes);
}

template <typename Real>
CallResult allocate_pitched(const Call<Real>& call, DevicePointer* out, std::size_t* pitch, std::size_t width,
                            std::size_t height, unsigned element) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(out, pitch, width, height, element);
  count(guard, CallGroup::kAllocate);
  DriverCall::note_memory();
  if (out == nullptr || pitch == nullptr) return call.real(out, pitch, width, height, element);
  if (stable_blocks().allocate(StableBlocks::Kind::kPlain, pitched_bytes(width, height), call.caller, out)) {
    *pitch = round_up(Bytes(width), kPitchStep).count();
    return kSuccess;
  }
  const auto in_ddr = [&] {
    const Bytes size = pitched_bytes(width, height);
    if (!overflow().allocate({Overflow::Form::kPlain, size, call.caller}, out)) return false;
    *pitch = round_up(Bytes(width), kPitchStep).count();
    return true;
  };
  return charged(
      pitched_bytes(width, height), 0, [&] { return call.real(out, pitch, width, height, element); },
      [&] { return key_of(*out); }, in_ddr);
}

// Ordered on a stream: large ones are blocks from the start, smaller ones where the driver has no more. Who
// asks so does not ask twice.
template <typename Real, typename... Rest>
CallResult allocate_ordered(StreamName stream, const Call<Real>& call, DevicePointer* out, std::size_t bytes,
                            Rest... rest) noexcept {
  const auto as_block = [&](StableBlocks::Kind kind) {
    if (out == nullptr || !stable_blocks().allocate(kind, Bytes(bytes), call.caller, out)) return false;
    DriverCall::note_memory();
    return true;
  };
  if (as_block(StableBlocks::Kind::kOrdered)) return kSuccess;
  const auto elsewhere = [&] {
    return as_block(StableBlocks::Kind::kRefused) ||
           overflow().allocate({Overflow::Form::kOrdered, Bytes(bytes), call.caller}, out);
  };
  return allocate_or(elsewhere, id_of(stream.handle), call, out, bytes, rest...);
}

template <typename Real>
CallResult allocate_async(const Call<Real>& call, DevicePointer* out, std::size_t bytes,
                          StreamHandle stream) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(out, bytes, stream);
  count(guard, CallGroup::kAllocate);
  if (out != nullptr && stream_pools().allocate({stream, call.default_stream}, Bytes(bytes), out)) {
    DriverCall::note_memory();
    return kSuccess;
  }
  return allocate_ordered({stream, call.default_stream}, call, out, bytes, stream);
}

template <typename Real>
CallResult allocate_from_pool(const Call<Real>& call, DevicePointer* out, std::size_t bytes, PoolHandle pool,
                              StreamHandle stream) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(out, bytes, pool, stream);
  count(guard, CallGroup::kAllocate);
  // A pool of the guest's own has properties of its own.
  if (out == nullptr || !stream_pools().stands_for(pool))
    return allocate_on(id_of(stream), call, out, bytes, pool, stream);
  if (stream_pools().allocate({stream, call.default_stream}, Bytes(bytes), out)) {
    DriverCall::note_memory();
    return kSuccess;
  }
  return allocate_ordered({stream, call.default_stream}, call, out, bytes, pool, stream);
}

template <typename Real, typename... Rest>
CallResult allocate_host(const Call<Real>& call, void** out, std::size_t bytes, Rest... rest) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(out, bytes, rest...);
  count(guard, CallGroup::kAllocate);
  DriverCall::note_memory();
  const CallResult result = call.real(out, bytes, rest...);
  if (result == kSuccess) recorder().allocated(key_of(*out), {TierId::kDdr, Bytes(bytes)}, 0);
  return result;
}

template <typename Real, typename What, typename... Levels>
CallResult create_array(const Call<Real>& call, ArrayHandle* out, const What* what,
                        Levels... levels) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(out, what, levels...);
  count(guard, CallGroup::kAllocate);
  DriverCall::note_memory();
  if (out == nullptr || what == nullptr) return call.real(out, what, levels...);
  return charged(
      array_bytes(*what, levels...), 0, [&] { return call.real(out, what, levels...); },
      [&] { return key_of(*out); });
}

// ---------------------------------------------------------------- frees

template <typename Real, typename Pointer, typename... Rest>
CallResult free_known(std::uint64_t stream, const Call<Real>& call, Pointer address, Rest... rest) noexcept {
  const AllocationKey key = key_of(address);
  DriverCall::note_memory();
  const auto known = recorder().freeing(key, stream);
  const CallResult result = call.real(address, rest...);
  if (result != kSuccess && known) recorder().not_freed(key, *known, stream);
  if (result == kSuccess && known) {
    Recorder::freed(*known);
    if (known->charged >= kPage) stable_blocks().follow_the_wall(known->device);
  }
  if (result == kSuccess && !known && key != AllocationKey{}) Recorder::freed_unknown();
  return result;
}

template <typename Real>
CallResult free_now(const Call<Real>& call, DevicePointer address) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(address);
  count(guard, CallGroup::kFree);
  auto served = stream_pools().free_now(address);
  if (!served) served = stable_blocks().free_now(address);
  if (!served) served = overflow().free_now(address);
  if (served) {
    DriverCall::note_memory();
    return *served;
  }
  return free_known(0, call, address);
}

template <typename Real>
CallResult free_async(const Call<Real>& call, DevicePointer address, StreamHandle stream) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(address, stream);
  count(guard, CallGroup::kFree);
  auto served = stream_pools().free({stream, call.default_stream}, address);
  if (!served) served = stable_blocks().free_on({stream, call.default_stream}, address);
  if (!served) served = overflow().free_on({stream, call.default_stream}, address);
  if (served) {
    DriverCall::note_memory();
    return *served;
  }
  return free_known(id_of(stream), call, address, stream);
}

template <typename Real>
CallResult free_host(const Call<Real>& call, void* address) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(address);
  count(guard, CallGroup::kFree);
  return free_known(0, call, address);
}

template <typename Real>
CallResult free_array(const Call<Real>& call, ArrayHandle array) noexcept {
  return free_host(call, array);
}

// ---------------------------------------------------------------- what the driver says of memory

template <typename Real>
CallResult memory_info(const Call<Real>& call, std::size_t* available, std::size_t* total) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kQuery);
  const CallResult result = call.real(available, total);
  if (result == kSuccess && guard.outermost() && available != nullptr && total != nullptr)
    report_memory(current_device(), *available, *total);
  return result;
}

template <typename Real>
CallResult get_pool_attribute(const Call<Real>& call, PoolHandle pool, PoolAttribute attribute,
                              void* value) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kQuery);
  const CallResult result = call.real(pool, attribute, value);
  if (result == kSuccess && guard.outermost()) stream_pools().add_attribute(pool, attribute, value);
  return result;
}

template <typename Real>
CallResult set_pool_attribute(const Call<Real>& call, PoolHandle pool, PoolAttribute attribute,
                              void* value) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  const CallResult result = call.real(pool, attribute, value);
  if (result == kSuccess && guard.outermost()) stream_pools().reset_attribute(pool, attribute);
  return result;
}

template <typename Real>
CallResult trim_pool(const Call<Real>& call, PoolHandle pool, std::size_t keep) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  if (guard.outermost()) stream_pools().trim(pool, Bytes(keep));
  return call.real(pool, keep);
}

template <typename Real>
CallResult set_pool_access(const Call<Real>& call, PoolHandle pool, const AccessDescription* who,
                           std::size_t count_of) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  const CallResult result = call.real(pool, who, count_of);
  if (result == kSuccess && guard.outermost() && who != nullptr)
    return stream_pools().set_access(pool, {who, count_of});
  return result;
}

template <typename Real>
CallResult set_device_pool(const Call<Real>& call, DeviceOrdinal device, PoolHandle pool) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  const CallResult result = call.real(device, pool);
  if (result == kSuccess && guard.outermost()) stream_pools().device_uses(device, pool);
  return result;
}

// ---------------------------------------------------------------- streams, captures, ends

template <typename Real>
CallResult reset_device(const Call<Real>& call, DeviceOrdinal device) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  const CallResult result = call.real(device);
  if (result == kSuccess && guard.outermost()) {
    stream_pools().device_reset(device);
    stable_blocks().device_reset(device);
    overflow().device_reset(device);
    recorder().forget_device(device);
    launch_layouts().forget();
  }
  return result;
}

template <typename Real>
CallResult destroy_stream(const Call<Real>& call, StreamHandle stream) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  if (guard.outermost()) {
    stream_pools().stream_ends(stream);
    stable_blocks().stream_ends(stream);
  }
  return call.real(stream);
}

template <typename Real, typename... Rest>
CallResult begin_capture(const Call<Real>& call, StreamHandle stream, Rest... rest) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  if (!guard.outermost()) return call.real(stream, rest...);
  stream_pools().capture_begins({stream, call.default_stream});
  stable_blocks().capture_begins();
  const CallResult result = call.real(stream, rest...);
  if (result == kSuccess) return result;
  stream_pools().capture_ends({stream, call.default_stream});
  stable_blocks().capture_ended();
  overflow().capture_ended();
  return result;
}

template <typename Real>
CallResult end_capture(const Call<Real>& call, StreamHandle stream, void** graph) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  const CallResult result = call.real(stream, graph);
  // Also a capture that had been broken has ended now.
  if (guard.outermost()) {
    stream_pools().capture_ends({stream, call.default_stream});
    stable_blocks().capture_ended();
    overflow().capture_ended();
  }
  return result;
}

template <typename Real>
CallResult unload(const Call<Real>& call, void* module) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  launch_layouts().forget();
  return call.real(module);
}

// ---------------------------------------------------------------- functions asked for by name

template <typename Real, typename... Rest>
CallResult get_proc_address(const Call<Real>& call, const char* symbol, void** out, int version,
                            unsigned long long flags, Rest... rest) noexcept {
  const DriverCall guard;
  if (!guard.outermost()) return call.real(symbol, out, version, flags, rest...);
  count(guard, CallGroup::kQuery);
  const CallResult result = call.real(symbol, out, version, flags, rest...);
  // A missing symbol can be a success with a null answer.
  if (result != kSuccess || symbol == nullptr || out == nullptr || *out == nullptr) return result;
  if (void* ours = interceptor_for({symbol, flags}, *out)) *out = ours;
  return result;
}

// The runtime asks the driver, and may not come by our function for it.
inline CallResult replace_entry_point(CallResult result, const ProcQuery& query, void** out) noexcept {
  if (result != kSuccess || query.base == nullptr || out == nullptr || *out == nullptr) return result;
  if (is_interceptor(*out)) return result;
  if (void* ours = interceptor_for(query, *out)) *out = ours;
  return result;
}
// Without flags the function's own kind decides.
[[nodiscard]] inline unsigned long long flags_for(DefaultStream kind, unsigned long long flags) noexcept {
  return flags == 0 && kind == DefaultStream::kPerThread ? kAskPerThread : flags;
}

template <typename Real>
CallResult get_entry_point(const Call<Real>& call, const char* symbol, void** out, unsigned long long flags,
                           QueryResult* found) noexcept {
  const RuntimeCall guard;
  if (guard.outermost()) recorder().calling(CallGroup::kQuery);
  return replace_entry_point(call.real(symbol, out, flags, found),
                             {symbol, flags_for(call.default_stream, flags)}, out);
}
template <typename Real>
CallResult get_entry_point_by_version(const Call<Real>& call, const char* symbol, void** out,
                                      unsigned version, unsigned long long flags,
                                      QueryResult* found) noexcept {
  const RuntimeCall guard;
  if (guard.outermost()) recorder().calling(CallGroup::kQuery);
  return replace_entry_point(call.real(symbol, out, version, flags, found),
                             {symbol, flags_for(call.default_stream, flags)}, out);
}

// ---------------------------------------------------------------- the runtime

// Apart from what the driver's functions have seen; no address of a process has this bit.
[[nodiscard]] inline AllocationKey key_of_settled(const void* address) noexcept {
  return AllocationKey{reinterpret_cast<std::uintptr_t>(address) | (std::uint64_t{1} << 62)};
}

// An allocation that went past the driver's functions is charged late, and freed again if it does not fit.
[[nodiscard]] CallResult settle_unseen(TierId tier, void** out, Bytes size) noexcept;

template <TierId Tier, typename Real, typename... Rest>
CallResult runtime_allocate(const Call<Real>& call, void** out, std::size_t bytes, Rest... rest) noexcept {
  const RuntimeCall guard;
  if (guard.outermost()) recorder().calling(CallGroup::kAllocate);
  const CallResult result = call.real(out, bytes, rest...);
  if (result != kSuccess || !guard.outermost() || !guard.unseen_below()) return result;
  return settle_unseen(Tier, out, Bytes(bytes));
}

template <typename Real>
CallResult runtime_allocate_pitched(const Call<Real>& call, void** out, std::size_t* pitch, std::size_t width,
                                    std::size_t height) noexcept {
  const RuntimeCall guard;
  if (guard.outermost()) recorder().calling(CallGroup::kAllocate);
  const CallResult result = call.real(out, pitch, width, height);
  if (result != kSuccess || !guard.outermost() || !guard.unseen_below()) return result;
  return settle_unseen(TierId::kHbm, out, Bytes(*pitch * height));
}

template <typename Real, typename... Rest>
CallResult runtime_free(const Call<Real>& call, void* address, Rest... rest) noexcept {
  const RuntimeCall guard;
  if (!guard.outermost()) return call.real(address, rest...);
  recorder().calling(CallGroup::kFree);
  // Known here, and perhaps freed past the driver's functions: its address may be used again at once.
  const AllocationKey key = key_of_settled(address);
  const auto known = recorder().freeing(key, 0);
  const CallResult result = call.real(address, rest...);
  if (known && result == kSuccess) Recorder::freed(*known);
  if (known && result != kSuccess) recorder().not_freed(key, *known, 0);
  return result;
}

}  // namespace terrace::hooks::cuda
