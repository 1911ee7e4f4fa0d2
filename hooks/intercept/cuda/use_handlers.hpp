// Handlers of calls by which a guest uses memory: launches, copies, graphs, libraries, and what shows memory
// to others. What they can reach is noted before the driver is asked (guest_uses.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "hooks/intercept/cuda/handlers.hpp"
#include "hooks/intercept/cuda/pointer_pages.hpp"
#include "hooks/intercept/cuda/shared_blocks.hpp"

namespace terrace::hooks::cuda {

// ---------------------------------------------------------------- launches

template <typename Real>
CallResult launch(const Call<Real>& call, FunctionHandle function, unsigned gx, unsigned gy, unsigned gz,
                  unsigned bx, unsigned by, unsigned bz, unsigned shared, StreamHandle stream,
                  void** parameters, auto... extra) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kLaunch);
  GuestUses uses;
  DriverCall::note_launch();
  if (guard.outermost()) {
    see_launch({function, parameters, extra...});
    uses.launch({function, parameters, extra...}, {stream, call.default_stream});
  }
  return call.real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra...);
}
template <typename Real>
CallResult launch(const Call<Real>& call, const LaunchConfig* config, FunctionHandle function,
                  void** parameters, void** extra) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kLaunch);
  GuestUses uses;
  DriverCall::note_launch();
  if (guard.outermost() && config != nullptr) {
    see_launch({function, parameters, extra});
    uses.launch({function, parameters, extra}, {config->stream, call.default_stream});
  }
  return call.real(config, function, parameters, extra);
}

// Of a runtime that has a way of its own into the driver nothing would be known: then nothing moves.
template <typename Real, typename... Arguments>
CallResult runtime_launch(const Call<Real>& call, Arguments... arguments) noexcept {
  const RuntimeCall guard;
  if (guard.outermost()) recorder().calling(CallGroup::kLaunch);
  const CallResult result = call.real(arguments...);
  if (result == kSuccess && guard.outermost() && guard.no_launch_below() && stable_blocks().any())
    stable_blocks().launched_unseen();
  return result;
}

// On a stream that the call names last: what it reaches is in structures that are not read.
template <CallGroup Group, typename Real, typename... Arguments>
CallResult use_everything(const Call<Real>& call, Arguments... arguments) noexcept {
  const DriverCall guard;
  count(guard, Group);
  GuestUses uses;
  if (guard.outermost()) {
    StreamHandle stream = nullptr;
    (
        (void)[&](auto argument) {
          if constexpr (std::is_same_v<decltype(argument), StreamHandle>) stream = argument;
        }(arguments),
        ...);
    uses.everything({stream, call.default_stream});
  }
  return call.real(arguments...);
}

template <CallGroup Group, typename Real, typename... Rest>
CallResult use_everything_first(const Call<Real>& call, StreamHandle stream, Rest... rest) noexcept {
  const DriverCall guard;
  count(guard, Group);
  GuestUses uses;
  if (guard.outermost()) uses.everything({stream, call.default_stream});
  return call.real(stream, rest...);
}

// ---------------------------------------------------------------- copies

enum class Ordered : std::uint8_t { kNow, kOnStream };

// Every number among the arguments that may be an address; the stream is the last handle.
template <Ordered How, typename Real, typename... Arguments>
CallResult copy(const Call<Real>& call, Arguments... arguments) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kCopy);
  GuestUses uses;
  if (guard.outermost()) {
    std::array<DevicePointer, sizeof...(Arguments)> ends{};
    std::size_t used = 0;
    StreamHandle stream = nullptr;
    const auto look = [&](auto argument) {
      if constexpr (std::is_same_v<decltype(argument), DevicePointer>) {
        ends[used++] = argument;
      } else if constexpr (std::is_pointer_v<decltype(argument)>) {
        ends[used++] = reinterpret_cast<std::uintptr_t>(argument);
        if constexpr (How == Ordered::kOnStream && std::is_same_v<decltype(argument), StreamHandle>)
          stream = argument;
      }
    };
    (look(arguments), ...);
    uses.copy({stream, call.default_stream}, {ends.data(), used});
  }
  return call.real(arguments...);
}

// The same, with a look at what is copied to device memory.
template <Ordered How, typename Real, typename From, typename... Rest>
CallResult copy_bytes(const Call<Real>& call, DevicePointer to, From from, std::size_t bytes,
                      Rest... rest) noexcept {
  if constexpr (std::is_pointer_v<From>) {
    see_copy_from_host(to, from, bytes);
  } else {
    see_copy(to, from, bytes);
  }
  return copy<How>(call, to, from, bytes, rest...);
}

