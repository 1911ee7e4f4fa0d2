#include "swapcore/session.hpp"

#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/memory_limits.hpp"
#include "runtime/metrics.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {
Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() {
  impl_->publish_usage();
  // Entries hold blocks of the pools, and the pools wait for the copy engine's streams: end them in this
  // order. The lease goes back last, when the memory is free.
  impl_->spans.end_step();
  impl_->profile.reset();
  impl_->forget_timing();
  if (impl_->store != nullptr) impl_->collect_waits();
  impl_->waits.clear();
  impl_->store.reset();
  impl_->packer.reset();
  impl_->hbm.reset();
  impl_->ddr.reset();
  impl_->copies.reset();
  impl_->leave_daemon();
}

Result<std::unique_ptr<Session>> Session::open(Device& device, Options options) {
  const auto host = memory_limits();
  if (!host) return host.error();
  auto budgets = resolve_budgets(options.policy, device.info(), host->usable);
  if (!budgets) return std::move(budgets).error();
  const bool join = options.join_daemon;
  auto impl = std::make_unique<Impl>(device, std::move(options));
  impl->budgets = impl->policy_budgets = *budgets;
  auto nodes = numa_nodes_of(device.info(), impl->policy);
  if (!nodes) return std::move(nodes).error();
  impl->numa_nodes = std::move(nodes).value();
  std::unique_ptr<Session> session(new Session(std::move(impl)));
  if (join) {
    if (auto joined = session->impl_->join_daemon(); !joined) return joined.error();
  }
  if (auto opened = session->impl_->open_pools(); !opened) return opened.error();
  return session;
}

Status Session::Impl::open_pools() {
  auto hbm_pool = HbmPool::create(device, {.budget = budgets.hbm});
  if (!hbm_pool) return std::move(hbm_pool).error();
  hbm = std::move(hbm_pool).value();
  auto ddr_pool = DdrPool::create(
      device, {.budget = budgets.ddr, .numa_nodes = numa_nodes, .huge_pages = policy.ddr.hugepages});
  if (!ddr_pool) return std::move(ddr_pool).error();
  ddr = std::move(ddr_pool).value();
  if (auto opened = open_clock(); !opened) return opened;
  CopyEngine::Options options;
  if (clock != nullptr) options.on_moved = [this](const CopyMove& move) { note_move(move); };
  auto engine = CopyEngine::create(device, options);
  if (!engine) return std::move(engine).error();
  copies = std::move(engine).value();
  ResidencyStore::Parts parts{device, *hbm, *ddr, *copies, compute, policy.swapcore.verify, clock};
  parts.poison = poison;
  if (spans.timeline() != nullptr) parts.label = [this](const EntryKey& key) { return label_of(key); };
  auto entries = ResidencyStore::create(std::move(parts));
  if (!entries) return std::move(entries).error();
  store = std::move(entries).value();
  if (caching() && policy.swapcore.spill_format != SpillFormat::kExact)
    packer = std::make_unique<SpillPacker>(SpillPacker::Parts{device, *hbm, *ddr, compute});
  metrics().set<Metric::kBudgetBytes>(TierId::kHbm, budgets.hbm);
  metrics().set<Metric::kBudgetBytes>(TierId::kDdr, budgets.ddr);
  h2d_rate = device.info().h2d_bytes_per_second;
  d2h_rate = device.info().d2h_bytes_per_second;
  publish_link_rates();
  return {};
}

BlockRef Session::Impl::wrap(const Block& block) {
  return shared_block(device, *hbm, compute, block, poison);
}

Result<bool> Session::Impl::wait_for_a_spill() {
  const double began = seconds_of(steady_clock().now());
  const auto freed = store->wait_for_a_spill();
  if (!freed || !*freed) return freed;
  const double waited = seconds_of(steady_clock().now()) - began;
  metrics().add<Metric::kStallSeconds>(StallReason::kSpillBackpressure, waited);
  counters.stall_seconds += waited;
  if (RunTimeline* timeline = spans.timeline()) {
    timeline->stalled(name_of(StallReason::kSpillBackpressure), timeline->clock().now() - waited, waited, "");
  }
  return true;
}

