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

  struct Found {
    Allocation allocation;
    bool last = false;  // no other reference through a handle: its release would be the last
    bool withheld = false;
  };
  [[nodiscard]] std::optional<Found> find(PhysicalHandle handle) const;
  [[nodiscard]] std::optional<Allocation> mapped_at(DevicePointer address) const;

  // What has become free by it, if that was the last hold. The driver was not told of a release that was
  // withheld: the handle comes back with what is free at last.
  enum class Known : unsigned char { kNo, kYes };
  enum class Release : unsigned char { kMade, kWithheld };
  struct Freed {
    Allocation allocation;
    PhysicalHandle withheld = 0;
  };
  struct Ended {
    Known known = Known::kNo;
    std::optional<Freed> freed{};
  };
  Ended released(PhysicalHandle handle, Release how);
  // Calls freed(what) for each that ends with a mapping in the range.
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
    PhysicalHandle withheld = 0;
  };
  using Id = unsigned long long;  // handles are used again while mappings of an older one live
  [[nodiscard]] std::optional<Freed> end_if_unheld(Id id);
  [[nodiscard]] std::optional<Freed> drop_mapping(Id id);

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