// A copy that its first argument describes.
template <std::size_t Size, typename Real, typename... Rest>
CallResult copy_described(const Call<Real>& call, const void* what, Rest... rest) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kCopy);
  GuestUses uses;
  if (guard.outermost() && what != nullptr) {
    std::array<DevicePointer, Size / sizeof(DevicePointer)> words{};
    std::memcpy(words.data(), what, sizeof words);
    StreamHandle stream = nullptr;
    (
        (void)[&](auto argument) {
          if constexpr (std::is_same_v<decltype(argument), StreamHandle>) stream = argument;
        }(rest),
        ...);
    uses.copy({stream, call.default_stream}, words);
  }
  return call.real(what, rest...);
}

// ---------------------------------------------------------------- tensor maps

template <typename Real, typename... Rest>
CallResult encode_map(const Call<Real>& call, void* map, int type, unsigned rank, void* address,
                      Rest... rest) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  const CallResult result = call.real(map, type, rank, address, rest...);
  if (result == kSuccess) tensor_maps().made(map, address);
  return result;
}
template <typename Real>
CallResult replace_address(const Call<Real>& call, void* map, void* address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  const CallResult result = call.real(map, address);
  if (result == kSuccess) tensor_maps().made(map, address);
  return result;
}

// ---------------------------------------------------------------- libraries

// The launches below it use what it was given; or everything, where that is tables of pointers.
template <CallGroup Group, Reach How = Reach::kArguments, typename Real, typename... Arguments>
CallResult library(const Call<Real>& call, Arguments... arguments) noexcept {
  if (!LibraryArguments::under_way() && !RuntimeCall::under_way()) recorder().calling(Group);
  std::array<std::uint64_t, sizeof...(Arguments)> words{};
  std::size_t used = 0;
  const auto look = [&](auto argument) {
    if constexpr (std::is_pointer_v<decltype(argument)>)
      words[used++] = reinterpret_cast<std::uintptr_t>(argument);
  };
  (look(arguments), ...);
  const LibraryArguments given({words.data(), used}, How);
  return call.real(arguments...);
}

template <typename Real, typename... Arguments>
CallResult library_of_tables(const Call<Real>& call, Arguments... arguments) noexcept {
  return library<CallGroup::kLaunch, Reach::kEverything>(call, arguments...);
}

// Another process, or a network card, is shown where the memory lies.
template <typename Real>
CallResult register_buffer(const Call<Real>& call, void* world, void* buffer, std::size_t bytes,
                           void** handle) noexcept {
  stable_blocks().fix(reinterpret_cast<std::uintptr_t>(buffer), FixedReason::kRegistered,
                      StableBlocks::Where::kBring);
  return library<CallGroup::kShare>(call, world, buffer, bytes, handle);
}

// ---------------------------------------------------------------- what shows memory to others

// Memory of the process's own pool cannot be shared, as a driver's default pool can't.
template <typename Real, typename Out>
CallResult export_memory(const Call<Real>& call, Out* out, DevicePointer address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kShare);
  if (stream_pools().holds(address)) return kInvalidValue;
  if constexpr (std::is_same_v<Out, IpcHandle>) {
    if (const auto shown = guard.outermost() ? shared_blocks().show(out, address) : std::nullopt)
      return *shown;
  }
  return call.real(out, address);
}

template <typename Real>
CallResult open_shared(const Call<Real>& call, DevicePointer* out, const IpcHandle& handle,
                       unsigned flags) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kShare);
  if (const auto opened = guard.outermost() ? shared_blocks().open(out, handle) : std::nullopt)
    return *opened;
  return call.real(out, handle, flags);
}

template <typename Real>
CallResult close_shared(const Call<Real>& call, DevicePointer address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kShare);
  if (const auto closed = guard.outermost() ? shared_blocks().close(address) : std::nullopt) return *closed;
  return call.real(address);
}

// An attribute that is set, or a handle that is given out, for who reaches the memory past the driver.
template <typename Real, typename... Rest>
CallResult show_range(const Call<Real>& call, void* out, DevicePointer address, Rest... rest) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kShare);
  if (guard.outermost()) stable_blocks().fix(address, FixedReason::kRegistered, StableBlocks::Where::kBring);
  return call.real(out, address, rest...);
}
template <typename Real>
CallResult bind_range(const Call<Real>& call, PhysicalHandle group, std::size_t offset, DevicePointer address,
                      std::size_t bytes, unsigned long long flags) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kShare);
  if (guard.outermost()) stable_blocks().fix(address, FixedReason::kRegistered, StableBlocks::Where::kBring);
  return call.real(group, offset, address, bytes, flags);
}
template <typename Real>
CallResult set_attribute(const Call<Real>& call, const void* value, int attribute,
                         DevicePointer address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kShare);
  if (guard.outermost()) stable_blocks().fix(address, FixedReason::kRegistered, StableBlocks::Where::kBring);
  return call.real(value, attribute, address);
}

