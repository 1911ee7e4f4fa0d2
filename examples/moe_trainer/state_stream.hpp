// The optimizer's state outside of HBM: chunks of it pass through a ring of HBM slots while they are stepped.
//
// Groups are stepped on a stream of their own, one behind another in an order that is always the same: the
// next chunks are fetched while one is stepped and the last ones are copied home. The compute stream meets it
// twice: a group is stepped behind the work that made its gradients, and the compute stream waits for it
// before it reads the group again. So copies run beside the backward pass and the next forward.
//
// For chunks on NVMe the host waits, since no stream can. So it steps as far as files have answered, goes on
// each time that a group is used, and waits for a file only where the compute stream needs what comes of it.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

// Scratch of one stream that runs its operators one after another: they share a block.
class StreamScratch final : public ScratchSource {
 public:
  StreamScratch(Session& session, Stream user, Event ready) : session_(session), user_(user), ready_(ready) {}
  [[nodiscard]] std::shared_ptr<const void> take(Bytes size, Address* address) override;

 private:
  Session& session_;
  Stream user_;
  Event ready_;
  std::deque<BlockRef> blocks_;  // the last is in use, those before may be in flight
};

class StateStream {
 public:
  using Groups = std::vector<const ParameterGroup*>;
  // Of groups whose state lives outside of HBM, in the order in which they are stepped; null where there is
  // none. Throws OutOfMemory, Failure.
  [[nodiscard]] static std::unique_ptr<StateStream> of(Session& session, const Groups& groups);
  ~StateStream();
  StateStream(const StateStream&) = delete;
  StateStream& operator=(const StateStream&) = delete;

  struct Update {
    AdamW how;
    std::optional<Part> only;
  };
  // Gradients that live in DDR are final: the group's may be fetched. Before step(), which else does it.
  void gradients_are_final(const ParameterGroup& group);
  // Its gradients are made by what the compute stream has to do now: the next step() of the group comes
  // behind that, whatever compute was given in between.
  void gradients_made(const ParameterGroup& group);
  // Steps the group's numbers by each of the updates, behind its gradients or else what the compute stream
  // has to do now.
  void step(const ParameterGroup& group, std::span<const Update> updates);
  // Later work of the compute stream finds the group stepped. Whether it has been since the last call.
  bool settle(const ParameterGroup& group);
  // The host waits until all homes hold the state of the last step. After it the host may write them.
  // Precondition: every group has been settled.
  void drain();
  [[nodiscard]] const SlotRing::Counters& counters() const { return ring_->counters(); }

 private:
  struct Chunk {
    SlotRing::ItemId item;
    StateRun run;  // without addresses
    ParameterGroup::StateExtent extent;
  };
  struct Group {
    std::vector<Chunk> chunks;
    std::size_t first = 0;    // of them in sequence_
    Event stepped{}, home{};  // on the stream, and when the copies home have arrived
    bool pending = false;
    std::vector<Update> updates;
    Event made{};  // its gradients, on the compute stream
    bool made_before = false;
    Event gradients{};  // have arrived in DDR; where they live there
    bool final = false;
  };
  enum class Wanted : std::uint8_t { kAhead, kAll };
  void want(const Chunk& chunk, Wanted wanted);
  StateStream(Session& session, const Groups& groups);
  void open(const Groups& groups);
  void add_chunks(const ParameterGroup& group);
  void close();
  [[nodiscard]] Event new_event();
  void expect_from(std::size_t place);
  [[nodiscard]] const Chunk& next_due() const { return groups_.at(due_.front()).chunks[next_chunk_]; }
  bool step_next();
  void go_on();
  void finish(const ParameterGroup& group, Group& of);
  void step_chunk(const ParameterGroup& group, const Chunk& chunk, std::span<const Update> updates);
  void renew_kept_experts(const ParameterGroup& group, const StateRun& run,
                          const ParameterGroup::StateExtent& extent);
  void renew_experts(const ParameterGroup& group, const Group& of);

  Session& session_;
  Device& device_;
  std::optional<Stream> stream_;
  // They wait for copies home, of state and of gradients, and hold nobody up.
  std::optional<Stream> at_home_, gradients_home_;
  std::vector<Event> events_;  // all that there are
  Event ready_{};
  std::optional<StreamScratch> scratch_;
  std::unique_ptr<Ops> ops_;
  std::map<const ParameterGroup*, Group> groups_;
  std::vector<SlotRing::ItemId> sequence_;  // all chunks, in the order in which they are stepped
  std::size_t slots_ = 0;
  bool with_file_ = false;
  std::deque<const ParameterGroup*> due_;  // not yet stepped, in order, and how far the first of them is
  std::size_t next_chunk_ = 0;
  std::unique_ptr<SlotRing> ring_;
};

}  // namespace terrace::trainer
