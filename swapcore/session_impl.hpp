// The session's parts, shared by its source files. Nobody else includes this.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/daemon_link.hpp"
#include "runtime/shared_page.hpp"
#include "swapcore/budgets.hpp"
#include "swapcore/plan/drift.hpp"
#include "swapcore/plan/residual.hpp"
#include "swapcore/plan/solver.hpp"
#include "swapcore/residency.hpp"
#include "swapcore/session.hpp"
#include "swapcore/spill_format.hpp"
#include "swapcore/step_profile.hpp"
#include "swapcore/step_schedule.hpp"
#include "swapcore/step_spans.hpp"

namespace terrace {

// The first step warms up, the second is measured, the third runs by the plan: of steps with forward and
// backward. A forward pass alone uses up neither.
inline constexpr std::uint64_t kWarmUpSteps = 1;

struct Session::Impl {
  Device& device;
  Policy policy;
  Stream compute;
  Poison poison;
  Budgets budgets;
  std::string job;
  std::unique_ptr<SharedPage> page;  // the metrics that the daemon reads
  std::unique_ptr<DaemonLink> link;
  std::atomic<std::uint64_t> hbm_claim{0}, ddr_claim{0};  // what a successor of the daemon is told, in bytes
  std::vector<int> numa_nodes;  // of pinned memory, by the policy; none: wherever first touch puts it
  Budgets policy_budgets;       // the most that `budgets` grow to
  Budgets planned_for;          // what the plan counts on
  std::mutex asks_mutex;
  std::map<TierId, DaemonLink::Ask> asks;  // under asks_mutex: of the daemon, to hold less
  std::atomic<bool> asked{false};          // there may be some
  bool waited_in_vain = false;             // for room that nobody gave, since the last that came
  bool switched_off = false;               // the step goes without Swap Core: terrace off
  std::unique_ptr<HbmPool> hbm;
  std::unique_ptr<DdrPool> ddr;
  StepSpans spans;
  std::unique_ptr<DeviceClock> own_clock;  // where there is no timeline to have one
  DeviceClock* clock = nullptr;            // null: swap core is off, and nobody looks
  std::unique_ptr<LinkUse> link_use;       // null: swap core is off
  std::unique_ptr<CopyEngine> copies;      // tells the three above
  std::unique_ptr<ResidencyStore> store;
  std::unique_ptr<SpillPacker> packer;                       // null: what is spilled travels as it is
  std::map<StallReason, std::unique_ptr<WaitProbes>> waits;  // of wait_for()
  double h2d_rate = 0, d2h_rate = 0, two_way_rate = 0;

  std::vector<SiteSpec> sites;
  std::vector<std::size_t> group_rows;           // by site: where its fetches count
  std::vector<std::vector<SiteId>> layer_sites;  // by layer, in order of declaration: the order of use
  std::optional<Plan> plan;                      // as sites
  std::unique_ptr<StepProfile> profile;          // while a step is measured
  std::optional<Snapshot> measured;              // what the plan was made of
  std::future<Plan> next_plan;                   // being made beside the steps, of `measured`; else not valid
  Bytes saved_peak;                              // most HBM that saved activations held in the measured step
  Bytes fragments;                               // of the HBM budget, what no plan counts on
  struct Needed {                                // while a step is measured
    Bytes so_far;                                // most HBM without cached outputs
    Bytes outputs;                               // that were held when the position began
  } needed;
  Bytes hbm_needed;  // without any cached output, as far as is known; zero: not yet
  Bytes ddr_needed;
  Bytes missed_room;                   // what the trainer asked for in vain since the plan was made
  Bytes hbm_peak, ddr_peak;            // most that was held before the last reset_peaks()
  PoolUsage fullest_hbm, fullest_ddr;  // of this step's layer boundaries, each the one with most live bytes
  std::uint64_t step = 0;
  bool running = false;  // between begin_step and end_step
  StepSchedule schedule;
  struct Awaited {
    int offers = 0;
    bool several = false;  // at one time: nobody knows which one is asked for
  };
  std::map<EntryKey, Awaited> awaited;        // offered in this step and not asked for, kept or not
  std::uint64_t complete_steps = 0;           // with forward and backward
  std::uint64_t measure_from = kWarmUpSteps;  // complete steps, where there is no plan
  std::uint64_t measure_gap = 1;              // to the next try, where a measured step gave no plan
  StepProfile::Phase window_phase = StepProfile::Phase::kBegin;
  bool link_use_due = false;  // of the last step
  double step_started = 0;
  struct StepEvents {  // on the compute stream, of the step before until its times are known
    std::optional<Event> begun, ended;
    bool pending = false;
    double stalled_before = 0;  // counters.stall_seconds when it began
    Bytes hbm_peak, ddr_peak;
  } step_events;
  std::vector<int> late_fetches, late_departures;  // by site, since the plan was made
  DriftWatch drift;
  Prediction modelled;  // what the plan's steps take by the model alone
  ResidualWatch residual;
  SessionCounters counters;

