// What happens around a passed-through call, by the shape of its arguments. Each handler makes the real call
// exactly once, with the arguments as they came, and returns what it returned.
#pragma once

#include <bit>
#include <type_traits>

#include "hooks/intercept/call_guard.hpp"
#include "hooks/intercept/cuda/abi.hpp"
#include "hooks/intercept/cuda/symbols.hpp"
#include "hooks/intercept/recorder.hpp"

namespace terrace::hooks::cuda {

template <typename Pointer>
[[nodiscard]] AllocationKey key_of(Pointer pointer) noexcept {
  if constexpr (std::is_pointer_v<Pointer>) {
    return key_of_address(reinterpret_cast<std::uintptr_t>(pointer));
  } else {
    return key_of_address(pointer);
  }
}

// The stream among what follows address and size; zero where a call names none.
[[nodiscard]] inline std::uint64_t stream_of() noexcept { return 0; }
[[nodiscard]] inline std::uint64_t stream_of(unsigned /*flags*/) noexcept { return 0; }
[[nodiscard]] inline std::uint64_t stream_of(StreamHandle stream) noexcept {
  return reinterpret_cast<std::uintptr_t>(stream);
}
[[nodiscard]] inline std::uint64_t stream_of(MemoryPool, StreamHandle stream) noexcept {
  return stream_of(stream);
}

template <TierId Tier, typename Real, typename Pointer, typename... Rest>
CallResult allocate(Real real, Pointer* out, std::size_t bytes, Rest... rest) noexcept {
  const CallGuard guard;
  if (!guard.outermost()) return real(out, bytes, rest...);
  recorder().calling(CallGroup::kAllocate);
  const CallResult result = real(out, bytes, rest...);
  if (result == kSuccess) recorder().allocated(key_of(*out), {Tier, Bytes(bytes)}, stream_of(rest...));
  return result;
}

template <typename Real>
CallResult allocate_pitched(Real real, void** out, std::size_t* pitch, std::size_t width,
                            std::size_t height) noexcept {
  const CallGuard guard;
  if (!guard.outermost()) return real(out, pitch, width, height);
  recorder().calling(CallGroup::kAllocate);
  const CallResult result = real(out, pitch, width, height);
  if (result == kSuccess)
    recorder().allocated(key_of(*out), {TierId::kHbm, Bytes(*pitch * height)}, stream_of());
  return result;
}

template <typename Free>
CallResult release_key(AllocationKey key, std::uint64_t stream, Free free) noexcept {
  const auto known = recorder().freeing(key, stream);
  const CallResult result = free();
  if (result != kSuccess && known) recorder().not_freed(key, *known, stream);
  if (result == kSuccess && !known && key != AllocationKey{}) recorder().freed_unknown();
  return result;
}

template <typename Real, typename Pointer, typename... Rest>
CallResult release(Real real, Pointer address, Rest... rest) noexcept {
  const CallGuard guard;
  if (!guard.outermost()) return real(address, rest...);
  recorder().calling(CallGroup::kFree);
  return release_key(key_of(address), stream_of(rest...), [&] { return real(address, rest...); });
}

template <typename Real>
CallResult create_physical(Real real, PhysicalHandle* out, std::size_t bytes,
                           const AllocationProperties* properties, unsigned long long flags) noexcept {
  const CallGuard guard;
  if (!guard.outermost()) return real(out, bytes, properties, flags);
  recorder().calling(CallGroup::kMap);
  const CallResult result = real(out, bytes, properties, flags);
  if (result == kSuccess) {
    const bool on_device = properties->location_type == LocationType::kDevice;
    recorder().allocated(key_of_handle(*out), {on_device ? TierId::kHbm : TierId::kDdr, Bytes(bytes)},
                         stream_of());
  }
  return result;
}

template <typename Real>
CallResult release_physical(Real real, PhysicalHandle handle) noexcept {
  const CallGuard guard;
  if (!guard.outermost()) return real(handle);
  recorder().calling(CallGroup::kMap);
  return release_key(key_of_handle(handle), stream_of(), [&] { return real(handle); });
}

template <typename Real, typename... Rest>
CallResult get_proc_address(Real real, const char* symbol, void** out, Rest... rest) noexcept {
  const CallGuard guard;
  if (!guard.outermost()) return real(symbol, out, rest...);
  recorder().calling(CallGroup::kQuery);
  const CallResult result = real(symbol, out, rest...);
  // A missing symbol can be a success with a null answer.
  if (result != kSuccess || symbol == nullptr || out == nullptr || *out == nullptr) return result;
  if (void* ours = interceptor_of(symbol, *out)) *out = ours;
  return result;
}

}  // namespace terrace::hooks::cuda
