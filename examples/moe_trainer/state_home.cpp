#include "examples/moe_trainer/state_home.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/host_copy.hpp"

namespace terrace::trainer {

namespace {

// Numbers in a chunk. Two moments and a value are 12 bytes each: with 8 Mi numbers a copy takes two
// milliseconds, against which its launch is nothing.
constexpr std::int64_t kLeast = std::int64_t{1} << 12, kMost = std::int64_t{1} << 23;
constexpr std::int64_t kChunks = 64;  // of a small model, as many
constexpr std::int64_t kAlignment = 64;
constexpr Bytes kFileBlock = 4_KiB;  // what sizes on the tier are rounded up to

constexpr std::array<StateKind, 3> kKinds = {StateKind::kM, StateKind::kV, StateKind::kValue};

Bytes bytes_of_floats(std::int64_t count) { return Bytes(static_cast<std::uint64_t>(count) * sizeof(float)); }

std::int64_t count_of(const StateHome::Chunk& chunk, StateKind kind) {
  return kind == StateKind::kValue ? chunk.values : chunk.count;
}

std::vector<StateHome::Chunk> cut(const StateHome::Plan& plan) {
  std::vector<StateHome::Chunk> chunks;
  for (std::int64_t first = 0; first < plan.numbers; first += plan.chunk) {
    const std::int64_t count = std::min(plan.chunk, plan.numbers - first);
    chunks.push_back(
        {.first = first, .count = count, .values = std::clamp<std::int64_t>(plan.values - first, 0, count)});
  }
  return chunks;
}

}  // namespace

// A multiple of 64: what begins a chunk is aligned as what begins an arena.
std::int64_t StateHome::chunk_of(std::span<const std::int64_t> groups) {
  std::int64_t total = 0, largest = 0;
  for (const std::int64_t numbers : groups) {
    total += numbers;
    largest = std::max(largest, numbers);
  }
  return std::min((largest + kAlignment - 1) / kAlignment * kAlignment,
                  std::clamp(total / kChunks / kAlignment * kAlignment, kLeast, kMost));
}

std::vector<Bytes> StateHome::chunk_bytes(const Plan& plan) {
  std::vector<Bytes> bytes;
  for (const Chunk& chunk : cut(plan)) bytes.push_back(bytes_of_floats(2 * chunk.count + chunk.values));
  return bytes;
}

Bytes StateHome::file_bytes(const Plan& plan) {
  Bytes bytes;
  const std::vector<Chunk> chunks = cut(plan);
  for (std::size_t i = 0; i < std::min(chunks.size(), plan.cold.size()); ++i) {
    if (!plan.cold[i]) continue;
    for (const StateKind kind : kKinds)
      bytes += round_up(bytes_of_floats(count_of(chunks[i], kind)), kFileBlock);
  }
  return bytes;
}

StateHome::StateHome(Memory& memory, const Plan& plan)
    : memory_(memory),
      numbers_(plan.numbers),
      values_(plan.values),
      chunk_(plan.chunk),
      tier_(plan.tier),
      is_cold_(plan.cold),
      chunks_(cut(plan)) {
  is_cold_.resize(chunks_.size(), false);
  place_in_ddr();
  place_on_tier();
}

// One kind behind the other: numbers of neighbouring chunks are neighbours.
void StateHome::place_in_ddr() {
  std::int64_t all = 0;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    if (!is_cold_[i]) all += 2 * chunks_[i].count + chunks_[i].values;
  }
  if (all == 0) return;
  const Bytes least = tier_ != nullptr ? kLeastInDdr : 0_B;
  home_ = memory_.host_block(std::max(least, bytes_of_floats(all)), Pool::kOptimizer);
  std::memset(home_->address, 0, home_->size.count());
  auto* at = reinterpret_cast<float*>(home_->address);
  for (const StateKind kind : kKinds) {
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const std::int64_t count = count_of(chunks_[i], kind);
      if (is_cold_[i] || count == 0) continue;
      chunks_[i].places[static_cast<std::size_t>(kind)].in_ddr = at;
      at += count;
    }
  }
}

