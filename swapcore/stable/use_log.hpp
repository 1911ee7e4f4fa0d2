// The uses of blocks in the order in which they began, written by many threads and read by one, without a
// lock. A reader that falls behind by more than the log holds is told that it has missed some.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace terrace {

class UseLog {
 public:
  // Place for `count` uses; the first one's turn.
  [[nodiscard]] std::uint64_t reserve(std::size_t count) {
    return next_.fetch_add(count, std::memory_order_relaxed);
  }
  void write(std::uint64_t turn, std::uint32_t block) {
    (*entries_)[turn % kEntries].store(tag_of(turn) << 32 | block, std::memory_order_release);
  }
  [[nodiscard]] std::uint64_t now() const { return next_.load(std::memory_order_relaxed); }

  // Appends what was written from turn `from` on, up to the first use that is reserved and not yet written.
  // Returns the turn to go on from.
  std::uint64_t read(std::uint64_t from, std::vector<std::uint32_t>& blocks) const {
    const std::uint64_t end = now();
    if (end - from > kEntries / 2) from = end;  // missed: what is older may be overwritten while it is read
    for (; from < end; ++from) {
      const std::uint64_t entry = (*entries_)[from % kEntries].load(std::memory_order_acquire);
      if (entry >> 32 != tag_of(from)) break;
      blocks.push_back(static_cast<std::uint32_t>(entry));
    }
    return from;
  }

 private:
  static constexpr std::uint64_t kEntries = 1 << 16;
  // Of the turn's round through the log; never that of an entry not written yet.
  static std::uint64_t tag_of(std::uint64_t turn) { return (turn / kEntries + 1) & 0xffffffff; }
  std::unique_ptr<std::array<std::atomic<std::uint64_t>, kEntries>> entries_ =
      std::make_unique<std::array<std::atomic<std::uint64_t>, kEntries>>();
  std::atomic<std::uint64_t> next_{0};
};

}  // namespace terrace
