#include "swapcore/stable/backing_store.hpp"

#include <algorithm>
#include <utility>

namespace terrace {

Result<std::unique_ptr<BackingStore>> BackingStore::create(Device& device, Options options) {
  auto store = std::unique_ptr<BackingStore>(new BackingStore(device, options.hbm_budget));
  // Handles have the size of their blocks: physical memory is mapped whole.
  auto host = HostHandlePool::create(device, {.lease = std::move(options.lease),
                                              .nodes = std::move(options.nodes),
                                              .chunk = device.info().granularity});
  if (!host.ok()) return host.error();
  store->host_ = std::move(*host);
  return store;
}

BackingStore::~BackingStore() {
  for (const auto& [size, handles] : kept_) {
    for (const HbmHandle& handle : handles) destroy(handle);
  }
  for (const auto& [size, handles] : kept_host_) {
    for (const HostBacking& backing : handles) destroy(backing);
  }
}

Result<Address> BackingStore::map_alias(Physical physical, Bytes size) {
  const Result<Address> at = device_.reserve(size);
  if (!at.ok()) return at;
  Status mapped = device_.map(*at, physical, size);
  if (mapped.ok()) return at;
  device_.release(*at, size);
  return mapped.error();
}

void BackingStore::unmap_alias(Address alias, Bytes size) {
  // Where it cannot be unmapped the addresses are not given back: what lies there would fault.
  if (device_.unmap(alias, size).ok()) device_.release(alias, size);
}

void BackingStore::destroy(const HbmHandle& handle) {
  if (handle.alias != nullptr) unmap_alias(handle.alias, handle.size);
  device_.destroy_physical(handle.physical);
}

void BackingStore::destroy(const HostBacking& backing) {
  unmap_alias(backing.alias, backing.handle.size);
  TERRACE_CHECK(host_->give_back(backing.handle).ok(), "a handle is given back once");
}

std::vector<HbmHandle> BackingStore::give_up(Bytes enough) {
  std::vector<HbmHandle> handles;
  for (auto kept = kept_.begin(); kept != kept_.end() && enough > 0_B;) {
    while (!kept->second.empty() && enough > 0_B) {
      handles.push_back(kept->second.back());
      kept->second.pop_back();
      kept_bytes_ -= kept->first;
      hbm_held_ -= kept->first;
      enough = saturating_sub(enough, kept->first);
    }
    kept = kept->second.empty() ? kept_.erase(kept) : std::next(kept);
  }
  return handles;
}

Result<Physical> BackingStore::create_hbm(Bytes size) {
  Result<Physical> created = device_.create_physical(size);
  if (created.ok() || created.error().code != Errc::kOutOfMemory) return created;
  std::vector<HbmHandle> given_up;
  {
    const std::lock_guard lock(mutex_);
    given_up = give_up(size);
  }
  if (given_up.empty()) return created;
  for (const HbmHandle& old : given_up) destroy(old);
  return device_.create_physical(size);
}

Result<HbmHandle> BackingStore::take_hbm(Bytes size, Alias alias) {
  HbmHandle handle{.physical = {}, .size = size};
  std::vector<HbmHandle> given_up;
  {
    const std::lock_guard lock(mutex_);
    const auto kept = kept_.find(size);
    if (kept != kept_.end() && hbm_held_ <= hbm_budget_) {
      handle = kept->second.back();
      kept->second.pop_back();
      if (kept->second.empty()) kept_.erase(kept);
      kept_bytes_ -= size;
    } else {
      const Bytes lacking = saturating_sub(hbm_held_ + size, hbm_budget_);
      if (lacking > kept_bytes_) {
        return out_of_budget(lacking - kept_bytes_, Pool::kScratch,
                             "a block of " + format_bytes(size) + ": " +
                                 format_bytes(hbm_held_ - kept_bytes_) + " of " + format_bytes(hbm_budget_) +
                                 " are in use");
      }
      given_up = give_up(lacking);
      hbm_held_ += size;
    }
  }
  for (const HbmHandle& old : given_up) destroy(old);
  if (handle.physical == Physical{}) {
    const Result<Physical> created = create_hbm(size);
    if (!created.ok()) {
      const std::lock_guard lock(mutex_);
      hbm_held_ -= size;
      if (created.error().code != Errc::kOutOfMemory) return created.error();
      // Blocks in use may leave, and then there is room.
      hbm_budget_ = std::min(hbm_budget_, hbm_held_);
      return out_of_budget(size, Pool::kScratch, created.error().text);
    }
    handle.physical = *created;
    const std::lock_guard lock(mutex_);
    hbm_peak_ = std::max(hbm_peak_, hbm_held_);
  }
  if (alias == Alias::kNone || handle.alias != nullptr) return handle;
  const Result<Address> mapped = map_alias(handle.physical, size);
  if (!mapped.ok()) {
    give_back(handle);
    return mapped.error();
  }
  handle.alias = *mapped;
  return handle;
}

void BackingStore::give_back(const HbmHandle& handle) {
  {
    const std::lock_guard lock(mutex_);
    if (hbm_held_ <= hbm_budget_) {
      kept_[handle.size].push_back(handle);
      kept_bytes_ += handle.size;
      return;
    }
    hbm_held_ -= handle.size;
  }
  destroy(handle);
}

Result<HostBacking> BackingStore::new_host(Bytes size) {
  const Result<HostHandlePool::Handle> handle = host_->take(size);
  if (!handle.ok()) return handle.error();
  const Result<Address> alias = map_alias(handle->physical, size);
  if (alias.ok()) {
    const std::lock_guard lock(mutex_);
    host_made_ += size;
    return HostBacking{*handle, *alias};
  }
  TERRACE_CHECK(host_->give_back(*handle).ok(), "a handle is given back once");
  return alias.error();
}

Result<HostBacking> BackingStore::take_host(Bytes size) {
  {
    const std::lock_guard lock(mutex_);
    const auto kept = kept_host_.find(size);
    if (kept != kept_host_.end()) {
      const HostBacking backing = kept->second.back();
      kept->second.pop_back();
      if (kept->second.empty()) kept_host_.erase(kept);
      return backing;
    }
  }
  Result<HostBacking> made = new_host(size);
  if (made.ok()) return made;
  std::map<Bytes, std::vector<HostBacking>> others;
  {
    const std::lock_guard lock(mutex_);
    others.swap(kept_host_);
  }
  if (others.empty()) return made;
  for (const auto& [kept_size, handles] : others) {
    for (const HostBacking& backing : handles) destroy(backing);
  }
  return new_host(size);
}

void BackingStore::give_back(const HostBacking& backing) {
  const std::lock_guard lock(mutex_);
  kept_host_[backing.handle.size].push_back(backing);
}

void BackingStore::set_hbm_budget(Bytes budget) {
  std::vector<HbmHandle> given_up;
  {
    const std::lock_guard lock(mutex_);
    hbm_budget_ = budget;
    given_up = give_up(saturating_sub(hbm_held_, budget));
  }
  for (const HbmHandle& handle : given_up) destroy(handle);
}

Bytes BackingStore::hbm_room() const {
  const std::lock_guard lock(mutex_);
  return saturating_sub(hbm_budget_, hbm_held_ - kept_bytes_);
}

Bytes BackingStore::hbm_budget() const {
  const std::lock_guard lock(mutex_);
  return hbm_budget_;
}

Bytes BackingStore::hbm_held() const {
  const std::lock_guard lock(mutex_);
  return hbm_held_;
}

Bytes BackingStore::hbm_kept() const {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

Bytes BackingStore::host_made() const {
  const std::lock_guard lock(mutex_);
  return host_made_;
}

Bytes BackingStore::hbm_peak() const {
  const std::lock_guard lock(mutex_);
  return hbm_peak_;
}

}  // namespace terrace
