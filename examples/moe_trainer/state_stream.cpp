#include "examples/moe_trainer/state_stream.hpp"

#include <algorithm>
#include <utility>

#include "examples/moe_trainer/expert_store.hpp"
#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {

constexpr int kSlots = 4;  // one is stepped, one leaves, and two arrive: neither direction waits for a kernel
// Numbers in a chunk. Two moments and a value are 12 bytes each: with 8 Mi numbers a copy takes two
// milliseconds, against which its launch is nothing; small models have small rings.
constexpr std::int64_t kLeast = std::int64_t{1} << 12, kMost = std::int64_t{1} << 23;
constexpr std::int64_t kChunks = 64;  // of a small model, as many

SlotRing::Piece piece(void* home, std::int64_t count, std::size_t each, SlotRing::Flow flow) {
  return {static_cast<Address>(home), Bytes(static_cast<std::uint64_t>(count) * each), flow};
}

// m, v, then what there is of values and of copies.
std::vector<SlotRing::Piece> pieces_of(const StateRun& home, const ParameterGroup::StateExtent& extent) {
  using Flow = SlotRing::Flow;
  std::vector<SlotRing::Piece> pieces = {piece(home.m, home.count, sizeof(float), Flow::kBoth),
                                         piece(home.v, home.count, sizeof(float), Flow::kBoth)};
  if (extent.values > 0) pieces.push_back(piece(home.value, extent.values, sizeof(float), Flow::kBoth));
  if (extent.copies > 0) pieces.push_back(piece(home.copy, extent.copies, sizeof(Bf16), Flow::kOut));
  return pieces;
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
  for (const Event event : events_) device_.destroy_event(event);
  if (stream_) device_.destroy_stream(*stream_);
  if (at_home_) device_.destroy_stream(*at_home_);
}

void StateStream::open(const Groups& groups) {
  stream_ = require(device_.create_stream(StreamPriority::kNormal));
  at_home_ = require(device_.create_stream(StreamPriority::kNormal));
  ready_ = new_event();
  scratch_.emplace(session_, *stream_, ready_);
  ops_ = require(make_ops(device_, *scratch_));
  std::int64_t total = 0, largest = 0;
  for (const ParameterGroup* group : groups) {
    total += group->streamed_count();
    largest = std::max(largest, group->streamed_count());
  }
  // A multiple of 64: what begins a chunk is aligned as what begins an arena.
  const std::int64_t chunk =
      std::min((largest + 63) / 64 * 64, std::clamp(total / kChunks / 64 * 64, kLeast, kMost));
  const StateRun longest{.count = chunk};
  ring_ = require(session_.open_ring({.slot = SlotRing::slot_bytes(pieces_of(longest, {chunk, chunk})),
                                      .slots = kSlots,
                                      .pool = Pool::kOptimizer,
                                      .user = *stream_,
                                      .reason = CopyReason::kOptimizer}));
  for (const ParameterGroup* group : groups) add_chunks(*group, chunk);
}

Event StateStream::new_event() {
  events_.push_back(require(device_.create_event()));
  return events_.back();
}

void StateStream::add_chunks(const ParameterGroup& group, std::int64_t chunk) {
  Group& of = groups_[&group];
  of.first = sequence_.size();
  of.stepped = new_event();
  of.home = new_event();
  for (std::int64_t first = 0; first < group.streamed_count(); first += chunk) {
    const StateRun home = group.home(first, std::min(chunk, group.streamed_count() - first));
    const ParameterGroup::StateExtent extent = group.extent(home);
    const SlotRing::ItemId item = ring_->add(pieces_of(home, extent));
    of.chunks.push_back({item, home, extent});
    sequence_.push_back(item);
  }
}

// As many as there are slots, from a place in the sequence on; behind its end the next step begins.
void StateStream::expect_from(std::size_t place) {
  std::vector<SlotRing::ItemId> next;
  for (std::size_t i = 0; i < std::min<std::size_t>(kSlots, sequence_.size()); ++i) {
    next.push_back(sequence_[(place + i) % sequence_.size()]);
  }
  require(ring_->expect(next));
}

void StateStream::step(const ParameterGroup& group, std::span<const Update> updates) {
  const auto found = groups_.find(&group);
  if (found == groups_.end()) return;
  Group& of = found->second;
  require(device_.record(session_.compute(), ready_));
  require(device_.wait(*stream_, ready_));
  for (std::size_t i = 0; i < of.chunks.size(); ++i) {
    expect_from(of.first + i);
    step_chunk(group, of.chunks[i], updates);
  }
  expect_from(of.first + of.chunks.size());
  require(device_.record(*stream_, of.stepped));
  of.pending = true;
  renew_experts(group, of);
}

void StateStream::step_chunk(const ParameterGroup& group, const Chunk& chunk,
                             std::span<const Update> updates) {
  const std::span<const Address> at = require(ring_->acquire(chunk.item));
  StateRun run{.first = chunk.home.first,
               .count = chunk.home.count,
               .m = reinterpret_cast<float*>(at[0]),
               .v = reinterpret_cast<float*>(at[1])};
  std::size_t next = 2;
  if (chunk.extent.values > 0) run.value = reinterpret_cast<float*>(at[next++]);
  if (chunk.extent.copies > 0) run.copy = reinterpret_cast<Bf16*>(at[next]);
  for (const Update& update : updates) group.step_run(*ops_, *stream_, update.how, update.only, run);
  require(ring_->release(chunk.item, SlotRing::Use::kWritten));
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
  const auto found = groups_.find(&group);
  if (found == groups_.end() || !found->second.pending) return false;
  found->second.pending = false;
  require(session_.wait_for(found->second.stepped, StallReason::kOptimizerLate));
  return true;
}

void StateStream::drain() {
  require(device_.synchronize(*stream_));
  require(ring_->drain());
  for (const SlotRing::ItemId item : sequence_) require(ring_->forget(item));
}

}  // namespace terrace::trainer
