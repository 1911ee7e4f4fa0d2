#include "allocator/stream_order.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace terrace {
namespace {

Error still_at_work() { return {.code = Errc::kTimeout, .text = "a stream is at work"}; }

// Calls `visit` with each index in `streams` until it gives back an error.
template <typename Visit>
Status each_stream(std::uint64_t streams, const Visit& visit) {
  for (; streams != 0; streams &= streams - 1) {
    if (auto done = visit(static_cast<std::size_t>(std::countr_zero(streams))); !done) return done;
  }
  return {};
}

}  // namespace

StreamOrder::~StreamOrder() {
  for (const Record& record : records_) {
    for (const Fence& fence : record.fences) device_.destroy_event(fence.event);
  }
  for (const Event event : spare_) device_.destroy_event(event);
}

bool StreamOrder::knows(Stream stream) const {
  return std::any_of(records_.begin(), records_.end(),
                     [stream](const Record& record) { return record.stream == stream; });
}

Result<StreamOrder::Index> StreamOrder::index_of(Stream stream) {
  if (!device_.alive(stream)) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "stream " + std::to_string(stream.id) +
                         " has ended, or never was: use one between create_stream and destroy_stream"};
  }
  for (Index i = 0; i < records_.size(); ++i) {
    if (records_[i].stream == stream) return i;
  }
  if (records_.size() < kMostStreams) {
    records_.push_back({.stream = stream});
    return static_cast<Index>(records_.size() - 1);
  }
  const auto index = recyclable();
  if (!index) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "stream " + std::to_string(stream.id) + " has no place: frees on " +
                         std::to_string(kMostStreams) +
                         " other streams are pending; synchronize some of them, or use fewer"};
  }
  // Ranges that still name this bit were freed before now, and that work is over.
  Record& record = records_[*index];
  record.stream = stream;
  record.completed = sequence_;
  record.newest_free = 0;
  record.passed_by.fill(sequence_);
  for (Record& other : records_) other.passed_by[*index] = 0;
  return *index;
}

std::optional<StreamOrder::Index> StreamOrder::over() {
  for (Index i = 0; i < records_.size(); ++i) {
    Record& record = records_[i];
    if (record.holders != 0) continue;
    learn_completed(record);
    if (record.newest_free > record.completed) continue;
    for (const Fence& fence : record.fences) spare_.push_back(fence.event);
    record.fences.clear();
    return i;
  }
  return std::nullopt;
}

std::optional<StreamOrder::Index> StreamOrder::recyclable() {
  if (const auto index = over()) return index;
  // Ask every stream. What has not passed its fence when we look again has by the time the next one asks.
  for (Record& record : records_) {
    if (record.holders == 0) (void)fence_after(record, record.newest_free);
  }
  return over();
}

Pending StreamOrder::freed_on(Index index) {
  Record& record = records_[index];
  ++sequence_;
  if (!device_.alive(record.stream)) {
    record.completed = sequence_;
    return {};
  }
  record.newest_free = sequence_;
  return {1ULL << index, sequence_};
}

std::uint64_t StreamOrder::open_until(const Record& record, const Pending& pending) {
  const std::uint64_t until = std::min(pending.sequence, record.newest_free);
  return until <= record.completed ? 0 : until;
}

bool StreamOrder::ready_for(Index stream, const Pending& pending) const {
  for (std::uint64_t others = pending.streams & ~(1ULL << stream); others != 0; others &= others - 1) {
    const Record& other = records_[static_cast<std::size_t>(std::countr_zero(others))];
    if (open_until(other, pending) > other.passed_by[stream]) return false;
  }
  return true;
}

void StreamOrder::learn_completed(Record& record) {
  if (!device_.alive(record.stream)) record.completed = sequence_;
  while (!record.fences.empty() && device_.completed(record.fences.front().event)) {
    record.completed = std::max(record.completed, record.fences.front().sequence);
    spare_.push_back(record.fences.front().event);
    record.fences.pop_front();
  }
}

Result<Event> StreamOrder::spare_event(Record& record) {
  if (record.fences.size() == kMostFences) {
    const Event oldest = record.fences.front().event;
    record.fences.pop_front();
    return oldest;
  }
  if (spare_.empty()) return device_.create_event();
  const Event event = spare_.back();
  spare_.pop_back();
  return event;
}

Result<std::optional<StreamOrder::Fence>> StreamOrder::fence_after(Record& record, std::uint64_t sequence) {
  learn_completed(record);
  if (record.completed >= sequence) return std::optional<Fence>();
  const auto found = std::find_if(record.fences.begin(), record.fences.end(),
                                  [&](const Fence& fence) { return fence.sequence >= sequence; });
  if (found != record.fences.end()) return std::optional<Fence>(*found);
  auto event = spare_event(record);
  if (!event) return std::move(event).error();
  if (auto recorded = device_.record(record.stream, *event); !recorded) {
    spare_.push_back(*event);
    if (device_.alive(record.stream)) return recorded.error();
    // Another thread ended the stream meanwhile: what was freed on it is over.
    record.completed = sequence_;
    return std::optional<Fence>();
  }
  record.fences.push_back({*event, sequence_});
  return std::optional<Fence>(record.fences.back());
}

Status StreamOrder::order_behind(Index stream, const Pending& pending) {
  return each_stream(pending.streams & ~(1ULL << stream), [&](std::size_t index) -> Status {
    Record& other = records_[index];
    const std::uint64_t until = open_until(other, pending);
    if (until <= other.passed_by[stream]) return {};
    auto fence = fence_after(other, until);
    if (!fence) return fence.error();
    if (!fence->has_value()) return {};
    if (auto waits = device_.wait(records_[stream].stream, (*fence)->event); !waits) return waits;
    other.passed_by[stream] = (*fence)->sequence;
    return {};
  });
}

bool StreamOrder::is_over(const Pending& pending, Nanoseconds patience_ends) {
  const Status all = each_stream(pending.streams, [&](std::size_t index) -> Status {
    Record& record = records_[index];
    const std::uint64_t until = open_until(record, pending);
    if (until == 0) return {};
    auto fence = fence_after(record, until);
    if (!fence) return fence.error();
    while (fence->has_value() && !device_.completed((*fence)->event)) {
      if (steady_clock().now() > patience_ends) return still_at_work();
    }
    learn_completed(record);
    return {};
  });
  return all.ok();
}

Status StreamOrder::finish(const Pending& pending) {
  return each_stream(pending.streams, [&](std::size_t index) -> Status {
    Record& record = records_[index];
    const std::uint64_t until = open_until(record, pending);
    if (until == 0) return {};
    auto fence = fence_after(record, until);
    if (!fence) return fence.error();
    if (!fence->has_value()) return {};
    if (auto done = device_.synchronize((*fence)->event); !done) return done;
    record.completed = std::max(record.completed, (*fence)->sequence);
    return {};
  });
}

void StreamOrder::finish_all() {
  for (Index i = 0; i < records_.size(); ++i) {
    if (finish({1ULL << i, sequence_})) continue;
    if (device_.alive(records_[i].stream)) (void)device_.synchronize(records_[i].stream);
  }
}

}  // namespace terrace
