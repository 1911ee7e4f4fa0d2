// The numbers of parameters, wherever they live: their start, what others set, the copies made of them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/host_copy.hpp"
#include "examples/moe_trainer/parameters.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer {

namespace {

// Numbers made in one go: a bf16 operator of the CPU works in fp32 scratch.
constexpr std::int64_t kPiece = std::int64_t{1} << 24;

Address address_of(const void* at) {
  return static_cast<Address>(const_cast<void*>(at));  // NOLINT: the seam takes one type both ways
}

// An array of a parameter that lives outside of HBM, of experts with some on NVMe perhaps.
struct HomeArray {
  const Parameter& parameter;
  Bytes at;          // in the block of experts
  std::int64_t all;  // numbers of the whole stack
};

// How many of them are in DDR.
std::int64_t warm_of(const HomeArray& array, std::int64_t first, std::int64_t count) {
  const Parameter::Home& home = array.parameter.home;
  if (home.cold == nullptr) return count;
  const std::int64_t warm = array.all / array.parameter.shape.front() * home.warm;
  return std::clamp<std::int64_t>(warm - first, 0, count);
}

template <typename T>
void copy_numbers(Session& session, Direction direction, T* to, const void* from, std::int64_t count) {
  require(session.device().copy(session.compute(), direction, address_of(to), address_of(from),
                                Bytes(static_cast<std::uint64_t>(count) * sizeof(T))));
}

// From the device to where they live, in order of the compute stream.
template <typename T>
void copy_home(Session& session, const HomeArray& array, T* home, std::int64_t first, const void* from,
               std::int64_t count) {
  const std::int64_t warm = warm_of(array, first, count);
  if (warm > 0) copy_numbers(session, Direction::kD2H, home + first, from, warm);
  if (warm == count) return;
  const auto bytes = [](std::int64_t numbers) {
    return Bytes(static_cast<std::uint64_t>(numbers) * sizeof(T));
  };
  array.parameter.home.cold->write(array.at + bytes(first + warm),
                                   static_cast<const std::byte*>(from) + bytes(warm).count(),
                                   bytes(count - warm));
}

// From the host: by way of the device where some of it goes to NVMe. The compute stream is idle.
template <typename T>
void put_home(Session& session, const HomeArray& array, T* home, std::int64_t first,
              std::span<const T> from) {
  const auto count = static_cast<std::int64_t>(from.size());
  if (warm_of(array, first, count) == count) {
    std::copy(from.begin(), from.end(), home + first);
    return;
  }
  const BlockRef there = require(session.allocate(Bytes(from.size_bytes()), Pool::kScratch));
  upload(session, std::as_bytes(from), there->address);
  copy_home(session, array, home, first, there->address, count);
  require(session.device().synchronize(session.compute()));
}

HomeArray numbers_of(const Parameter& p) { return {p, p.home.numbers_at, p.count()}; }
HomeArray scales_of(const Parameter& p) { return {p, p.home.scales_at, p.scale_count()}; }

}  // namespace

void ParameterGroup::fill_start(Ops& ops, Stream stream, std::uint64_t seed) const {
  for (const Parameter& parameter : parameters_) {
    const CounterRandom random({.seed = seed, .stream = parameter.name});
    const std::int64_t width = parameter.in_blocks() ? parameter.width() : 1;
    const std::int64_t piece = std::max<std::int64_t>(1, kPiece / width) * width;
    for (std::int64_t first = 0; first < parameter.count(); first += piece) {
      fill_piece(ops, stream, parameter,
                 {.count = std::min(piece, parameter.count() - first),
                  .random = random,
                  .first = static_cast<std::uint64_t>(first),
                  .draw = parameter.init.form,
                  .a = parameter.init.a,
                  .b = parameter.init.b,
                  .y = nullptr});
    }
  }
}

// Numbers that live in DDR are drawn in HBM and copied there: the same bits.
void ParameterGroup::fill_piece(Ops& ops, Stream stream, const Parameter& p, RandomFill fill) const {
  Session& session = memory_->session();
  const auto first = static_cast<std::int64_t>(fill.first);
  const auto drawn = [&](Dtype dtype) {
    const std::int64_t width = p.in_blocks() ? p.width() : fill.count;
    Tensor numbers = memory_->tensor(fill.count / width, width, Pool::kScratch, dtype);
    fill.y = numbers;
    ops.run(stream, fill);
    return numbers;
  };
  if (p.in_blocks()) {
    const Tensor numbers = drawn(Dtype::kF32);
    const std::int64_t scales = numbers.rows * blocks_of(p.width());
    const std::int64_t first_scale = first / p.width() * blocks_of(p.width());
    const bool here = p.block_numbers != nullptr;
    const BlockRef q =
        here ? nullptr : memory_->block(Bytes(static_cast<std::uint64_t>(fill.count)), Pool::kScratch);
    const Tensor scale = here ? Tensor{} : memory_->tensor(1, scales, Pool::kScratch);
    auto* const q_at = here ? p.block_numbers + first : reinterpret_cast<std::int8_t*>(q->address);
    float* const scale_at = here ? p.block_scale + first_scale : scale.f32();
    ops.run(
        stream,
        QuantiseBlocks{.rows = numbers.rows, .width = p.width(), .x = numbers, .q = q_at, .scale = scale_at});
    if (here) return;
    copy_home(session, numbers_of(p), p.home.block_numbers, first, q_at, fill.count);
    copy_home(session, scales_of(p), p.home.block_scale, first_scale, scale_at, scales);
  } else if (p.value_in_state()) {
    p.home.state->store(StateKind::kValue, p.home.state_at + first, drawn(Dtype::kF32).f32(), fill.count);
  } else if (p.value != nullptr || (p.home.value == nullptr && p.copy != nullptr)) {
    fill.y = p.value != nullptr ? Out(p.value + first) : Out(p.copy + first);
    ops.run(stream, fill);
  } else if (p.home.value != nullptr) {
    copy_home(session, numbers_of(p), p.home.value, first, drawn(Dtype::kF32).at, fill.count);
  } else {
    copy_home(session, numbers_of(p), p.home.copy, first, drawn(Dtype::kBf16).at, fill.count);
  }
}

