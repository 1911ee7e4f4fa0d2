// The meeting point of a training process and Terrace: memory within the budgets, Swap Core, saved
// activations.
//
// Handle form: the trainer offers a site's output in forward and fetches it when it recomputes; what comes
// back may be another block with the same bytes. Nothing here changes a number: a fetch that cannot be served
// is a miss, and the trainer computes.
//
// One session serves one device and one training thread; its methods are called from that thread. Reading
// usage() is safe from any thread.
//
//   session.begin_step(compute);
//   for (layer : layers)      { session.enter_forward(layer);  ... save(...), offer(...) ... }
//   session.enter_head();     loss
//   for (layer : reversed)    { session.enter_backward(layer); ... load(...), fetch(...) ... }
//   session.end_step();
//
// With gradient accumulation the forward/head/backward part repeats for each micro-batch.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "allocator/ddr_pool.hpp"
#include "allocator/hbm_pool.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/device.hpp"
#include "runtime/fp8_blocks.hpp"
#include "runtime/metrics.hpp"
#include "runtime/timeline/run_timeline.hpp"
#include "swapcore/link_use.hpp"
#include "swapcore/plan/solver.hpp"
#include "swapcore/policy/policy.hpp"
#include "swapcore/residency.hpp"
#include "swapcore/site.hpp"
#include "swapcore/streamed/slot_ring.hpp"

namespace terrace {

// A saved activation that must come back: a block's input, a routing decision. `slot` tells several of a
// layer apart.
struct SaveKey {
  int layer = 0;
  std::uint32_t micro_batch = 0;
  std::uint32_t slot = 0;
  auto operator<=>(const SaveKey&) const = default;
};

struct SessionCounters {
  std::uint64_t hits = 0, misses = 0,
                late = 0;       // fetches by outcome; a late one was a hit that a stream waited for
  std::uint64_t evictions = 0;  // cached outputs dropped because HBM was asked for
  std::uint64_t damaged = 0;    // what came back from DDR with another checksum, and was not used
  Bytes spilled, restored;
  double stall_seconds = 0;  // for any reason
  double expert_stall_seconds = 0, optimizer_stall_seconds = 0, router_stall_seconds = 0;
  std::array<std::uint64_t, kFallbackReasonCount> fallbacks{};  // by FallbackReason
  // Of numbers that were packed for their spill (swapcore.spill_format): the largest, as a share of the
  // largest in its block, and the mean, as a share of their mean size.
  double spill_error_largest = 0, spill_error_mean = 0;
  LinkUse::Ways link_windows;  // of the steps that ran by a plan and were timed
};

class Session {
 public:
  struct Options {
    Policy policy;
    std::string job = "job";          // label in the metrics
    bool join_daemon = true;          // where the environment names a daemon (TERRACE_SOCKET)
    Stream compute;                   // the stream on which the trainer computes
    RunTimeline* timeline = nullptr;  // of the compute stream, to be filled; outlives the session
    Poison poison = kPoisonReleased;
  };
  // Errors: budgets larger than the device or in contradiction (kInvalidArgument), device errors.
  [[nodiscard]] static Result<std::unique_ptr<Session>> open(Device& device, Options options);
  ~Session();  // every BlockRef dropped before

  // Device memory for use on the compute stream. Where the budget is reached the session first waits for
  // spills in flight, then drops cached outputs, then offloads saved activations (policy:
  // checkpoint.contingency), and only then answers kOutOfBudget; its text says how many bytes were missing,
  // for what, and which policy lines would help.
  [[nodiscard]] Result<BlockRef> allocate(Bytes size, Pool pool);

  // Pinned host memory for what lasts and lives there. Errors: kOutOfBudget, kOutOfMemory, as DdrPool says.
  [[nodiscard]] Result<BlockRef> allocate_host(Bytes size, Pool pool);
  // A file inside the policy's [nvme] budget, null where that is 0; it goes before the session, and takes
  // nvme_bounce_bytes() of that budget from DDR. Of the library terrace_swapcore_nvme. Errors: those of
  // NvmeTier::create.
  [[nodiscard]] Result<std::unique_ptr<Tier>> open_nvme();
  [[nodiscard]] static Bytes nvme_bounce_bytes(Bytes budget);
  struct RingOptions {
    Bytes slot;     // bytes of each
    int slots = 1;  // how many
    Pool pool = Pool::kScratch;
    Stream user;
    CopyReason reason = CopyReason::kFetch;
    Tier* cold = nullptr;  // as SlotRing::Parts::cold
  };
  // A ring of slots in HBM, which goes before the session and before its items' homes. Errors: as of
  // allocate(), what the device said.
  [[nodiscard]] Result<std::unique_ptr<SlotRing>> open_ring(const RingOptions& options);
  // The compute stream waits for the event, and how long is counted under the reason.
  [[nodiscard]] Status wait_for(Event event, StallReason reason);
  // The same of what the host waits for: the stream has nothing to do meanwhile. Errors: those of `wait`.
  [[nodiscard]] Status wait_for(const std::function<Status()>& wait, StallReason reason);
  // Time that the compute stream waited elsewhere, under its reason.
  void count_stall(StallReason reason, double seconds);

