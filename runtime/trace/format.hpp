// The file of a trace: a header, then the events in the order in which they happened.
//
//   header  magic (8 bytes), version (2, little endian), layer (1), device kind and process name (each a
//   length
//           byte and that many bytes)
//   event   a tag byte, then numbers as LEB128 varints of at most 64 bits:
//             tag        bits 0-1 kind (1 allocate, 2 free), bit 2 a stream follows, bit 3 a thread follows,
//                        bits 4-6 of an allocation its pool (7: unknown), all others 0
//             time       microseconds since the event before
//             stream     where it differs from the event before; at first 0
//             thread     likewise
//             allocate   bytes. Allocations are numbered from 0 in order: that number is the block's id
//             free       how many allocations ago the block was allocated, counting its own: 1 is the newest
//
// Addresses are not kept: two runs of one program give the same bytes but for times, and they compress well.
// A file may end anywhere: a torn last event is dropped.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "runtime/units.hpp"

namespace terrace::trace {

inline constexpr std::array<unsigned char, 8> kMagic = {0x89, 'T', 'R', 'A', 'C', 'E', '\r', '\n'};
inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::size_t kLayerOffset = kMagic.size() + sizeof kVersion;
inline constexpr std::size_t kMostNameBytes = 64;  // of the device kind, and of the process name
inline constexpr std::size_t kMostHeaderBytes = kLayerOffset + 1 + 2 * (1 + kMostNameBytes);
inline constexpr std::size_t kMostEventBytes = 48;
// Bounds that no recording exceeds; a reader refuses what does.
inline constexpr Bytes kLargestBlock = Bytes(1ULL << 48);
inline constexpr std::size_t kMostLiveBlocks = 1ULL << 18;

// Whose calls were recorded. The higher is nearer to the user, and is kept where a process has both.
enum class Layer : std::uint8_t { kDriverCalls = 1, kPool = 2 };
[[nodiscard]] const char* name_of(Layer layer);  // "driver calls", "pool"

struct Header {
  Layer layer = Layer::kPool;
  std::string device_kind;  // "cuda", "emulated", or "unknown"
  std::string process;      // the program's file name
};

inline constexpr std::optional<Pool> kUnknown = std::nullopt;

struct Event {
  enum class Kind : std::uint8_t { kAllocate = 1, kFree = 2 };
  Kind kind = Kind::kAllocate;
  std::uint64_t id = 0;            // the block's number, in order of allocation
  Bytes size;                      // as asked for; of a free, when read: the block's
  std::uint64_t stream = 0;        // the handle; work that knows no stream has 0
  std::optional<Pool> pool;        // of an allocation
  std::uint32_t thread = 0;        // numbered in order of appearance
  std::uint64_t microseconds = 0;  // since the recording began
};

// Both work without heap memory: they serve inside any call of any process.
// Returns the bytes written. Names are cut to kMostNameBytes.
[[nodiscard]] std::size_t encode_header(std::span<std::byte, kMostHeaderBytes> to, Layer layer,
                                        std::string_view device_kind, std::string_view process) noexcept;

class EventEncoder {
 public:
  constexpr EventEncoder() = default;
  // Returns the bytes written. Preconditions: an allocation's id is allocations() and its size at most
  // kLargestBlock; a free's id is less; time does not go back.
  [[nodiscard]] std::size_t encode(std::span<std::byte, kMostEventBytes> to, const Event& event) noexcept;
  [[nodiscard]] std::uint64_t allocations() const { return allocations_; }

 private:
  std::uint64_t allocations_ = 0;
  std::uint64_t stream_ = 0;
  std::uint64_t microseconds_ = 0;
  std::uint32_t thread_ = 0;
};

namespace tag {
inline constexpr unsigned kKindMask = 3;
inline constexpr unsigned kStreamFollows = 1U << 2;
inline constexpr unsigned kThreadFollows = 1U << 3;
inline constexpr unsigned kPoolShift = 4;
inline constexpr unsigned kPoolUnknown = 7;
inline constexpr unsigned kUnused = 1U << 7;
static_assert(kPoolCount <= static_cast<int>(kPoolUnknown));
}  // namespace tag

}  // namespace terrace::trace
