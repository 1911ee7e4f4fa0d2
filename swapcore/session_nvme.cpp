// The file of a session, behind its pools and its copy engine. Apart from the session, so that only who asks
// for it loads what reads files.
#include <algorithm>
#include <utility>

#include "allocator/tiers/nvme_tier.hpp"
#include "runtime/metrics.hpp"
#include "swapcore/session.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {

namespace {
constexpr std::uint64_t kPieces = 8;  // in flight
constexpr Bytes kLeast = 64_KiB, kMost = 4_MiB;
}  // namespace

Bytes Session::nvme_bounce_bytes(Bytes budget) {
  const Bytes piece = std::clamp(round_up(budget / (8 * kPieces), kLeast), kLeast, kMost);
  return piece * kPieces + 4_KiB;
}

Result<std::unique_ptr<Tier>> Session::open_nvme() {
  const Policy::Nvme& nvme = policy().nvme;
  if (nvme.budget == 0_B) return std::unique_ptr<Tier>();
  auto tier = NvmeTier::create(impl_->device, *impl_->ddr, *impl_->copies,
                               {.folder = nvme.path,
                                .size = nvme.budget,
                                .piece = (nvme_bounce_bytes(nvme.budget) - 4_KiB) / kPieces,
                                .pieces = kPieces});
  if (!tier) {
    Error error = std::move(tier).error();
    error.text += " (policy: [nvme] path and budget)";
    return error;
  }
  metrics().set<Metric::kBudgetBytes>(TierId::kNvme, nvme.budget);
  return std::unique_ptr<Tier>(std::move(tier).value());
}

}  // namespace terrace