  [[nodiscard]] SiteId declare(const SiteSpec& site);
  [[nodiscard]] const SiteSpec& site(SiteId id) const;  // as declared
  [[nodiscard]] const std::vector<SiteSpec>& sites() const;

  // A step is periodic: one is measured, the plan is made for it, and later ones are expected to go the same
  // way. One that does not (an evaluation, other shapes, another order of layers, more micro-batches) is
  // counted under SessionCounters::fallbacks, and what would have travelled in the rest of it is computed
  // again. Where the change stays, a step is measured anew.
  void begin_step();  // cancels a step that was begun and not ended
  void enter_forward(int layer, std::uint32_t micro_batch = 0);
  void enter_head(std::uint32_t micro_batch = 0);  // between the last forward and the first backward layer
  void enter_backward(int layer, std::uint32_t micro_batch = 0);
  void enter_update();  // behind the last backward: the optimizer
  void end_step();      // what was offered or saved and never asked for is released
  // Gives up on the step that runs, after an exception: what was offered or saved in it is released. Nothing
  // where no step runs.
  void cancel_step();

  // Forward: the output of a site, computed on the compute stream and never written again. Outputs that
  // backward does not read are never offered. Outside of a step, nothing is kept. An output offered again
  // before it was asked for (a forward pass in between) is kept in neither form: nobody could tell which one
  // is wanted. `element`: what it is made of, for a spill format that is not exact; opaque ones are always.
  void offer(const SiteKey& key, const BlockRef& output, Element element = Element::kOpaque);
  // The output has been written since it was offered, as a version counter of its owner tells: nobody can say
  // which bytes were kept, so its fetch is a miss. Nothing where none is kept.
  void changed(const SiteKey& key);
  // Recompute: the bytes that were offered, ready on the compute stream, or null (a miss: compute it). An
  // entry is consumed by its first fetch. `size`: of the output that would be computed; one of another size
  // is a miss.
  [[nodiscard]] BlockRef fetch(const SiteKey& key, std::optional<Bytes> size = std::nullopt);

  // Names what the trainer launches between construction and destruction, for the timeline and for a
  // profiler.
  class Span {
   public:
    enum class How : std::uint8_t { kComputed, kFetched };
    Span(Session& session, SiteId site, How how = How::kComputed);
    Span(Session& session, const char* name);
    ~Span();
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    Session& session_;
    const bool active_;
  };

  // Times what the trainer launches between construction and destruction as one run of the site, in steps
  // that the session measures; free in others.
  class Timing {
   public:
    Timing(Session& session, SiteId site);
    ~Timing();
    Timing(const Timing&) = delete;
    Timing& operator=(const Timing&) = delete;

   private:
    Session& session_;
    Span span_;
    SiteId site_;
    Event start_{};
    bool active_ = false;
  };

  // Keeps an activation until load(): in HBM inside the checkpoint budget, else as the contingency says.
  // Errors: kOutOfBudget (contingency "fail", or nowhere to put it), kInvalidArgument (saved before, and not
  // loaded).
  [[nodiscard]] Status save(const SaveKey& key, BlockRef block);
  // Errors: kNotFound (never saved, or loaded already), kOutOfBudget, kIo (its bytes changed in DDR; the text
  // names the layer).
  [[nodiscard]] Result<BlockRef> load(const SaveKey& key);

  [[nodiscard]] Device& device() const;
  [[nodiscard]] Stream compute() const;
  [[nodiscard]] const Policy& policy() const;
  [[nodiscard]] PoolUsage hbm_usage() const;
  [[nodiscard]] PoolUsage ddr_usage() const;
  [[nodiscard]] SessionCounters counters() const;
  // One line a person can read: what the plan keeps where.
  [[nodiscard]] std::string plan_summary() const;
  // The plan of the steps that run now, and the measured step that it was made of; null while there is none.
  [[nodiscard]] const Plan* plan() const;
  [[nodiscard]] const Snapshot* snapshot() const;
  // How far the plan was off, if the last step ran by it and its work has completed: seconds in the median of
  // its steps since its prediction took up what the first ones measured, bytes in the last.
  [[nodiscard]] std::optional<Prediction::Error> prediction_error() const;
  // The peaks of hbm_usage() and ddr_usage() start again; the published ones do not.
  void reset_peaks();

 private:
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  friend class Timing;
  friend class Span;
};

}  // namespace terrace