void StateHome::place_on_tier() {
  std::vector<SlotRing::PartRange> ranges;
  for (const StateKind kind : kKinds) {
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const std::int64_t count = count_of(chunks_[i], kind);
      if (!is_cold_[i] || count == 0) continue;
      const auto part = static_cast<std::uint32_t>(i * kKinds.size() + static_cast<std::size_t>(kind));
      ranges.push_back({.part = part, .at = cold_at(kind, chunks_[i].first), .size = bytes_of_floats(count)});
    }
  }
  if (ranges.empty()) return;
  const std::vector<SlotRing::PartRange> placed = ranges;
  cold_ = std::make_unique<ColdRanges>(memory_, *tier_, Pool::kOptimizer, std::move(ranges));
  for (const SlotRing::PartRange& range : placed) {
    Chunk& chunk = chunks_[range.part / kKinds.size()];
    chunk.places[range.part % kKinds.size()].on_tier = cold_->blocks_of(range.part).front();
  }
  cold_->write_zeros();
}

Bytes StateHome::cold_at(StateKind kind, std::int64_t number) const {
  return bytes_of_floats(numbers_ * static_cast<std::int64_t>(kind) + number);
}

std::vector<StateHome::Stretch> StateHome::in_ddr(StateKind kind, std::int64_t first,
                                                  std::int64_t count) const {
  std::vector<Stretch> stretches;
  for (const Chunk& chunk : chunks_) {
    float* const at = chunk.of(kind).in_ddr;
    const std::int64_t from = std::max(first, chunk.first);
    const std::int64_t to = std::min(first + count, chunk.first + count_of(chunk, kind));
    if (at != nullptr && from < to) stretches.push_back({from, to - from, at + (from - chunk.first)});
  }
  return stretches;
}

void StateHome::store(StateKind kind, std::int64_t first, const float* from, std::int64_t count) {
  Session& session = memory_.session();
  for (const Stretch& one : in_ddr(kind, first, count)) {
    require(session.device().copy(session.compute(), Direction::kD2H, reinterpret_cast<Address>(one.at),
                                  reinterpret_cast<const std::byte*>(from + (one.first - first)),
                                  bytes_of_floats(one.count)));
  }
  if (cold_ == nullptr) return;
  cold_->write(cold_at(kind, first), reinterpret_cast<const std::byte*>(from), bytes_of_floats(count));
}

void StateHome::load(StateKind kind, std::int64_t first, float* to, std::int64_t count) {
  Session& session = memory_.session();
  for (const Stretch& one : in_ddr(kind, first, count)) {
    require(session.device().copy(session.compute(), Direction::kH2D,
                                  reinterpret_cast<Address>(to + (one.first - first)),
                                  reinterpret_cast<const std::byte*>(one.at), bytes_of_floats(one.count)));
  }
  if (cold_ == nullptr) return;
  cold_->copy_to(reinterpret_cast<std::byte*>(to), cold_at(kind, first), bytes_of_floats(count));
}

void StateHome::write(StateKind kind, std::int64_t first, std::span<const float> from) {
  const auto count = static_cast<std::int64_t>(from.size());
  std::int64_t here = 0;
  for (const Stretch& one : in_ddr(kind, first, count)) {
    std::copy_n(from.begin() + (one.first - first), one.count, one.at);
    here += one.count;
  }
  if (here == count) return;
  Session& session = memory_.session();
  const BlockRef all = memory_.block(bytes_of_floats(count), Pool::kScratch);
  upload(session, std::as_bytes(from), all->address);
  cold_->write(cold_at(kind, first), all->address, bytes_of_floats(count));
}

std::vector<float> StateHome::read(StateKind kind, std::int64_t first, std::int64_t count) {
  std::vector<float> numbers(static_cast<std::size_t>(count));
  if (cold_ != nullptr) {
    const std::vector<std::byte> there = cold_->read(cold_at(kind, first), bytes_of_floats(count));
    std::memcpy(numbers.data(), there.data(), there.size());
  }
  for (const Stretch& one : in_ddr(kind, first, count)) {
    std::copy_n(one.at, one.count, numbers.begin() + (one.first - first));
  }
  return numbers;
}

}  // namespace terrace::trainer
