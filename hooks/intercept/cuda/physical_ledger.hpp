// Physical memory that the guest creates and maps itself: charged until both its handle has been released and
// the last mapping is gone.
//
// A driver keeps memory alive by any of the two, so neither the release nor the unmap alone gives the bytes
// back. Imported memory is another process's: known here, charged there. Calls that create or map memory are
// rare and slow, so one lock will do.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

#include "hooks/intercept/allocation_table.hpp"
#include "hooks/intercept/cuda/abi.hpp"

namespace terrace::hooks::cuda {

class PhysicalLedger {
 public:
  void created(PhysicalHandle handle, const Allocation& allocation);
  // One more reference, through a handle that was perhaps released before, to what is mapped at an address.
  void retained(PhysicalHandle handle, DevicePointer address);
  void mapped(DevicePointer at, std::size_t bytes, PhysicalHandle handle);

  [[nodiscard]] std::optional<Allocation> find(PhysicalHandle handle) const;
  [[nodiscard]] std::optional<Allocation> mapped_at(DevicePointer address) const;

  // What has become free by it, if that was the last hold.
  enum class Known : unsigned char { kNo, kYes };
  struct Ended {
    Known known = Known::kNo;
    std::optional<Allocation> freed{};
  };
  Ended released(PhysicalHandle handle);
  // Calls freed(allocation) for each that ends with a mapping in the range.
  template <typename Visit>
  void unmapped(DevicePointer at, std::size_t bytes, const Visit& freed) {
    const std::lock_guard lock(mutex_);
    auto it = mappings_.lower_bound(at);
    while (it != mappings_.end() && it->first < at + bytes) {
      if (const auto ended = drop_mapping(it->second.memory)) freed(*ended);
      it = mappings_.erase(it);
    }
  }
  void start_again_in_child();

 private:
  struct Memory {
    Allocation allocation;
    unsigned references = 0;  // of the handle
    unsigned mappings = 0;
  };
  using Id = unsigned long long;  // handles are used again while mappings of an older one live
  [[nodiscard]] std::optional<Allocation> allocation_of(Id id) const;  // mutex_ held, as below
  [[nodiscard]] std::optional<Allocation> end_if_unheld(Id id);
  [[nodiscard]] std::optional<Allocation> drop_mapping(Id id);

  mutable std::mutex mutex_;
  std::map<Id, Memory> memories_;
  std::map<PhysicalHandle, Id> handles_;
  struct Mapping {
    Id memory = 0;
    std::size_t bytes = 0;
  };
  std::map<DevicePointer, Mapping> mappings_;
  Id last_id_ = 0;
};

// The one of this process; never destroyed.
[[nodiscard]] PhysicalLedger& physical_ledger() noexcept;

}  // namespace terrace::hooks::cuda
