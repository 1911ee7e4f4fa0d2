#include "examples/moe_trainer/parameters.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/host_copy.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer {

namespace {

// Gaps between parameters hold zeros, have zero gradients, and so stay zero.
constexpr std::int64_t kAlignment = 64;  // floats

// Numbers made in one go: a bf16 operator of the CPU works in fp32 scratch.
constexpr std::int64_t kStartPiece = std::int64_t{1} << 24;

}  // namespace

std::int64_t Parameter::count() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

Parameter& ParameterGroup::declare(Parameter parameter) {
  parameter.training = base_;
  return parameters_.emplace_back(std::move(parameter));
}

Parameter& ParameterGroup::declare_adapter(Parameter parameter) {
  parameter.training = Training::kYes;
  return parameters_.emplace_back(std::move(parameter));
}

ParameterGroup::Arena ParameterGroup::arena_of(const Parameter& parameter) const {
  if (parameter.training == Training::kYes) return Arena::kTrained;
  if (parameter.decay == Decay::kNo || parameter.precision == Precision::kFp32) return Arena::kVectors;
  const bool blocks = form_ == FrozenForm::kBlocks && parameter.precision == Precision::kBase;
  return blocks ? Arena::kBlocks : Arena::kFrozen;
}

void ParameterGroup::lay_out() {
  offsets_.assign(parameters_.size(), 0);
  scale_offsets_.assign(parameters_.size(), 0);
  count_ = frozen_count_ = block_count_ = scale_count_ = 0;
  const auto place = [&](std::int64_t& end, const auto& belongs) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!belongs(parameters_[i])) continue;
      offsets_[i] = end;
      end += (parameters_[i].count() + kAlignment - 1) / kAlignment * kAlignment;
    }
  };
  const auto trained = [](Decay decay) {
    return [=](const Parameter& p) { return p.training == Training::kYes && p.decay == decay; };
  };
  place(count_, trained(Decay::kYes));
  decayed_ = count_;
  place(count_, trained(Decay::kNo));
  trained_ = count_;
  const auto in = [this](Arena arena) {
    return [this, arena](const Parameter& p) { return arena_of(p) == arena; };
  };
  place(count_, in(Arena::kVectors));
  place(frozen_count_, in(Arena::kFrozen));
  place(block_count_, in(Arena::kBlocks));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (arena_of(parameters_[i]) != Arena::kBlocks) continue;
    scale_offsets_[i] = scale_count_;
    scale_count_ += parameters_[i].scale_count();
  }
}

void ParameterGroup::allocate(Memory& memory, Ops& ops, Stream stream, const Allocation& how) {
  form_ = how.frozen;
  lay_out();
  values_ = memory.zeros(1, count_, Pool::kWeights);  // the gaps too
  gradients_ = memory.zeros(1, count_, Pool::kGradient);
  if (trained_ > 0) {
    m_ = memory.zeros(1, trained_, Pool::kOptimizer);
    v_ = memory.zeros(1, trained_, Pool::kOptimizer);
  }
  if (how.compute != Dtype::kF32 && decayed_ > 0) {
    copies_ = memory.tensor(1, decayed_, Pool::kWeights, how.compute);
  }
  if (frozen_count_ > 0) frozen_ = memory.tensor(1, frozen_count_, Pool::kWeights, how.compute);
  if (block_count_ > 0) {
    block_numbers_ = memory.block(Bytes(static_cast<std::uint64_t>(block_count_)), Pool::kWeights);
    block_scales_ =
        memory.block(Bytes(static_cast<std::uint64_t>(scale_count_) * sizeof(float)), Pool::kWeights);
  }
  set_pointers(how.compute);
  fill_start(memory, ops, stream, how.seed);
}

void ParameterGroup::set_pointers(Dtype compute) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const Arena arena = arena_of(parameter);
    if (arena == Arena::kBlocks) {
      parameter.block_numbers = reinterpret_cast<std::int8_t*>(block_numbers_->address) + offsets_[i];
      parameter.block_scale = reinterpret_cast<float*>(block_scales_->address) + scale_offsets_[i];
      continue;
    }
    if (arena == Arena::kFrozen) {
      if (compute == Dtype::kF32) parameter.value = frozen_.f32() + offsets_[i];
      if (compute == Dtype::kBf16) parameter.copy = frozen_.as<Bf16>() + offsets_[i];
      continue;
    }
    parameter.value = values_.f32() + offsets_[i];
    parameter.gradient = gradients_.f32() + offsets_[i];
    if (parameter.training == Training::kNo) continue;
    parameter.m = m_.f32() + offsets_[i];
    parameter.v = v_.f32() + offsets_[i];
    if (copies_ && parameter.decay == Decay::kYes) parameter.copy = copies_.as<Bf16>() + offsets_[i];
  }
}