void ParameterGroup::refresh_copies(Ops& ops, Stream stream) const {
  if (compute_ == Dtype::kF32) return;
  const std::int64_t piece = state_home_ != nullptr || expert_home_ != nullptr ? kPiece : decayed_;
  for (std::int64_t first = 0; first < decayed_;) {
    std::int64_t end = std::min(decayed_, first + piece);
    for (const std::int64_t border : {experts_, values_from_}) {
      if (first < border) end = std::min(end, border);
    }
    refresh_range(ops, stream, first, end - first);
    first = end;
  }
}

// Of numbers whose values lie in one place, and whose copies do.
void ParameterGroup::refresh_range(Ops& ops, Stream stream, std::int64_t first, std::int64_t count) const {
  Session& session = memory_->session();
  const StateRun there = home(first, count);
  const StateExtent away = state_home_ != nullptr ? extent(there) : StateExtent{};
  Tensor values, copies;
  if (away.values > 0) {
    values = memory_->tensor(1, count, Pool::kScratch);
    state_home_->load(StateKind::kValue, first, values.f32(), count);
  }
  if (away.copies > 0) copies = memory_->tensor(1, count, Pool::kScratch, compute_);
  ops.run(stream, Convert{.count = count,
                          .x = values ? In(values) : In(value_at(first, {})),
                          .y = copies ? Out(copies) : copy_at(first, {})});
  if (copies) copy_numbers(session, Direction::kD2H, there.copy, copies.at, count);
}

namespace {

void set_blocks(Session& session, const Parameter& parameter, std::int64_t first,
                std::span<const float> from) {
  const std::int64_t width = parameter.width();
  const std::int64_t rows = static_cast<std::int64_t>(from.size()) / width;
  std::vector<std::int8_t> numbers(from.size());
  std::vector<float> scales(static_cast<std::size_t>(rows * blocks_of(width)));
  quantise_blocks(
      {.rows = rows, .width = width, .x = from.data(), .q = numbers.data(), .scale = scales.data()});
  const std::int64_t first_scale = first / width * blocks_of(width);
  if (parameter.home.block_numbers != nullptr) {
    put_home<std::int8_t>(session, numbers_of(parameter), parameter.home.block_numbers, first, numbers);
    put_home<float>(session, scales_of(parameter), parameter.home.block_scale, first_scale, scales);
    return;
  }
  upload(session, std::as_bytes(std::span(numbers)),
         reinterpret_cast<Address>(parameter.block_numbers + first));
  upload(session, scales, parameter.block_scale + first_scale);
}

}  // namespace

void set_values(Session& session, const Parameter& parameter, std::int64_t first,
                std::span<const float> from) {
  const Parameter::Home& home = parameter.home;
  // The start is copied there in order of the compute stream.
  if (home.state != nullptr || home.value != nullptr || home.copy != nullptr || home.block_numbers != nullptr)
    require(session.device().synchronize(session.compute()));
  if (parameter.in_blocks()) return set_blocks(session, parameter, first, from);
  if (parameter.value_in_state()) {
    home.state->write(StateKind::kValue, home.state_at + first, from);
    return;
  }
  if (home.value != nullptr) {
    put_home<float>(session, numbers_of(parameter), home.value, first, from);
    return;
  }
  if (parameter.value != nullptr) return upload(session, from, parameter.value + first);
  std::vector<Bf16> rounded(from.size());
  std::transform(from.begin(), from.end(), rounded.begin(), [](float x) { return to_bf16(x); });
  if (home.copy != nullptr) {
    put_home<Bf16>(session, numbers_of(parameter), home.copy, first, rounded);
    return;
  }
  upload(session, std::as_bytes(std::span(rounded)), reinterpret_cast<Address>(parameter.copy + first));
}

namespace {

template <typename T>
std::vector<std::byte> home_bytes(const HomeArray& array, const T* home) {
  const std::int64_t warm = warm_of(array, 0, array.all);
  const std::span<const std::byte> in_ddr = std::as_bytes(std::span(home, static_cast<std::size_t>(warm)));
  std::vector<std::byte> bytes(in_ddr.begin(), in_ddr.end());
  if (warm == array.all) return bytes;
  const auto size = [](std::int64_t numbers) {
    return Bytes(static_cast<std::uint64_t>(numbers) * sizeof(T));
  };
  const std::vector<std::byte> cold =
      array.parameter.home.cold->read(array.at + size(warm), size(array.all - warm));
  bytes.insert(bytes.end(), cold.begin(), cold.end());
  return bytes;
}

}  // namespace

std::vector<std::byte> home_numbers(const Parameter& p) {
  if (p.value_in_state()) {
    const std::vector<float> values = p.home.state->read(StateKind::kValue, p.home.state_at, p.count());
    const auto bytes = std::as_bytes(std::span(values));
    return {bytes.begin(), bytes.end()};
  }
  if (p.home.block_numbers != nullptr) return home_bytes(numbers_of(p), p.home.block_numbers);
  if (p.home.value != nullptr) return home_bytes(numbers_of(p), p.home.value);
  return home_bytes(numbers_of(p), p.home.copy);
}

std::vector<std::byte> home_scales(const Parameter& p) {
  return home_bytes(scales_of(p), p.home.block_scale);
}

}  // namespace terrace::trainer
