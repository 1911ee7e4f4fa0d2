#include "examples/moe_trainer/parameters.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <utility>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {

// Gaps between parameters hold zeros, have zero gradients, and so stay zero.
constexpr std::int64_t kAlignment = 64;  // floats

// Of the pieces of an expert block.
constexpr Bytes kPieceAlignment = 256_B;

Bytes bytes_of_numbers(std::int64_t count, std::int64_t each) {
  return Bytes(static_cast<std::uint64_t>(count * each));
}

std::int64_t rounded_count(const Parameter& p) {
  return (p.count() + kAlignment - 1) / kAlignment * kAlignment;
}

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
  if (parameter.trained()) return Arena::kTrained;
  if (parameter.decay == Decay::kNo || parameter.precision == Precision::kFp32) return Arena::kVectors;
  const bool blocks = form_ == FrozenForm::kBlocks && parameter.precision == Precision::kBase;
  if (parameter.holder == Holder::kExperts) return blocks ? Arena::kExpertBlocks : Arena::kExpertFrozen;
  return blocks ? Arena::kBlocks : Arena::kFrozen;
}

// Routers are matrices too, but in full precision.
bool ParameterGroup::is_product_matrix(const Parameter& parameter) {
  return parameter.decay == Decay::kYes && parameter.precision != Precision::kFp32;
}

// Whether products read a bf16 copy of it, and nobody its fp32 values.
bool ParameterGroup::has_copy(const Parameter& parameter) const {
  return compute_ != Dtype::kF32 && is_product_matrix(parameter);
}

// The same order whatever lives where: sums over the arenas then have the same bits.
void ParameterGroup::lay_out(const Allocation& how) {
  form_ = how.frozen;
  compute_ = how.compute;
  offsets_.assign(parameters_.size(), 0);
  scale_offsets_.assign(parameters_.size(), 0);
  count_ = frozen_count_ = block_count_ = scale_count_ = 0;
  expert_frozen_count_ = expert_block_count_ = expert_scale_count_ = 0;
  const auto place = [&](std::int64_t& end, const auto& belongs) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!belongs(parameters_[i])) continue;
      offsets_[i] = end;
      end += rounded_count(parameters_[i]);
    }
  };
  const auto of_experts = [](const Parameter& p) { return p.holder == Holder::kExperts; };
  const auto other = [&](const Parameter& p) { return p.trained() && !of_experts(p); };
  place(count_, [&](const Parameter& p) { return p.trained() && of_experts(p); });
  experts_ = count_;
  place(count_, [&](const Parameter& p) { return other(p) && is_product_matrix(p); });
  copied_ = compute_ != Dtype::kF32 ? count_ : experts_;
  by_muon_ = how.matrices == MatrixRule::kMuon ? count_ : 0;
  place(count_,
        [&](const Parameter& p) { return other(p) && !is_product_matrix(p) && p.decay == Decay::kYes; });
  decayed_ = count_;
  place(count_, [&](const Parameter& p) { return other(p) && p.decay == Decay::kNo; });
  trained_ = count_;
  const auto in = [this](Arena arena) {
    return [this, arena](const Parameter& p) { return arena_of(p) == arena; };
  };
  place(count_, in(Arena::kVectors));
  place(frozen_count_, in(Arena::kFrozen));
  place(block_count_, in(Arena::kBlocks));
  place(expert_frozen_count_, in(Arena::kExpertFrozen));
  place(expert_block_count_, in(Arena::kExpertBlocks));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Arena arena = arena_of(parameters_[i]);
    if (arena != Arena::kBlocks && arena != Arena::kExpertBlocks) continue;
    std::int64_t& end = arena == Arena::kBlocks ? scale_count_ : expert_scale_count_;
    scale_offsets_[i] = end;
    end += parameters_[i].scale_count();
  }
}

ParameterGroup::ExpertLayout ParameterGroup::expert_layout() const {
  const std::int64_t each = bytes_of(compute_);
  ExpertLayout at{.frozen = bytes_of_numbers(experts_, each), .blocks = {}, .scales = {}, .end = {}};
  at.blocks = round_up(at.frozen + bytes_of_numbers(expert_frozen_count_, each), kPieceAlignment);
  at.scales = round_up(at.blocks + bytes_of_numbers(expert_block_count_, 1), kPieceAlignment);
  at.end = at.scales + bytes_of_numbers(expert_scale_count_, sizeof(float));
  return at;
}

Bytes ParameterGroup::expert_bytes(const Allocation& how) {
  lay_out(how);
  return expert_layout().end;
}

bool ParameterGroup::trains_experts() const { return experts_ > 0; }

void ParameterGroup::allocate(Memory& memory, Ops& ops, Stream stream, const Allocation& how) {
  memory_ = &memory;
  lay_out(how);
  reserve(how);
  set_pointers();
  fill_start(ops, stream, how.seed);
}