// Drops the cached output that is used last: it will be computed again.
bool Session::Impl::evict_an_output() {
  const auto victim = store->farthest_in_hbm(EntryKey::What::kOutput);
  if (!victim) return false;
  store->drop(*victim);
  ++counters.evictions;
  metrics().add<Metric::kCacheEvictions>(1);
  return true;
}

// One thing that frees HBM: a spill already on its way, else a cached output, else what was restored ahead of
// its use, else, where the policy says so, the saved activation used last. False: nothing is left to give.
bool Session::Impl::free_something() {
  store->poll();
  // A spill that failed has freed nothing: whatever else can, does.
  const auto gave_way = [this] {
    const auto freed = wait_for_a_spill();
    return freed && *freed;
  };
  if (gave_way() || evict_an_output() || store->undo_a_restore()) return true;
  if (policy.checkpoint.contingency != Contingency::kOffload) return false;
  auto victim = store->farthest_in_hbm(EntryKey::What::kSaved);
  return victim && store->spill(*victim).ok() && gave_way();
}

bool Session::Impl::make_room(const Error& refusal) {
  if (refusal.code != Errc::kOutOfBudget) return false;
  missed_room += refusal.bytes;
  return free_something() || grow(refusal.bytes);
}

Error Session::Impl::explain(const Error& refusal) const {
  if (refusal.code != Errc::kOutOfBudget) return refusal;
  const PoolUsage usage = hbm->usage();
  const Bytes missing = saturating_sub(usage.live + refusal.bytes, usage.budget);
  std::string text = "out of HBM: " + format_bytes(missing == 0_B ? refusal.bytes : missing) + " missing (" +
                     std::to_string((missing == 0_B ? refusal.bytes : missing).count()) +
                     " bytes) for a block of " + format_bytes(refusal.bytes) + " (" + name_of(refusal.pool) +
                     "); budget " + format_bytes(usage.budget) + ", in use";
  for (int i = 0; i < kPoolCount; ++i) {
    const Bytes held = usage.live_by_pool[static_cast<std::size_t>(i)];
    if (held > 0_B) text += std::string(" ") + name_of(static_cast<Pool>(i)) + " " + format_bytes(held) + ",";
  }
  if (text.back() == ',') text.pop_back();
  text += ';';
  text += " what would help in the policy: [hbm] budget = a larger size";
  if (!caching()) text += "; [swapcore] mode = \"auto\" with activation recomputation on";
  if (policy.checkpoint.contingency != Contingency::kOffload)
    text += "; [checkpoint] contingency = \"offload\"";
  if (ddr->usage().budget < 1_GiB) text += "; [ddr] budget = a larger size";
  return Error{refusal.code, std::move(text), refusal.bytes, refusal.pool};
}

void Session::Impl::publish_usage() {
  if (hbm == nullptr || ddr == nullptr) return;
  const PoolUsage in_hbm = hbm->usage();
  const PoolUsage in_ddr = ddr->usage();
  if (in_hbm.live > fullest_hbm.live) {
    fullest_hbm = in_hbm;
    if (store != nullptr) publish_residency();
  }
  if (in_ddr.live > fullest_ddr.live) fullest_ddr = in_ddr;
  for (int i = 0; i < kPoolCount; ++i) {
    const auto index = static_cast<std::size_t>(i);
    metrics().set<Metric::kTierBytes>(TierId::kHbm, static_cast<Pool>(i), in_hbm.live_by_pool[index]);
    metrics().set<Metric::kTierBytes>(TierId::kDdr, static_cast<Pool>(i), in_ddr.live_by_pool[index]);
  }
  metrics().set<Metric::kTierMappedBytes>(TierId::kHbm, in_hbm.mapped);
  metrics().set<Metric::kTierMappedBytes>(TierId::kDdr, in_ddr.mapped);
  metrics().set<Metric::kTierPeakBytes>(TierId::kHbm, std::max(hbm_peak, in_hbm.mapped_peak));
  metrics().set<Metric::kTierPeakBytes>(TierId::kDdr, std::max(ddr_peak, in_ddr.mapped_peak));
}

