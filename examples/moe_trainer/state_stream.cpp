#include "examples/moe_trainer/state_stream.hpp"

#include <algorithm>
#include <utility>

#include "examples/moe_trainer/expert_gradients.hpp"
#include "examples/moe_trainer/expert_store.hpp"
#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {

// One is stepped, one leaves, and two arrive: neither direction waits for a kernel. A file takes longer to
// answer and to be written than the link: two more are on their way.
constexpr std::size_t kSlots = 4, kSlotsWithFile = 6;

// Parts of a chunk: gradients come when they are final, the rest ahead of that.
constexpr std::uint32_t kState = 0, kGradients = 1;

SlotRing::Piece piece(const void* home, std::int64_t count, std::size_t each, SlotRing::Flow flow) {
  // NOLINTNEXTLINE: what flows in only is not written there
  auto* const at = static_cast<Address>(const_cast<void*>(home));
  return {at, Bytes(static_cast<std::uint64_t>(count) * each), flow, kState};
}

SlotRing::Piece piece(const StateHome::Place& home, std::int64_t count) {
  SlotRing::Piece both_ways = piece(home.in_ddr, count, sizeof(float), SlotRing::Flow::kBoth);
  both_ways.cold = home.on_tier;
  return both_ways;
}

// m, v, then what there is of values, of copies and of gradients.
std::vector<SlotRing::Piece> pieces_of(const StateHome::Chunk& state, const StateRun& home,
                                       const ParameterGroup::StateExtent& extent) {
  using Flow = SlotRing::Flow;
  std::vector<SlotRing::Piece> pieces = {piece(state.of(StateKind::kM), home.count),
                                         piece(state.of(StateKind::kV), home.count)};
  if (state.values > 0) {
    pieces.push_back(piece(state.of(StateKind::kValue), extent.values));
  } else if (extent.values > 0) {  // what products read of experts
    pieces.push_back(piece(home.value, extent.values, sizeof(float), Flow::kBoth));
  }
  if (extent.copies > 0) pieces.push_back(piece(home.copy, extent.copies, sizeof(Bf16), Flow::kOut));
  if (extent.gradients > 0) {
    pieces.push_back(piece(home.gradient, extent.gradients, sizeof(float), Flow::kIn));
    pieces.back().part = kGradients;
  }
  return pieces;
}

// An error of the file says whose state could not come.
void require_of(const ParameterGroup& group, const Status& here) {
  if (here) return;
  Error error = here.error();
  error.text = "optimizer state of " + group.name() + ": " + error.text;
  fail(std::move(error));
}

}  // namespace

std::shared_ptr<const void> StreamScratch::take(Bytes size, Address* address) {
  if (blocks_.empty() || blocks_.back()->size < size) {
    blocks_.push_back(require(session_.allocate(size, Pool::kOptimizer)));
    require(session_.device().record(session_.compute(), ready_));
    require(session_.device().wait(user_, ready_));
  }
  *address = blocks_.back()->address;
  return blocks_.back();
}

std::unique_ptr<StateStream> StateStream::of(Session& session, const Groups& groups) {
  return groups.empty() ? nullptr : std::unique_ptr<StateStream>(new StateStream(session, groups));
}

StateStream::StateStream(Session& session, const Groups& groups)
    : session_(session), device_(session.device()) {
  try {
    open(groups);
  } catch (...) {
    close();
    throw;
  }
}

StateStream::~StateStream() { close(); }

void StateStream::close() {
  ring_.reset();
  if (stream_) (void)device_.synchronize(*stream_);
  if (at_home_) (void)device_.synchronize(*at_home_);
  if (gradients_home_) (void)device_.synchronize(*gradients_home_);
  for (const Event event : events_) device_.destroy_event(event);
  if (stream_) device_.destroy_stream(*stream_);
  if (at_home_) device_.destroy_stream(*at_home_);
  if (gradients_home_) device_.destroy_stream(*gradients_home_);
}

