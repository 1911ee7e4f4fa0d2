#include "examples/moe_trainer/parameters.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <utility>

#include "examples/moe_trainer/expert_gradients.hpp"
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

std::size_t ParameterGroup::expert_count() const {
  for (const Parameter& p : parameters_) {
    if (p.holder == Holder::kExperts) return static_cast<std::size_t>(p.shape.front());
  }
  return 0;
}

std::vector<ParameterGroup::ExpertArray> ParameterGroup::expert_arrays() const {
  const ExpertLayout layout = expert_layout();
  std::vector<ExpertArray> arrays;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    if (p.holder != Holder::kExperts) continue;
    if (arena_of(p) == Arena::kExpertBlocks) {
      const Bytes scales = layout.scales + bytes_of_numbers(scale_offsets_[i], sizeof(float));
      arrays.push_back({i, layout.blocks + bytes_of_numbers(offsets_[i], 1), 1, p.count(), false});
      arrays.push_back({i, scales, sizeof(float), p.scale_count(), true});
    } else {
      const std::int64_t each = bytes_of(compute_);
      const Bytes base = p.trained() ? 0_B : layout.frozen;
      arrays.push_back({i, base + bytes_of_numbers(offsets_[i], each), each, p.count(), false});
    }
  }
  std::sort(arrays.begin(), arrays.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  return arrays;
}

std::vector<SlotRing::PartRange> ParameterGroup::expert_ranges() const {
  const auto experts = static_cast<std::int64_t>(expert_count());
  const std::vector<ExpertArray> arrays = expert_arrays();
  std::vector<SlotRing::PartRange> ranges;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const Bytes size = bytes_of_numbers(arrays[i].count / experts, arrays[i].each);
    for (std::uint32_t part = 0; part < static_cast<std::uint32_t>(experts); ++part) {
      const bool warm = expert_home_ != nullptr && part < static_cast<std::uint32_t>(warm_experts_);
      const Address home =
          warm ? expert_home_->address + (expert_home_at_[i] + size * part).count() : nullptr;
      ranges.push_back({part, arrays[i].at + size * part, size, home});
    }
  }
  return ranges;
}

Bytes ParameterGroup::expert_bytes(const Allocation& how) {
  lay_out(how);
  return expert_layout().end;
}

bool ParameterGroup::trains_experts() const { return experts_ > 0; }

StateHome::Plan ParameterGroup::state_plan(const Allocation& how) const {
  if (how.state != StateTier::kDdr) return {};
  return {.numbers = trained_,
          .values = how.compute != Dtype::kF32 ? copied_ : 0,
          .chunk = how.state_chunk,
          .cold = how.cold_state,
          .tier = how.cold};
}

Bytes ParameterGroup::gradient_home_bytes(const Allocation& how) const {
  return how.gradients == StateTier::kDdr ? bytes_of_numbers(experts_, sizeof(float)) : 0_B;
}

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
  gradients_from_ = how.gradients == StateTier::kDdr ? experts_ : 0;
  gradients_ = memory.zeros(1, count_ - gradients_from_, Pool::kGradient);
  if (gradients_from_ > 0) {
    expert_gradient_home_ =
        memory.host_block(bytes_of_numbers(gradients_from_, sizeof(float)), Pool::kGradient);
  }
  if (trained_ > 0) reserve_state(how);
  if (narrow && decayed_ > experts_) {
    copies_ = memory.tensor(1, decayed_ - experts_, Pool::kWeights, how.compute);
  }
  if (frozen_count_ > 0) frozen_ = memory.tensor(1, frozen_count_, Pool::kWeights, how.compute);
  if (block_count_ > 0) {
    block_numbers_ = memory.block(bytes_of_numbers(block_count_, 1), Pool::kWeights);
    block_scales_ = memory.block(bytes_of_numbers(scale_count_, sizeof(float)), Pool::kWeights);
  }
  if (expert_layout().end > 0_B) reserve_experts(how);
}

// In DDR the block lies as in HBM where all of it is there; else what is there of each matrix.
void ParameterGroup::reserve_experts(const Allocation& how) {
  Bytes size = expert_layout().end;
  Session& session = memory_->session();
  if (how.experts == StateTier::kHbm) {
    expert_block_ = memory_->block(size, how.expert_pool);
    require(session.device().fill(session.compute(), expert_block_->address, 0, size));
    return;
  }
  const auto experts = static_cast<std::int64_t>(expert_count());
  warm_experts_ = experts - how.cold_experts;
  Bytes end;
  for (const ExpertArray& array : expert_arrays()) {
    const Bytes at = round_up(end, kPieceAlignment);
    expert_home_at_.push_back(how.cold_experts == 0 ? array.at : at);
    end = at + bytes_of_numbers(array.count / experts * warm_experts_, array.each);
  }
  if (how.cold_experts > 0) size = end;
  expert_home_ = memory_->host_block(size, Pool::kExpert);
  std::memset(expert_home_->address, 0, size.count());
  if (how.cold_experts == 0) return;
  std::vector<SlotRing::PartRange> cold = expert_ranges();
  std::erase_if(cold, [](const SlotRing::PartRange& range) { return range.home != nullptr; });
  cold_experts_ = std::make_unique<ColdRanges>(*memory_, *how.cold, Pool::kExpert, std::move(cold));
}

void ParameterGroup::reserve_state(const Allocation& how) {
  if (how.state == StateTier::kHbm) {
    m_ = memory_->zeros(1, trained_, Pool::kOptimizer);
    if (trained_ > by_muon_) v_ = memory_->zeros(1, trained_ - by_muon_, Pool::kOptimizer);
    return;
  }
  state_home_ = std::make_unique<StateHome>(*memory_, state_plan(how));
}