void ParameterGroup::fill_start(Memory& memory, Ops& ops, Stream stream, std::uint64_t seed) const {
  for (const Parameter& parameter : parameters_) {
    const CounterRandom random({.seed = seed, .stream = parameter.name});
    const std::int64_t width = parameter.in_blocks() ? parameter.width() : 1;
    const std::int64_t piece = std::max<std::int64_t>(1, kStartPiece / width) * width;
    for (std::int64_t first = 0; first < parameter.count(); first += piece) {
      RandomFill fill{.count = std::min(piece, parameter.count() - first),
                      .random = random,
                      .first = static_cast<std::uint64_t>(first),
                      .draw = parameter.init.form,
                      .a = parameter.init.a,
                      .b = parameter.init.b,
                      .y = nullptr};
      Tensor drawn;
      if (parameter.in_blocks()) drawn = memory.tensor(fill.count / width, width, Pool::kScratch);
      fill.y = drawn                        ? Out(drawn)
               : parameter.value != nullptr ? Out(parameter.value + first)
                                            : Out(parameter.copy + first);
      ops.run(stream, fill);
      if (!drawn) continue;
      ops.run(stream, QuantiseBlocks{.rows = drawn.rows,
                                     .width = width,
                                     .x = drawn,
                                     .q = parameter.block_numbers + first,
                                     .scale = parameter.block_scale + first / width * blocks_of(width)});
    }
  }
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
  upload(session, std::as_bytes(std::span(numbers)),
         reinterpret_cast<Address>(parameter.block_numbers + first));
  upload(session, scales, parameter.block_scale + first / width * blocks_of(width));
}

}  // namespace

void set_values(Session& session, const Parameter& parameter, std::int64_t first,
                std::span<const float> from) {
  if (parameter.in_blocks()) return set_blocks(session, parameter, first, from);
  if (parameter.value != nullptr) return upload(session, from, parameter.value + first);
  std::vector<Bf16> rounded(from.size());
  std::transform(from.begin(), from.end(), rounded.begin(), [](float x) { return to_bf16(x); });
  upload(session, std::as_bytes(std::span(rounded)), reinterpret_cast<Address>(parameter.copy + first));
}

void ParameterGroup::refresh_copies(Ops& ops, Stream stream) const {
  if (!copies_) return;
  ops.run(stream, Convert{.count = decayed_, .x = values_, .y = copies_});
}

void ParameterGroup::clear_gradients(Session& session) {
  require(session.device().fill(session.compute(), gradients_.block->address, 0, gradients_.bytes()));
}

void ParameterGroup::add_sum_of_squares(Ops& ops, Stream stream, float* sum) const {
  if (trained_ == 0) return;
  ops.run(stream, SumOfSquares{.count = trained_, .x = gradients_.f32(), .out = sum});
}

std::vector<ParameterGroup::Range> ParameterGroup::trained_ranges(Decay decay,
                                                                  std::optional<Part> only) const {
  const Range all = decay == Decay::kYes ? Range{0, decayed_} : Range{decayed_, trained_ - decayed_};
  if (!only) return {all};
  std::vector<Range> ranges;
  bool follows = false;  // the parameter before belongs to the last range
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    if (p.training == Training::kNo || p.decay != decay) continue;
    const std::int64_t count = (p.count() + kAlignment - 1) / kAlignment * kAlignment;
    const bool wanted = p.part == *only;
    if (wanted && follows) ranges.back().count += count;
    if (wanted && !follows) ranges.push_back({offsets_[i], count});
    follows = wanted;
  }
  return ranges;
}

void ParameterGroup::step(Ops& ops, Stream stream, AdamW update, std::optional<Part> only) {
  const auto run = [&](std::int64_t first, std::int64_t count) {
    if (count == 0) return;
    update.count = count;
    update.parameter = values_.f32() + first;
    update.gradient = gradients_.f32() + first;
    update.m = m_.f32() + first;
    update.v = v_.f32() + first;
    update.compute_copy = copies_ && first < decayed_ ? Out(copies_.as<Bf16>() + first) : Out();
    ops.run(stream, update);
  };
  for (const Range& range : trained_ranges(Decay::kYes, only)) run(range.first, range.count);
  update.weight_decay = 0;
  for (const Range& range : trained_ranges(Decay::kNo, only)) run(range.first, range.count);
}

}  // namespace terrace::trainer