void StateStream::open(const Groups& groups) {
  stream_ = require(device_.create_stream(StreamPriority::kNormal));
  at_home_ = require(device_.create_stream(StreamPriority::kNormal));
  gradients_home_ = require(device_.create_stream(StreamPriority::kNormal));
  ready_ = new_event();
  scratch_.emplace(session_, *stream_, ready_);
  ops_ = require(make_ops(device_, *scratch_));
  std::int64_t chunk = 0;
  bool gradients = false;
  Tier* tier = nullptr;
  for (const ParameterGroup* group : groups) {
    chunk = std::max(chunk, group->state_home()->chunk());
    gradients = gradients || group->expert_gradient_home() != nullptr;
    if (group->state_home()->tier() != nullptr) tier = group->state_home()->tier();
  }
  with_file_ = tier != nullptr;
  slots_ = with_file_ ? kSlotsWithFile : kSlots;
  const ParameterGroup::StateExtent all{.values = chunk, .copies = chunk, .gradients = gradients ? chunk : 0};
  const StateRun longest{.count = chunk};
  ring_ = require(session_.open_ring({.slot = SlotRing::slot_bytes(pieces_of({}, longest, all)),
                                      .slots = static_cast<int>(slots_),
                                      .pool = Pool::kOptimizer,
                                      .user = *stream_,
                                      .reason = CopyReason::kOptimizer,
                                      .cold = tier}));
  for (const ParameterGroup* group : groups) add_chunks(*group);
}

Event StateStream::new_event() {
  events_.push_back(require(device_.create_event()));
  return events_.back();
}

void StateStream::add_chunks(const ParameterGroup& group) {
  Group& of = groups_[&group];
  of.first = sequence_.size();
  of.stepped = new_event();
  of.home = new_event();
  of.made = new_event();
  if (group.expert_gradient_home() != nullptr) of.gradients = new_event();
  for (const StateHome::Chunk& chunk : group.state_home()->chunks()) {
    const StateRun home = group.home(chunk.first, chunk.count);
    const ParameterGroup::StateExtent extent = group.extent(home);
    const SlotRing::ItemId item = ring_->add(pieces_of(chunk, home, extent));
    of.chunks.push_back({item, {.first = chunk.first, .count = chunk.count}, extent});
    want(of.chunks.back(), Wanted::kAhead);
    sequence_.push_back(item);
  }
}

// As many as there are slots, from a place in the sequence on; behind its end the next step begins.
void StateStream::expect_from(std::size_t place) {
  std::vector<SlotRing::ItemId> next;
  for (std::size_t i = 0; i < std::min(slots_, sequence_.size()); ++i) {
    next.push_back(sequence_[(place + i) % sequence_.size()]);
  }
  require(ring_->expect(next));
}

// Of a chunk with gradients, all of it or what does not wait for backward.
void StateStream::want(const Chunk& chunk, Wanted wanted) {
  if (chunk.extent.gradients == 0) return;
  ring_->want(chunk.item, {true, wanted == Wanted::kAll});
}

void StateStream::gradients_are_final(const ParameterGroup& group) {
  const auto found = groups_.find(&group);
  if (found == groups_.end() || found->second.gradients == Event{} || found->second.final) return;
  Group& of = found->second;
  of.final = true;
  if (group.expert_gradients->are_zeros(group)) return;  // no backward pass was made: they are not read
  group.expert_gradients->order_behind_write(*gradients_home_, group);
  require(device_.record(*gradients_home_, of.gradients));
  for (const Chunk& chunk : of.chunks) {
    if (chunk.extent.gradients == 0) continue;
    ring_->renew_part_behind(chunk.item, kGradients, of.gradients);
    want(chunk, Wanted::kAll);
  }
}

void StateStream::gradients_made(const ParameterGroup& group) {
  const auto found = groups_.find(&group);
  if (found == groups_.end()) return;
  gradients_are_final(group);
  require(device_.record(session_.compute(), found->second.made));
  found->second.made_before = true;
}

void StateStream::step(const ParameterGroup& group, std::span<const Update> updates) {
  const auto found = groups_.find(&group);
  if (found == groups_.end()) return;
  Group& of = found->second;
  if (!of.made_before) gradients_made(group);
  of.made_before = false;
  of.updates.assign(updates.begin(), updates.end());
  of.pending = true;
  if (group.expert_store != nullptr && group.trains_experts()) group.expert_store->await_renewal(group);
  due_.push_back(&group);
  go_on();
}

