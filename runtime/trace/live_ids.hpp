// Which recorded block lives at an address: a table without heap memory, of a fixed size, that takes pages
// from the system only where it is used. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "runtime/trace/format.hpp"

namespace terrace::trace {

class LiveIds {
 public:
  constexpr LiveIds() = default;
  LiveIds(const LiveIds&) = delete;
  LiveIds& operator=(const LiveIds&) = delete;
  // Nothing: the pages live as long as the process, for a recorder serves its last call.

  // Precondition: address is not null and not in the table. False where kMostLiveBlocks are in it already, or
  // the system has no memory for it.
  [[nodiscard]] bool put(std::uint64_t address, std::uint64_t id) noexcept;
  [[nodiscard]] std::optional<std::uint64_t> take(std::uint64_t address) noexcept;
  void clear() noexcept;  // and gives the pages back
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  struct Slot {
    std::uint64_t address;  // 0: free
    std::uint64_t id;
  };
  [[nodiscard]] bool map_slots() noexcept;

  Slot* slots_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace terrace::trace