void ParameterGroup::set_pointers() {
  set_expert_homes();
  place_experts(expert_block_ != nullptr ? expert_block_->address : nullptr);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const std::int64_t offset = offsets_[i];
    const Arena arena = arena_of(parameter);
    if (arena == Arena::kBlocks) {
      parameter.block_numbers = reinterpret_cast<std::int8_t*>(block_numbers_->address) + offset;
      parameter.block_scale = reinterpret_cast<float*>(block_scales_->address) + scale_offsets_[i];
    } else if (arena == Arena::kFrozen) {
      if (compute_ == Dtype::kF32) parameter.value = frozen_.f32() + offset;
      if (compute_ == Dtype::kBf16) parameter.copy = frozen_.as<Bf16>() + offset;
    } else if (arena == Arena::kTrained || arena == Arena::kVectors) {
      if (offset >= values_from_) parameter.value = values_.f32() + offset - values_from_;
      if (offset >= gradients_from_) parameter.gradient = gradients_.f32() + offset - gradients_from_;
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
  if (state_home_ == nullptr) return;
  parameter.home.state = state_home_.get();
  parameter.home.state_at = offset;
  if (expert_home_ == nullptr || offset >= experts_) return;
  const StateRun at = home(offset, 0);
  parameter.home.value = at.value;
  parameter.home.copy = at.copy;
}

namespace {

// Of a parameter, or of its home, what an array of the experts' block is.
template <typename Pointers>
void point(Pointers& to, const ParameterGroup::ExpertArray& array, std::byte* at) {
  if (array.scales) {
    to.block_scale = reinterpret_cast<float*>(at);
  } else if (array.each == 1) {
    to.block_numbers = reinterpret_cast<std::int8_t*>(at);
  } else if (array.each == sizeof(Bf16)) {
    to.copy = reinterpret_cast<Bf16*>(at);
  } else {
    to.value = reinterpret_cast<float*>(at);
  }
}

}  // namespace

void ParameterGroup::place_experts(std::byte* block) {
  for (const ExpertArray& array : expert_arrays()) {
    point(parameters_[array.parameter], array, block == nullptr ? nullptr : block + array.at.count());
  }
}

// Where frozen experts live outside of HBM; a trained one's home is the state's affair.
void ParameterGroup::set_expert_homes() {
  if (expert_home_ == nullptr) return;
  const std::vector<ExpertArray> arrays = expert_arrays();
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    Parameter& p = parameters_[arrays[i].parameter];
    if (p.trained()) continue;
    p.home.cold = cold_experts_.get();
    p.home.warm = warm_experts_;
    (arrays[i].scales ? p.home.scales_at : p.home.numbers_at) = arrays[i].at;
    point(p.home, arrays[i], expert_home_->address + expert_home_at_[i].count());
  }
}

void ParameterGroup::clear_gradients(Session& session) {
  require(session.device().fill(session.compute(), gradients_.block->address, 0, gradients_.bytes()));
  if (expert_gradients != nullptr) expert_gradients->clear(*this);
}

void ParameterGroup::place_expert_gradients(float* gradients) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (p.holder != Holder::kExperts || !p.trained()) continue;
    p.gradient = gradients == nullptr ? nullptr : gradients + offsets_[i];
  }
  placed_gradients_ = gradients;
}

void ParameterGroup::add_sum_of_squares(Ops& ops, Stream stream, float* sum) const {
  if (trained_ == 0) return;
  // Of experts and of the rest by itself: the same sums wherever gradients live.
  const bool zeros = expert_gradients != nullptr && expert_gradients->are_zeros(*this);
  if (experts_ > 0 && !zeros) {
    const ExpertGradientUse use(*this, ExpertGradients::For::kReading);
    const float* const first = gradients_from_ > 0 ? placed_gradients_ : gradients_.f32();
    ops.run(stream, SumOfSquares{.count = experts_, .x = first, .out = sum});
  }
  if (trained_ == experts_) return;
  ops.run(stream,
          SumOfSquares{
              .count = trained_ - experts_, .x = gradients_.f32() + experts_ - gradients_from_, .out = sum});
}

const float* ParameterGroup::gradient_at(std::int64_t number, const StateRun& run) const {
  if (number >= gradients_from_) return gradients_.f32() + number - gradients_from_;
  return run.gradient + number - run.first;
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
  StateRun run{.first = first, .count = count, .gradient = floats(expert_gradient_home_)};
  if (expert_home_ == nullptr) return run;
  if (compute_ == Dtype::kF32) run.value = floats(expert_home_);
  if (compute_ == Dtype::kBf16) run.copy = reinterpret_cast<Bf16*>(expert_home_->address) + first;
  return run;
}

ParameterGroup::StateExtent ParameterGroup::extent(const StateRun& run) const {
  const auto before = [&run](std::int64_t end) {
    return std::clamp<std::int64_t>(end - run.first, 0, run.count);
  };
  StateExtent extent{.gradients = before(gradients_from_)};
  const std::int64_t experts = expert_home_ != nullptr ? before(experts_) : 0;
  if (compute_ == Dtype::kF32) {
    extent.values = experts;
  } else {
    extent.values = state_home_ != nullptr ? before(copied_) : 0;
    extent.copies = experts;
  }
  return extent;
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
    update.gradient = gradient_at(first, run);
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