// The next chunk that is due. False: there is none, or a file has not answered yet.
bool StateStream::step_next() {
  if (due_.empty()) return false;
  const ParameterGroup& group = *due_.front();
  Group& of = groups_.at(&group);
  const Chunk& chunk = of.chunks[next_chunk_];
  expect_from(of.first + next_chunk_);
  if (with_file_ && !ring_->is_here(chunk.item)) return false;
  if (next_chunk_ == 0) require(device_.wait(*stream_, of.made));
  step_chunk(group, chunk, of.updates);
  if (++next_chunk_ < of.chunks.size()) return true;
  next_chunk_ = 0;
  due_.pop_front();
  finish(group, of);
  return true;
}

void StateStream::go_on() {
  while (step_next()) continue;
}

void StateStream::finish(const ParameterGroup& group, Group& of) {
  for (const Chunk& chunk : of.chunks) want(chunk, Wanted::kAhead);
  of.final = false;
  expect_from(of.first + of.chunks.size());
  require(device_.record(*stream_, of.stepped));
  renew_experts(group, of);
}

void StateStream::step_chunk(const ParameterGroup& group, const Chunk& chunk,
                             std::span<const Update> updates) {
  const auto acquired = ring_->acquire(chunk.item);
  if (!acquired) require_of(group, acquired.error());
  const std::span<const Address> at = *acquired;
  StateRun run = chunk.run;
  run.m = reinterpret_cast<float*>(at[0]);
  run.v = reinterpret_cast<float*>(at[1]);
  std::size_t next = 2;
  if (chunk.extent.values > 0) run.value = reinterpret_cast<float*>(at[next++]);
  if (chunk.extent.copies > 0) run.copy = reinterpret_cast<Bf16*>(at[next++]);
  if (chunk.extent.gradients > 0) run.gradient = reinterpret_cast<const float*>(at[next]);
  for (const Update& update : updates) group.step_run(*ops_, *stream_, update.how, update.only, run);
  renew_kept_experts(group, run, chunk.extent);
  require(ring_->release(chunk.item, SlotRing::Use::kWritten));
}

// Copies of hot experts are stepped with the rest: they do not come over the link again.
void StateStream::renew_kept_experts(const ParameterGroup& group, const StateRun& run,
                                     const ParameterGroup::StateExtent& extent) {
  if (group.expert_store == nullptr || !group.trains_experts()) return;
  const bool narrow = group.bytes_of_expert_number() == sizeof(Bf16);
  const std::int64_t count = narrow ? extent.copies : extent.values;
  if (count == 0) return;
  const void* const at = narrow ? static_cast<const void*>(run.copy) : run.value;
  group.expert_store->renew_kept(
      group, *stream_, {.first = run.first, .count = count, .at = static_cast<const std::byte*>(at)});
}

// What the store holds of the group's experts is of the step before: it fetches them behind the copies home.
void StateStream::renew_experts(const ParameterGroup& group, const Group& of) {
  if (group.expert_store == nullptr || !group.trains_experts()) return;
  for (const Chunk& chunk : of.chunks) {
    if (chunk.extent.copies == 0 && chunk.extent.values == 0) continue;
    require(ring_->order_behind_write(*at_home_, chunk.item));
  }
  require(device_.record(*at_home_, of.home));
  group.expert_store->renew_behind(group, of.home);
}

bool StateStream::settle(const ParameterGroup& group) {
  go_on();
  if (with_file_ && due_.empty()) expect_from(0);  // in slots that were being stored when the update ended
  const auto found = groups_.find(&group);
  if (found == groups_.end() || !found->second.pending) return false;
  found->second.pending = false;
  while (std::find(due_.begin(), due_.end(), &group) != due_.end()) {
    if (step_next()) continue;
    const auto file = [&] { return ring_->bring_here(next_due().item); };
    require_of(*due_.front(), session_.wait_for(file, StallReason::kOptimizerLate));
  }
  require(session_.wait_for(found->second.stepped, StallReason::kOptimizerLate));
  return true;
}

void StateStream::drain() {
  TERRACE_CHECK(due_.empty(), "every group has been settled");
  require(device_.synchronize(*stream_));
  require(ring_->drain());
  for (const SlotRing::ItemId item : sequence_) require(ring_->forget(item));
}

}  // namespace terrace::trainer
