#include "allocator/quota.hpp"

namespace terrace {

bool Quotas::Account::charge(std::uint64_t bytes) {
  std::uint64_t now = live.load(std::memory_order_relaxed);
  do {
    const std::uint64_t most = limit.load(std::memory_order_relaxed);
    if (now > most || bytes > most - now) return false;
  } while (!live.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
  return true;
}

Result<TenantId> Quotas::tenant(std::string_view label) {
  if (label.empty()) return Error{.code = Errc::kInvalidArgument, .text = "a tenant's label is empty"};
  const std::lock_guard lock(labels_mutex_);
  const std::uint8_t count = tenant_count_.load(std::memory_order_relaxed);
  for (std::uint8_t i = 1; i < count; ++i) {
    if (labels_[i] == label) return TenantId{i};
  }
  if (count == kTenantCount) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "no tenant \"" + std::string(label) + "\": a pool counts at most " +
                         std::to_string(kTenantCount - 1) + " labels"};
  }
  labels_[count] = label;
  tenant_count_.store(count + 1, std::memory_order_release);
  return TenantId{count};
}

Status Quotas::check(TenantId tenant) const {
  if (tenant.index < tenant_count_.load(std::memory_order_acquire)) return {};
  return Error{.code = Errc::kInvalidArgument,
               .text = "tenant " + std::to_string(tenant.index) + " is none: ask tenant(label) for one"};
}

Status Quotas::set_limit(TenantId tenant, Bytes limit) {
  if (tenant.index == 0) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "no tenant has no limit of its own: the budget is the limit of all"};
  }
  if (auto known = check(tenant); !known) return known;
  tenants_[tenant.index].limit.store(limit.count(), std::memory_order_relaxed);
  return {};
}

void Quotas::set_limit(Pool pool, Bytes limit, Bytes live) {
  const auto index = static_cast<std::size_t>(pool);
  pools_[index].live.store(live.count(), std::memory_order_relaxed);
  pools_[index].limit.store(limit.count(), std::memory_order_relaxed);
  const std::uint32_t bit = 1U << index;
  if (limit == kNoLimit) {
    limited_pools_.fetch_and(~bit, std::memory_order_relaxed);
  } else {
    limited_pools_.fetch_or(bit, std::memory_order_relaxed);
  }
}

Status Quotas::charge(Bytes span, Pool pool, TenantId tenant) {
  Account& purpose = pools_[static_cast<std::size_t>(pool)];
  const bool counted = limited(pool);
  if (counted && !purpose.charge(span.count())) {
    return out_of_budget(
        span, pool,
        format_bytes(span) + " of HBM for " + name_of(pool) + " refused by the quota of that pool: " +
            format_bytes(Bytes(purpose.live.load(std::memory_order_relaxed))) + " of " +
            format_bytes(Bytes(purpose.limit.load(std::memory_order_relaxed))) + " are in use");
  }
  Account& owner = tenants_[tenant.index];
  if (tenant.index != 0 && !owner.charge(span.count())) {
    if (counted) purpose.live.fetch_sub(span.count(), std::memory_order_relaxed);
    const std::lock_guard lock(labels_mutex_);
    return out_of_budget(
        span, pool,
        format_bytes(span) + " of HBM for " + name_of(pool) + " refused by the quota of tenant \"" +
            labels_[tenant.index] + "\": " + format_bytes(Bytes(owner.live.load(std::memory_order_relaxed))) +
            " of " + format_bytes(Bytes(owner.limit.load(std::memory_order_relaxed))) + " are in use");
  }
  return {};
}

void Quotas::refund(Bytes span, Pool pool, TenantId tenant) {
  if (limited(pool)) {
    pools_[static_cast<std::size_t>(pool)].live.fetch_sub(span.count(), std::memory_order_relaxed);
  }
  if (tenant.index != 0) tenants_[tenant.index].live.fetch_sub(span.count(), std::memory_order_relaxed);
}

std::vector<TenantUsage> Quotas::tenants() const {
  const std::lock_guard lock(labels_mutex_);
  std::vector<TenantUsage> all;
  for (std::uint8_t i = 1; i < tenant_count_.load(std::memory_order_relaxed); ++i) {
    all.push_back({.tenant = TenantId{i},
                   .label = labels_[i],
                   .live = Bytes(tenants_[i].live.load(std::memory_order_relaxed)),
                   .limit = Bytes(tenants_[i].limit.load(std::memory_order_relaxed))});
  }
  return all;
}

}  // namespace terrace
