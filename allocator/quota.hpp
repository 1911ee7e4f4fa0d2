// Limits within a pool's budget: for each purpose, and for each tenant.
//
// A tenant is a label under which somebody's blocks are counted: one of several jobs, models or modules in a
// process. Tenant bytes are always counted; a purpose's bytes are counted here only while it has a limit,
// since the threads' own counters know them otherwise. Limits are hard: bytes are charged before the block
// exists, and a charge that would pass a limit changes nothing. A limit set below what is live refuses until
// usage falls.
//
// charge() and refund() are lock-free; limits and labels may change at any time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/result.hpp"

namespace terrace {

// 0: no tenant.
struct TenantId {
  std::uint8_t index = 0;
  auto operator<=>(const TenantId&) const = default;
};

inline constexpr int kTenantCount = 16;  // with the one that is none
inline constexpr Bytes kNoLimit{~0ULL};

struct TenantUsage {
  TenantId tenant;
  std::string label;
  Bytes live;
  Bytes limit;
};

class Quotas {
 public:
  // The tenant of this label, made where there is none. Errors: kInvalidArgument (an empty label),
  // kOutOfMemory (fifteen others exist).
  [[nodiscard]] Result<TenantId> tenant(std::string_view label);
  // Errors of both: kInvalidArgument (no such tenant).
  [[nodiscard]] Status set_limit(TenantId tenant, Bytes limit);
  [[nodiscard]] Status check(TenantId tenant) const;

  // Starts counting `pool` from what is live now, or ends it with kNoLimit. Precondition: nobody charges.
  void set_limit(Pool pool, Bytes limit, Bytes live);
  [[nodiscard]] bool limits_a_pool() const { return limited_pools_.load(std::memory_order_relaxed) != 0; }

  // Errors: kOutOfBudget; the text says which limit refused.
  [[nodiscard]] Status charge(Bytes span, Pool pool, TenantId tenant);
  void refund(Bytes span, Pool pool, TenantId tenant);

  [[nodiscard]] std::vector<TenantUsage> tenants() const;

 private:
  struct Account {
    std::atomic<std::uint64_t> live{0};
    std::atomic<std::uint64_t> limit{~0ULL};
    [[nodiscard]] bool charge(std::uint64_t bytes);
  };
  [[nodiscard]] bool limited(Pool pool) const {
    return (limited_pools_.load(std::memory_order_relaxed) >> static_cast<unsigned>(pool) & 1) != 0;
  }

  std::atomic<std::uint32_t> limited_pools_{0};
  std::array<Account, kPoolCount> pools_;
  std::array<Account, kTenantCount> tenants_;
  std::atomic<std::uint8_t> tenant_count_{1};
  mutable std::mutex labels_mutex_;
  std::array<std::string, kTenantCount> labels_;
};

}  // namespace terrace