// The host is through with a step long before the device: what a scrape finds of the moment is nearly always
// a step's end, when nothing is kept. This stays to be seen for a whole step.
void Session::Impl::publish_step() const {
  for (int i = 0; i < kPoolCount; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const auto pool = static_cast<Pool>(i);
    metrics().set<Metric::kStepTierBytes>(TierId::kHbm, pool, fullest_hbm.live_by_pool[index]);
    metrics().set<Metric::kStepTierBytes>(TierId::kDdr, pool, fullest_ddr.live_by_pool[index]);
  }
}

void Session::Impl::publish_residency() const {
  static_assert(static_cast<int>(KeptContent::kOutput) == static_cast<int>(EntryKey::What::kOutput));
  const auto held = store->bytes_by_state();
  for (const KeptContent content : {KeptContent::kSaved, KeptContent::kOutput}) {
    for (const KeptState state : {KeptState::kSettled, KeptState::kLeaving, KeptState::kArriving}) {
      const ResidencyStore::ByState& bytes = held[static_cast<std::size_t>(content)];
      const auto index = static_cast<std::size_t>(state);
      metrics().set<Metric::kResidencyBytes>(TierId::kHbm, content, state, bytes.hbm[index]);
      metrics().set<Metric::kResidencyBytes>(TierId::kDdr, content, state, bytes.ddr[index]);
    }
  }
}

Result<BlockRef> Session::allocate(Bytes size, Pool pool) {
  while (true) {
    auto block = impl_->hbm->allocate(impl_->compute, size, pool);
    if (block) {
      metrics().add<Metric::kAllocations>(TierId::kHbm, pool, 1);
      metrics().add<Metric::kAllocatedBytes>(TierId::kHbm, pool, size);
      return impl_->wrap(*block);
    }
    if (!impl_->make_room(block.error())) return impl_->explain(block.error());
  }
}

SiteId Session::declare(const SiteSpec& site) {
  const SiteId id{static_cast<std::uint32_t>(impl_->sites.size())};
  impl_->sites.push_back(site);
  impl_->group_rows.push_back(site_group_row(site.group));
  const auto layer = static_cast<std::size_t>(site.layer);
  if (impl_->layer_sites.size() <= layer) impl_->layer_sites.resize(layer + 1);
  impl_->layer_sites[layer].push_back(id);
  impl_->plan.reset();  // made for other sites
  impl_->next_plan = {};
  impl_->measured.reset();
  impl_->schedule.forget();
  return id;
}

const SiteSpec& Session::site(SiteId id) const {
  TERRACE_CHECK(id.index < impl_->sites.size(), "a site is declared before it is asked for");
  return impl_->sites[id.index];
}

const std::vector<SiteSpec>& Session::sites() const { return impl_->sites; }

Device& Session::device() const { return impl_->device; }
Stream Session::compute() const { return impl_->compute; }
const Policy& Session::policy() const { return impl_->policy; }
PoolUsage Session::hbm_usage() const { return impl_->hbm->usage(); }
PoolUsage Session::ddr_usage() const { return impl_->ddr->usage(); }

SessionCounters Session::counters() const {
  impl_->collect_waits();
  impl_->measure_link_use();
  SessionCounters counters = impl_->counters;
  counters.spilled = impl_->store->spilled();
  counters.restored = impl_->store->restored();
  counters.damaged = impl_->store->damaged();
  if (impl_->packer) {
    const SpillPacker::Error error = impl_->packer->error();
    counters.spill_error_largest = error.largest;
    counters.spill_error_mean = error.mean;
  }
  return counters;
}

void Session::reset_peaks() {
  impl_->hbm_peak = std::max(impl_->hbm_peak, impl_->hbm->usage().mapped_peak);
  impl_->ddr_peak = std::max(impl_->ddr_peak, impl_->ddr->usage().mapped_peak);
  impl_->hbm->reset_peaks();
  impl_->ddr->reset_peaks();
}

}  // namespace terrace
