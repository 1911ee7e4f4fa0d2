// Small ids for things, and the things back for their ids: how streams and events become handles.
//
// An id carries a generation, so that a handle kept past its erase finds nothing rather than somebody else's
// thing, until its slot has been reused 4095 times. No id is 0. Safe from any thread; find() is a shared lock
// and a copy of T.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "runtime/assert.hpp"

namespace terrace {

template <typename T>
class SlotTable {
 public:
  [[nodiscard]] std::uint32_t insert(T value) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      TERRACE_CHECK(slots_.size() < kMaxSlots, "fewer than a million handles live");
      free_.push_back(static_cast<std::uint32_t>(slots_.size()));
      slots_.emplace_back();
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    Slot& slot = slots_[index];
    slot.generation = slot.generation % kGenerations + 1;
    slot.value.emplace(std::move(value));
    ++live_;
    return slot.generation << kIndexBits | index;
  }

  [[nodiscard]] std::optional<T> find(std::uint32_t id) const {
    const std::shared_lock lock(mutex_);
    const std::uint32_t index = id & (kMaxSlots - 1);
    if (index >= slots_.size() || slots_[index].generation != id >> kIndexBits) return std::nullopt;
    return slots_[index].value;
  }

  // Takes the thing out; nothing where the id has none.
  std::optional<T> erase(std::uint32_t id) {
    const std::lock_guard lock(mutex_);
    const std::uint32_t index = id & (kMaxSlots - 1);
    if (index >= slots_.size() || slots_[index].generation != id >> kIndexBits) return std::nullopt;
    std::optional<T> taken = std::exchange(slots_[index].value, std::nullopt);
    if (!taken) return std::nullopt;
    free_.push_back(index);
    --live_;
    return taken;
  }

  [[nodiscard]] std::vector<T> all() const {
    const std::shared_lock lock(mutex_);
    std::vector<T> all;
    for (const Slot& slot : slots_) {
      if (slot.value) all.push_back(*slot.value);
    }
    return all;
  }

  [[nodiscard]] std::size_t live() const {
    const std::shared_lock lock(mutex_);
    return live_;
  }

 private:
  static constexpr unsigned kIndexBits = 20;
  static constexpr std::uint32_t kMaxSlots = 1U << kIndexBits;
  static constexpr std::uint32_t kGenerations = (1U << (32 - kIndexBits)) - 1;
  struct Slot {
    std::uint32_t generation = 0;
    std::optional<T> value;
  };

  mutable std::shared_mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::size_t live_ = 0;
};

}  // namespace terrace
