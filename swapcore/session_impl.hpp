// The session's parts, shared by its source files. Nobody else includes this.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/daemon_link.hpp"
#include "runtime/shared_page.hpp"
#include "swapcore/budgets.hpp"
#include "swapcore/plan/drift.hpp"
#include "swapcore/plan/solver.hpp"
#include "swapcore/residency.hpp"
#include "swapcore/session.hpp"
#include "swapcore/step_profile.hpp"

namespace terrace {

// The first step warms up, the second is measured, the third runs by the plan.
inline constexpr std::uint64_t kMeasuredStep = 1;

struct Session::Impl {
  Device& device;
  Policy policy;
  Stream compute;
  Budgets budgets;
  std::string job;
  std::unique_ptr<SharedPage> page;  // the metrics that the daemon reads
  std::unique_ptr<DaemonLink> link;
  std::atomic<std::uint64_t> hbm_claim{0}, ddr_claim{0};  // what a successor of the daemon is told, in bytes
  std::unique_ptr<HbmPool> hbm;
  std::unique_ptr<DdrPool> ddr;
  std::unique_ptr<CopyEngine> copies;
  std::unique_ptr<ResidencyStore> store;
  double h2d_rate = 0, d2h_rate = 0, two_way_rate = 0;

  std::vector<SiteSpec> sites;
  std::vector<std::vector<SiteId>> layer_sites;  // by layer, in order of declaration: the order of use
  std::optional<Plan> plan;                      // as sites
  std::unique_ptr<StepProfile> profile;          // while a step is measured
  std::optional<Snapshot> measured;              // what the plan was made of
  Bytes saved_peak;                              // most HBM that saved activations held in the measured step
  Bytes fragments;                               // of the HBM budget, what no plan counts on
  Bytes missed_room;                             // what the trainer asked for in vain since the plan was made
  Bytes hbm_peak, ddr_peak;                      // most that was held before the last reset_peaks()
  std::uint64_t step = 0;
  double step_started = 0;
  struct StepEvents {  // on the compute stream, of the step before until its times are known
    std::optional<Event> begun, ended;
    bool pending = false;
    double stalled_before = 0;  // counters.stall_seconds when it began
    Bytes hbm_peak, ddr_peak;
  } step_events;
  std::vector<int> late_fetches, late_departures;  // by site, since the plan was made
  DriftWatch drift;
  SessionCounters counters;

  Impl(Device& d, Options options)
      : device(d), policy(std::move(options.policy)), compute(options.compute), job(std::move(options.job)) {}

  // session_lease.cpp
  Status join_daemon();
  void leave_daemon();

  // session.cpp
  Status open_pools();
  [[nodiscard]] BlockRef wrap(const Block& block);
  [[nodiscard]] Result<bool> wait_for_a_spill();
  [[nodiscard]] bool evict_an_output();
  [[nodiscard]] bool make_room(const Error& refusal);
  [[nodiscard]] Error explain(const Error& refusal) const;
  void publish_usage() const;

  // session_step.cpp
  [[nodiscard]] bool caching() const { return policy.swapcore.mode != SwapMode::kOff; }
  [[nodiscard]] Placement placement(SiteId site) const;
  [[nodiscard]] RuleAction rule_for(SiteId site, RulePhase phase) const;
  void enter(StepProfile::Phase phase, int layer);
  void restore_layer(int layer, std::uint32_t micro_batch);
  void depart_planned(std::size_t moment, std::uint32_t micro_batch);
  void restore_planned(std::size_t moment, std::uint32_t micro_batch);

  // session_plan.cpp
  Status measure_link();
  [[nodiscard]] double measure_two_ways(const Block& near, const Block& far, Event ready) const;
  void measure();
  void make_plan();
  void leave_to_fragments(Bytes bytes);
  [[nodiscard]] bool note_missed_room();
  void begin_timing();
  void end_timing();
  [[nodiscard]] std::optional<Prediction::Measured> timed_step();
  void learn_from_the_last_step();
  [[nodiscard]] bool note_late_trips();
  void forget_timing();
  [[nodiscard]] bool rules_change() const;
  void count_fetch(SiteId site, FetchOutcome outcome);
  void collect_waits();
  Status make_checkpoint_room(const SaveKey& key, Bytes size);
};

[[nodiscard]] inline EntryKey entry_of(const SiteKey& key, int layer) {
  return {key.micro_batch, layer, EntryKey::What::kOutput, key.site.index};
}
[[nodiscard]] inline EntryKey entry_of(const SaveKey& key) {
  return {key.micro_batch, key.layer, EntryKey::What::kSaved, key.slot};
}

}  // namespace terrace