void ParameterGroup::reserve(const Allocation& how) {
  Memory& memory = *memory_;
  const bool narrow = how.compute != Dtype::kF32;
  values_from_ = !narrow ? experts_ : how.state == StateTier::kDdr ? copied_ : 0;
  values_ = memory.zeros(1, count_ - values_from_, Pool::kWeights);  // the gaps too
  gradients_ = memory.zeros(1, count_, Pool::kGradient);
  if (trained_ > 0) reserve_state(how);
  if (narrow && decayed_ > experts_) {
    copies_ = memory.tensor(1, decayed_ - experts_, Pool::kWeights, how.compute);
  }
  if (frozen_count_ > 0) frozen_ = memory.tensor(1, frozen_count_, Pool::kWeights, how.compute);
  if (block_count_ > 0) {
    block_numbers_ = memory.block(bytes_of_numbers(block_count_, 1), Pool::kWeights);
    block_scales_ = memory.block(bytes_of_numbers(scale_count_, sizeof(float)), Pool::kWeights);
  }
  const Bytes experts = expert_layout().end;
  if (experts == 0_B) return;
  if (how.experts == StateTier::kDdr) {
    expert_home_ = memory.host_block(experts, Pool::kExpert);
    std::memset(expert_home_->address, 0, experts.count());
  } else {
    expert_block_ = memory.block(experts, how.expert_pool);
    Session& session = memory.session();
    require(session.device().fill(session.compute(), expert_block_->address, 0, experts));
  }
}

void ParameterGroup::reserve_state(const Allocation& how) {
  if (how.state == StateTier::kHbm) {
    m_ = memory_->zeros(1, trained_, Pool::kOptimizer);
    if (trained_ > by_muon_) v_ = memory_->zeros(1, trained_ - by_muon_, Pool::kOptimizer);
    return;
  }
  const auto zeros = [this](std::int64_t numbers) {
    BlockRef block = memory_->host_block(bytes_of_numbers(numbers, sizeof(float)), Pool::kOptimizer);
    std::memset(block->address, 0, block->size.count());
    return block;
  };
  m_home_ = zeros(trained_);
  v_home_ = zeros(trained_);
  if (how.compute != Dtype::kF32 && copied_ > 0) value_home_ = zeros(copied_);
}

void ParameterGroup::set_pointers() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const std::int64_t offset = offsets_[i];
    const Arena arena = arena_of(parameter);
    if (parameter.holder == Holder::kExperts && arena != Arena::kVectors) {
      place_expert(i, expert_block_ != nullptr ? expert_block_->address : nullptr);
    }
    if (arena == Arena::kBlocks) {
      parameter.block_numbers = reinterpret_cast<std::int8_t*>(block_numbers_->address) + offset;
      parameter.block_scale = reinterpret_cast<float*>(block_scales_->address) + scale_offsets_[i];
    } else if (arena == Arena::kFrozen) {
      if (compute_ == Dtype::kF32) parameter.value = frozen_.f32() + offset;
      if (compute_ == Dtype::kBf16) parameter.copy = frozen_.as<Bf16>() + offset;
    } else if (arena == Arena::kTrained || arena == Arena::kVectors) {
      if (offset >= values_from_) parameter.value = values_.f32() + offset - values_from_;
      parameter.gradient = gradients_.f32() + offset;
      if (!parameter.trained()) continue;
      if (m_) parameter.m = m_.f32() + offset;
      if (v_ && offset >= by_muon_) parameter.v = v_.f32() + offset - by_muon_;
      if (copies_ && offset >= experts_ && parameter.decay == Decay::kYes) {
        parameter.copy = copies_.as<Bf16>() + offset - experts_;
      }
      set_home_pointers(parameter, offset);
    }
  }
}

void ParameterGroup::set_home_pointers(Parameter& parameter, std::int64_t offset) const {
  if (m_home_ == nullptr) return;
  const StateRun at = home(offset, 0);
  const StateExtent there = extent({.first = offset, .count = parameter.count()});
  parameter.home.m = at.m;
  parameter.home.v = at.v;
  if (there.values > 0) parameter.home.value = at.value;
  if (there.copies > 0) parameter.home.copy = at.copy;
}

// Of one that products read from the experts' block: from `block`, or from where it lives for null.
void ParameterGroup::place_expert(std::size_t index, std::byte* block) {
  Parameter& p = parameters_[index];
  const ExpertLayout layout = expert_layout();
  const bool blocks = arena_of(p) == Arena::kExpertBlocks;
  const auto put = [&](std::byte* base, float*& value, Bf16*& copy, std::int8_t*& numbers, float*& scale) {
    if (blocks) {
      numbers = base == nullptr
                    ? nullptr
                    : reinterpret_cast<std::int8_t*>(base + layout.blocks.count()) + offsets_[index];
      scale = base == nullptr
                  ? nullptr
                  : reinterpret_cast<float*>(base + layout.scales.count()) + scale_offsets_[index];
      return;
    }
    std::byte* const at = base == nullptr ? nullptr
                                          : base + (p.trained() ? 0_B : layout.frozen).count() +
                                                offsets_[index] * bytes_of(compute_);
    if (compute_ == Dtype::kF32) value = reinterpret_cast<float*>(at);
    if (compute_ == Dtype::kBf16) copy = reinterpret_cast<Bf16*>(at);
  };
  put(block, p.value, p.copy, p.block_numbers, p.block_scale);
  if (expert_home_ == nullptr || p.trained()) return;  // a trained one's is the state's affair
  put(expert_home_->address, p.home.value, p.home.copy, p.home.block_numbers, p.home.block_scale);
}