// Kernels reach what a texture lies over without naming it.
template <typename Real>
CallResult create_texture(const Call<Real>& call, unsigned long long* out, const void* resource,
                          const void* texture, const void* view) noexcept {
  static constexpr std::size_t kResourceBytes = 144;  // CUDA_RESOURCE_DESC
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  if (guard.outermost() && resource != nullptr && stable_blocks().any()) {
    each_word(resource, kResourceBytes, [](std::uint64_t word) {
      stable_blocks().fix(word, FixedReason::kRegistered, StableBlocks::Where::kBring);
    });
  }
  return call.real(out, resource, texture, view);
}

// What the guest has allocated there: a driver knows of the memory mapped there, if any is, and of all the
// addresses around it.
[[nodiscard]] inline std::optional<Extent> extent_around(DevicePointer address) noexcept {
  if (const auto pooled = stream_pools().find(address))
    return Extent{reinterpret_cast<std::uintptr_t>(pooled->address), pooled->size.count()};
  if (const auto block = stable_blocks().extent_around(address)) return block;
  return overflow().extent_around(address);
}
// None of them is asked to be where it can be reached: the answer is known without.
template <typename Real>
CallResult get_address_range(const Call<Real>& call, DevicePointer* base, std::size_t* bytes,
                             DevicePointer address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kQuery);
  const auto extent = guard.outermost() ? extent_around(address) : std::nullopt;
  if (!extent) return call.real(base, bytes, address);
  if (base != nullptr) *base = extent->at;
  if (bytes != nullptr) *bytes = extent->bytes;
  return kSuccess;
}
template <typename Real>
CallResult get_access(const Call<Real>& call, unsigned long long* flags, const Location* who,
                      DevicePointer address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kQuery);
  if (guard.outermost()) stable_blocks().show(address);
  return call.real(flags, who, address);
}

// CU_POINTER_ATTRIBUTE_...
inline constexpr int kMemoryType = 2, kTokens = 5, kDeviceOrdinal = 9, kRangeStart = 11, kRangeBytes = 12;

// A block is asked about: tokens are for who reaches the memory past the driver.
inline void before_asking(int attribute, DevicePointer address) noexcept {
  if (attribute == kTokens)
    stable_blocks().fix(address, FixedReason::kRegistered, StableBlocks::Where::kBring);
  else
    stable_blocks().show(address);
}
// What a block is does not depend on where it lies now.
inline void describe_block(int attribute, void* value, DevicePointer address) noexcept {
  constexpr unsigned kDeviceMemory = 2;  // CU_MEMORYTYPE_DEVICE
  if (value == nullptr) return;
  if (attribute == kRangeStart || attribute == kRangeBytes) {
    const auto extent = extent_around(address);
    if (!extent) return;
    const std::uint64_t word = attribute == kRangeStart ? extent->at : extent->bytes;
    std::memcpy(value, &word, sizeof word);
    return;
  }
  if (attribute != kMemoryType && attribute != kDeviceOrdinal) return;
  const DeviceBlocks* const blocks = stable_blocks().holding(address);
  const auto device = blocks != nullptr ? std::optional(blocks->ordinal) : overflow().device_of(address);
  if (!device) return;
  if (attribute == kMemoryType) std::memcpy(value, &kDeviceMemory, sizeof kDeviceMemory);
  if (attribute == kDeviceOrdinal) std::memcpy(value, &*device, sizeof *device);
}
template <typename Real>
CallResult get_attribute(const Call<Real>& call, void* value, int attribute, DevicePointer address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kQuery);
  if (guard.outermost()) before_asking(attribute, address);
  const CallResult result = call.real(value, attribute, address);
  if (result == kSuccess && guard.outermost()) describe_block(attribute, value, address);
  return result;
}
template <typename Real>
CallResult get_attributes(const Call<Real>& call, unsigned how_many, int* attributes, void** values,
                          DevicePointer address) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kQuery);
  if (guard.outermost() && attributes != nullptr) {
    const bool tokens = std::count(attributes, attributes + how_many, kTokens) > 0;
    before_asking(tokens ? kTokens : kMemoryType, address);
  }
  const CallResult result = call.real(how_many, attributes, values, address);
  if (result != kSuccess || !guard.outermost() || attributes == nullptr || values == nullptr) return result;
  for (unsigned i = 0; i < how_many; ++i) describe_block(attributes[i], values[i], address);
  return result;
}

// From now on this context's device reaches the memory of the other's.
template <typename Real>
CallResult enable_peer(const Call<Real>& call, ContextHandle peer, unsigned flags) noexcept {
  const DriverCall guard;
  count(guard, CallGroup::kOther);
  const CallResult result = call.real(peer, flags);
  if (result != kSuccess || !guard.outermost()) return result;
  const DeviceOrdinal here = current_device();
  DeviceOrdinal owner = -1;
  const DriverCalls* driver = driver_calls();
  if (driver == nullptr) return result;
  {
    const CurrentContext other(*driver, peer);
    if (other.result() == kSuccess) owner = current_device();
  }
  const CallResult shared = stable_blocks().share_with(owner, here);
  return shared == kSuccess ? overflow().share_with(owner, here) : shared;
}

}  // namespace terrace::hooks::cuda
