// Experts in DDR: what products read of a layer's experts comes to HBM while the layer needs it.
//
// By layer: layers run in order and in backward in reverse, so what comes next is known: while one layer
// computes, the next ones' experts are on their way. Where the order turns round, at the last layer and at
// the first, a slot still holds what is needed. What an evaluation does out of order is only slower.
//
// By router: forward waits until the layer's router has chosen, and fetches the experts that have tokens.
// Backward knows them and fetches ahead. Those without tokens are not read: no product changes by a bit.
//
// Of each layer the experts with most tokens have a copy in HBM and do not cross the link. How often each is
// used is counted on the device and read when a step is over; residents and the way of loading change then.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "examples/moe_trainer/parameters.hpp"
#include "swapcore/streamed/hot_set.hpp"
#include "swapcore/streamed/load_choice.hpp"

namespace terrace::trainer {

// Numbers of a group's trained experts, in order of its arena, in the type that products read.
struct ExpertNumbers {
  std::int64_t first = 0, count = 0;
  const std::byte* at = nullptr;
};

class ExpertStore {
 public:
  enum class Way : std::uint8_t { kForward, kBackward };
  // Which of these layers keep their experts in HBM: evenly spread, together at most the share. A layer takes
  // part with the bytes of its experts, 0 where it has none.
  [[nodiscard]] static std::vector<StateTier> spread(std::span<const Bytes> layers, Bytes resident);

  struct Options {
    int prefetch = 1;                     // layers
    ExpertLoad load = ExpertLoad::kAuto;  // kAuto begins by layer
    Bytes resident;                       // for copies of hot experts
    std::int64_t micro_batches = 1;
    double forward_share = 1.0 / 3;  // of a step's compute
    Tier* cold = nullptr;            // where some live; null: all are in DDR
  };
  // Of the groups whose experts live in DDR, in order of layers; at least one. Throws OutOfMemory, Failure.
  ExpertStore(Memory& memory, std::vector<ParameterGroup*> groups, const Options& options);
  ~ExpertStore();
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  // A forward pass through a layer, or what follows it in backward: of the step's micro-batch, or of none.
  struct Walk {
    Way way = Way::kForward;
    std::uint32_t micro_batch = 0;
    bool trains = true;
  };
  // The router of the group's layer has chosen: `counts` (experts) of int32, what each was chosen by, stay as
  // they are until end_step(), or for a walk that does not train until its acquire().
  void routed(const ParameterGroup& group, const Walk& walk, const std::int32_t* counts);
  // The group's experts are in HBM between the two, in order of the compute stream, and their pointers set.
  void acquire(const ParameterGroup& group, const Walk& walk);
  void release(const ParameterGroup& group) noexcept;  // what fails is thrown by the next acquire()

  void begin_step();
  void end_step();  // the compute stream's work is done

  // The group's experts will be written, and renew_behind() comes: nothing of them is fetched ahead of it.
  void await_renewal(const ParameterGroup& group) { layers_[place_of(group)].awaits_renewal = true; }
  // The compute stream writes homes: whoever fetches them next waits for what it has to do now.
  void renew();
  // Another stream writes the group's: whoever fetches them next waits for the event. It has written the
  // copies of hot experts too.
  void renew_behind(const ParameterGroup& group, Event event);
  // Numbers first .. first + count of the group's trained experts are new, at `from`: later work on `stream`
  // brings them to the copies of hot experts. Before renew_behind().
  void renew_kept(const ParameterGroup& group, Stream stream, const ExpertNumbers& numbers);
  // The host waits until no copy reads the homes: it may write them.
  void drain();

  [[nodiscard]] const SlotRing::Counters& counters() const { return ring_->counters(); }
  struct Report {
    ExpertLoad load = ExpertLoad::kLayer;  // as it is now
    double fired_share = 1;                // of the experts that are not resident, weighed by bytes; fades
    std::optional<double> break_even_share;
    Bytes kept;  // room for hot experts
  };
  [[nodiscard]] Report report() const;

 private:
  struct Layer {
    ParameterGroup* group = nullptr;
    SlotRing::ItemId item;
    std::vector<Bytes> part_bytes;
    BlockRef kept;  // places of hot experts; null: none
    Bytes place_bytes;
    HotSet hot;
    std::vector<SlotRing::PartSet> fired;  // by micro-batch, as far as the host knows
    Bytes counts_at;                       // of its first micro-batch, in counts_
    bool awaits_renewal = false;
  };
  [[nodiscard]] std::size_t place_of(const ParameterGroup& group) const;
  [[nodiscard]] std::vector<SlotRing::ItemId> from(std::size_t place, Way way) const;
  void add(ParameterGroup& group, Bytes resident);
  void close();
  void keep(const Layer& layer, std::size_t place, std::uint32_t part);
  [[nodiscard]] std::span<const std::int32_t> counts_of(const Layer& layer, std::uint32_t micro_batch) const;
  [[nodiscard]] static Bytes counts_at(const Layer& layer, std::uint32_t micro_batch);
  void hear_router(Layer& layer, std::uint32_t micro_batch);
  [[nodiscard]] std::vector<SlotRing::ItemId> ask_for(std::size_t place, const Walk& walk);
  void collect_stalls();
  void count_uses(Layer& layer);
  void load_by(ExpertLoad load);
  [[nodiscard]] std::optional<LoadCosts> costs() const;

  Memory& memory_;
  Session& session_;
  Options options_;
  std::vector<Layer> layers_;
  std::size_t ahead_;  // layers
  Status failed_;
  Event renewed_{}, chosen_{}, heard_{};
  std::optional<Stream> reader_;        // brings counts to the host, and holds nobody up
  std::optional<PinnedBuffer> counts_;  // by layer, micro-batch, expert
  WaitProbes asking_;
  ExpertLoad load_;
  std::int64_t steps_ = 0;
  std::chrono::steady_clock::time_point step_began_{};
  double stalled_ = 0, asked_ = 0;  // in this step: seconds late, and waited for routers
  Bytes cold_, fired_;              // of the last step's uses: not resident, and of those with tokens
  double fired_share_ = 1, compute_seconds_ = 0, asking_seconds_ = 0;  // of a step; they fade
  std::unique_ptr<SlotRing> ring_;
};

// Experts of a group for as long as this lives; nothing to do where they stay in HBM.
class ExpertUse {
 public:
  ExpertUse(const ParameterGroup& group, const ExpertStore::Walk& walk) : group_(group) {
    if (group.expert_store != nullptr) group.expert_store->acquire(group, walk);
  }
  ~ExpertUse() {
    if (group_.expert_store != nullptr) group_.expert_store->release(group_);
  }
  ExpertUse(const ExpertUse&) = delete;
  ExpertUse& operator=(const ExpertUse&) = delete;

 private:
  const ParameterGroup& group_;
};

}  // namespace terrace::trainer