void ParameterGroup::place_experts(std::byte* block) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].holder == Holder::kExperts) place_expert(i, block);
  }
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
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    if (!p.trained() || p.decay != decay || p.part != *only) continue;
    ranges.push_back({offsets_[i], rounded_count(p)});
  }
  return ranges;
}

StateRun ParameterGroup::home(std::int64_t first, std::int64_t count) const {
  const auto floats = [first](const BlockRef& block) {
    return block != nullptr ? reinterpret_cast<float*>(block->address) + first : nullptr;
  };
  StateRun run{.first = first,
               .count = count,
               .value = floats(value_home_),
               .m = floats(m_home_),
               .v = floats(v_home_)};
  if (expert_home_ == nullptr) return run;
  if (compute_ == Dtype::kF32) run.value = floats(expert_home_);
  if (compute_ == Dtype::kBf16) run.copy = reinterpret_cast<Bf16*>(expert_home_->address) + first;
  return run;
}

ParameterGroup::StateExtent ParameterGroup::extent(const StateRun& run) const {
  const auto before = [&run](std::int64_t end) {
    return std::clamp<std::int64_t>(end - run.first, 0, run.count);
  };
  if (compute_ == Dtype::kF32) return {.values = expert_home_ != nullptr ? before(experts_) : 0};
  return {.values = value_home_ != nullptr ? before(copied_) : 0,
          .copies = expert_home_ != nullptr ? before(experts_) : 0};
}

float* ParameterGroup::value_at(std::int64_t number, const StateRun& run) const {
  if (number >= values_from_) return values_.f32() + number - values_from_;
  if (compute_ == Dtype::kF32 && expert_block_ != nullptr) {
    return reinterpret_cast<float*>(expert_block_->address) + number;
  }
  return run.value + number - run.first;
}

Out ParameterGroup::copy_at(std::int64_t number, const StateRun& run) const {
  if (compute_ == Dtype::kF32 || number >= decayed_) return {};
  if (number >= experts_) return copies_.as<Bf16>() + number - experts_;
  if (expert_block_ != nullptr) return reinterpret_cast<Bf16*>(expert_block_->address) + number;
  return run.copy + number - run.first;
}

void ParameterGroup::step(Ops& ops, Stream stream, const AdamW& update, std::optional<Part> only) const {
  if (trained_ == by_muon_) return;
  step_run(ops, stream, update, only,
           {.first = by_muon_, .count = trained_ - by_muon_, .m = m_.f32() + by_muon_, .v = v_.f32()});
}

void ParameterGroup::step_matrices(Ops& ops, ScratchSource& scratch, Stream stream, Muon update,
                                   std::optional<Part> only) const {
  const StateRun here{.first = 0, .count = by_muon_};
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    if (!p.trained() || offsets_[i] >= by_muon_ || (only && p.part != *only)) continue;
    update.columns = p.width();
    update.rows = p.shape[p.shape.size() - 2];
    update.matrices = p.count() / (update.rows * update.columns);
    update.parameter = value_at(offsets_[i], here);
    update.gradient = p.gradient;
    update.momentum = p.m;
    update.compute_copy = copy_at(offsets_[i], here);
    muon_step(ops, scratch, stream, update);
  }
}

void ParameterGroup::step_run(Ops& ops, Stream stream, AdamW update, std::optional<Part> only,
                              const StateRun& run) const {
  const auto step_range = [&](std::int64_t first, std::int64_t end) {
    update.count = end - first;
    update.parameter = value_at(first, run);
    update.gradient = gradients_.f32() + first;
    update.m = run.m + first - run.first;
    update.v = run.v + first - run.first;
    update.compute_copy = copy_at(first, run);
    ops.run(stream, update);
  };
  // What lies together on either side of these borders does not lie together.
  const std::array<std::int64_t, 3> borders = {experts_, values_from_, decayed_};
  const auto step_ranges = [&](Decay decay) {
    for (const Range& range : trained_ranges(decay, only)) {
      std::int64_t first = std::max(range.first, run.first);
      const std::int64_t end = std::min(range.first + range.count, run.first + run.count);
      while (first < end) {
        std::int64_t next = end;
        for (const std::int64_t border : borders) {
          if (first < border) next = std::min(next, border);
        }
        step_range(first, next);
        first = next;
      }
    }
  };
  step_ranges(Decay::kYes);
  update.weight_decay = 0;
  step_ranges(Decay::kNo);
}

}  // namespace terrace::trainer