  Impl(Device& d, Options options)
      : device(d),
        policy(std::move(options.policy)),
        compute(options.compute),
        poison(options.poison),
        job(std::move(options.job)),
        spans(options.timeline) {}

  // session_lease.cpp
  Status join_daemon();
  void leave_daemon();
  void follow_daemon();
  void give_way();
  [[nodiscard]] Bytes shrink_hbm(Bytes wanted);  // what the process goes on holding
  [[nodiscard]] Bytes shrink_ddr(Bytes wanted);
  [[nodiscard]] bool grow(Bytes missing);
  void set_hbm_budget(Bytes budget);
  void set_ddr_budget(Bytes budget);

  // session.cpp
  Status open_pools();
  [[nodiscard]] BlockRef wrap(const Block& block);
  [[nodiscard]] Result<bool> wait_for_a_spill();
  [[nodiscard]] bool evict_an_output();
  [[nodiscard]] bool free_something();
  [[nodiscard]] bool make_room(const Error& refusal);
  [[nodiscard]] Error explain(const Error& refusal) const;
  void publish_usage();
  void publish_step() const;
  void publish_residency() const;
  void publish_link_rates() const;

  // session_step.cpp
  [[nodiscard]] bool caching() const { return policy.swapcore.mode != SwapMode::kOff && !switched_off; }
  [[nodiscard]] Placement placement(SiteId site) const;
  [[nodiscard]] RuleAction rule_for(SiteId site, RulePhase phase) const;
  void enter(StepProfile::Phase phase, int layer, std::uint32_t micro_batch);
  [[nodiscard]] Result<BlockRef> to_keep(const EntryKey& entry, const BlockRef& output, Placement placement,
                                         Element element);
  [[nodiscard]] BlockRef taken(const EntryKey& entry, std::optional<FallbackReason>& why);
  void restore_layer(int layer, std::uint32_t micro_batch);
  void depart_planned(std::size_t moment, std::uint32_t micro_batch);
  void restore_planned(std::size_t moment, std::uint32_t micro_batch);

  // session_schedule.cpp
  Status open_clock();
  void note_move(const CopyMove& move);
  [[nodiscard]] std::string label_of(const EntryKey& key) const;
  [[nodiscard]] RunTimeline::Levels levels() const;
  void begin_schedule();
  void end_schedule();
  void note_deviation(std::optional<Deviation> deviation);
  [[nodiscard]] bool offered_again(const EntryKey& entry);
  [[nodiscard]] bool offered_several_times(const EntryKey& entry);
  void count_fallback(FallbackReason reason);
  void mark_window(StepProfile::Phase phase, int layer);
  void measure_link_use();
  void forget_step();

  // session_plan.cpp
  [[nodiscard]] std::string summary() const;
  void start_measuring(const char* why);
  Status measure_link();
  [[nodiscard]] double measure_two_ways(const Block& near, const Block& far, Event ready) const;
  void measure();
  void prepare_plan();
  void limit_outputs();
  [[nodiscard]] Bytes take_peak();
  void make_plan();
  void make_next_plan();
  void take_next_plan();
  void begin_with(Plan fresh);
  void leave_to_fragments(Bytes bytes);
  [[nodiscard]] bool note_missed_room();
  void begin_timing();
  void end_timing();
  [[nodiscard]] std::optional<Prediction::Measured> timed_step();
  void learn_from_the_last_step();
  void publish_prediction(const Prediction::Measured& last) const;
  [[nodiscard]] bool note_late_trips();
  void forget_timing();
  [[nodiscard]] bool rules_change() const;
  void count_fetch(SiteId site, FetchOutcome outcome);
  void collect_waits();
  void count_stall(StallReason reason, double seconds);
  Status make_checkpoint_room(const SaveKey& key, Bytes size);
};

[[nodiscard]] inline EntryKey entry_of(const SiteKey& key, int layer) {
  return {key.micro_batch, layer, EntryKey::What::kOutput, key.site.index};
}
[[nodiscard]] inline EntryKey entry_of(const SaveKey& key) {
  return {key.micro_batch, key.layer, EntryKey::What::kSaved, key.slot};
}

}  // namespace terrace
