// What backs blocks of stable addresses: handles of HBM inside a budget, and of pinned host memory inside the
// lease, both kept for the next block of their size.
//
// A handle may be mapped twice: under its block, and at an alias, an address of its own, where a copy reaches
// it while the block still shows the other side. Aliases stay for as long as the handle lives. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "allocator/host_handle_pool.hpp"
#include "runtime/device.hpp"
#include "swapcore/stable/stable_block.hpp"

namespace terrace {

class BackingStore {
 public:
  struct Options {
    Bytes hbm_budget;
    std::shared_ptr<HostLease> lease;
    std::vector<int> nodes{0};
  };
  // Errors: those of HostHandlePool::create().
  [[nodiscard]] static Result<std::unique_ptr<BackingStore>> create(Device& device, Options options);
  ~BackingStore();  // all handles given back before
  BackingStore(const BackingStore&) = delete;
  BackingStore& operator=(const BackingStore&) = delete;

  enum class Alias : std::uint8_t { kNone, kMapped };
  // Handles kept for other sizes are given up first. A device that has less than the budget says lowers the
  // budget to what is held. Errors: kOutOfBudget (bytes: those lacking), and what the device says.
  [[nodiscard]] Result<HbmHandle> take_hbm(Bytes size, Alias alias);
  void give_back(const HbmHandle& handle);
  // Always with an alias. Errors: those of HostHandlePool::take(), kept handles having been given up.
  [[nodiscard]] Result<HostBacking> take_host(Bytes size);
  void give_back(const HostBacking& backing);

  void set_hbm_budget(Bytes budget);
  [[nodiscard]] Bytes hbm_room() const;  // that take_hbm() would find, with all kept handles given up
  [[nodiscard]] Bytes hbm_budget() const;
  [[nodiscard]] Bytes hbm_held() const;
  [[nodiscard]] Bytes hbm_kept() const;  // of that, for other blocks
  [[nodiscard]] Bytes hbm_peak() const;
  [[nodiscard]] Bytes host_made() const;  // handles of it so far, also those that are gone

 private:
  BackingStore(Device& device, Bytes hbm_budget) : device_(device), hbm_budget_(hbm_budget) {}
  [[nodiscard]] Result<Address> map_alias(Physical physical, Bytes size);
  void unmap_alias(Address alias, Bytes size);
  [[nodiscard]] std::vector<HbmHandle> give_up(Bytes enough);  // mutex_ held
  void destroy(const HbmHandle& handle);
  void destroy(const HostBacking& backing);
  [[nodiscard]] Result<Physical> create_hbm(Bytes size);
  [[nodiscard]] Result<HostBacking> new_host(Bytes size);

  Device& device_;
  std::unique_ptr<HostHandlePool> host_;
  mutable std::mutex mutex_;  // all below
  Bytes hbm_budget_, hbm_held_, hbm_peak_, host_made_;
  std::map<Bytes, std::vector<HbmHandle>> kept_;
  Bytes kept_bytes_;
  std::map<Bytes, std::vector<HostBacking>> kept_host_;
};

}  // namespace terrace
