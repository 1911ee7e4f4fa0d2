// What `terrace run` tells the hook through the environment. Read once, when the first allocation is seen.
//
//   TERRACE_HBM_BUDGET, TERRACE_HBM_RESERVE   as hbm.budget and hbm.reserve of the policy: "90%", "24GiB"
//   TERRACE_DDR_BUDGET                        bytes that may be pinned for blocks that leave HBM, and what
//                                             hook.report = "extended" adds; without it nothing leaves
//   TERRACE_HOOK_SPILL                        hook.spill: auto, always, off
//   TERRACE_HOOK_REPORT                       hook.report: physical, extended
//   TERRACE_ALLOCATOR                         native, terrace
#pragma once

#include "swapcore/policy/policy.hpp"

namespace terrace::hooks {

enum class AllocatorMode : std::uint8_t { kNative, kTerrace };

struct HookSettings {
  Amount hbm_budget = Policy{}.hbm.budget;
  Amount hbm_reserve = Policy{}.hbm.reserve;
  Bytes ddr_budget;
  MemoryReport report = MemoryReport::kPhysical;
  SpillWord spill = SpillWord::kAuto;
  AllocatorMode allocator = AllocatorMode::kNative;
};

// A value that is not understood is said once and replaced by its default. Never throws.
[[nodiscard]] const HookSettings& hook_settings() noexcept;

// The bytes of a device that a process may hold; zero where the reserve leaves nothing.
[[nodiscard]] Bytes hbm_limit(const HookSettings& settings, Bytes device_total);

}  // namespace terrace::hooks
