// The weights of a model: declared by the layers, allocated together.
//
// Parameters of one group (a layer, the embedding, the head) lie in one arena, and so do their gradients and
// their optimizer state: a group is cleared, clipped and stepped by a handful of launches. What products read
// of a layer's experts lies in a block of its own.
//
// Values, gradients and moments are fp32. Where a model computes in bf16, the matrices also have a bf16 copy,
// made again after each step: that is what products read, while the optimizer's small steps add up in fp32.
//
// Of a frozen group only what is declared as trained has a gradient of use and moments. Its other matrices
// are kept once, in the type that products read or in blocks of 8-bit numbers, and its vectors as they are.
//
// State may live in pinned host memory, or on NVMe where that has no room (policy: optimizer.tier,
// experts.resident, nvme): then a StateStream takes it through HBM while it is stepped, and an ExpertStore
// while experts are used.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "examples/moe_trainer/cold_ranges.hpp"
#include "examples/moe_trainer/memory.hpp"
#include "examples/moe_trainer/ops/muon.hpp"
#include "examples/moe_trainer/ops/ops.hpp"
#include "examples/moe_trainer/state_home.hpp"
#include "examples/moe_trainer/tensor.hpp"

namespace terrace::trainer {

enum class Decay : std::uint8_t { kYes, kNo };  // matrices, and all else
enum class Training : std::uint8_t { kYes, kNo };
enum class Holder : std::uint8_t { kLayer, kExperts };  // whose block what products read lies in
enum class Part : std::uint8_t { kModel, kIndexer };    // an indexer may learn while the rest stands still
enum class Precision : std::uint8_t {
  kBase,
  kCompute,
  kFp32
};  // of a frozen matrix: as the model's, that of products, full
enum class MatrixRule : std::uint8_t { kAdamW, kMuon };      // what steps a group's matrices
enum class FrozenForm : std::uint8_t { kCompute, kBlocks };  // of the kBase ones; blocks: ops/quantised.hpp

// How a parameter starts, from counters: the same on every device.
struct Init {
  Draw form = Draw::kConstant;
  double a = 0;  // the constant, the standard deviation, the least
  double b = 0;  // kUniform: the most
  [[nodiscard]] static Init constant(double value) { return {Draw::kConstant, value, 0}; }
  [[nodiscard]] static Init normal(double deviation) { return {Draw::kNormal, deviation, 0}; }
  struct Range {
    double least, most;
  };
  [[nodiscard]] static Init uniform(Range range) { return {Draw::kUniform, range.least, range.most}; }
};

struct Parameter {
  std::string name;  // "layer.3.moe.fc2"
  std::vector<std::int64_t> shape;
  Init init;
  Decay decay = Decay::kYes;
  Precision precision = Precision::kBase;
  Training training = Training::kYes;
  Part part = Part::kModel;
  Holder holder = Holder::kLayer;
  float* value = nullptr;     // on the device, shape as above; null where only the copy is kept
  float* gradient = nullptr;  // adds up over the micro-batches of a step; null: frozen
  float* m = nullptr;         // AdamW's moments, or Muon's momentum alone; null: frozen
  float* v = nullptr;
  Bf16* copy = nullptr;  // of a matrix where the model computes in bf16
  // Of a frozen matrix in blocks, which has neither value nor copy: rows of the last dimension.
  std::int8_t* block_numbers = nullptr;
  float* block_scale = nullptr;
  // Of what lives outside of HBM: the pointers above are null, those of experts outside of their use.
  struct Home {
    // Moments, and fp32 values of what products read in bf16: from that number of the group's on.
    StateHome* state = nullptr;
    std::int64_t state_at = 0;
    float* value = nullptr;
    Bf16* copy = nullptr;
    std::int8_t* block_numbers = nullptr;
    float* block_scale = nullptr;
    // Of frozen experts some of which live on NVMe: the pointers above hold `warm` matrices of the stack, and
    // the others are there, at these bytes of the block of experts on. Null: all are in DDR.
    ColdRanges* cold = nullptr;
    std::int64_t warm = 0;
    Bytes numbers_at{}, scales_at{};
  } home{};
  // A low-rank addition to a matrix (out, in), or to each of a stack: w + up down, down (rank, in), up (out,
  // rank).
  const Parameter* down = nullptr;
  const Parameter* up = nullptr;

  [[nodiscard]] std::int64_t count() const;
  [[nodiscard]] std::int64_t width() const { return shape.back(); }
  [[nodiscard]] bool trained() const { return training == Training::kYes; }
  [[nodiscard]] bool value_in_state() const {
    return home.state != nullptr && home.state->has_value(home.state_at);
  }
  [[nodiscard]] bool in_blocks() const { return block_numbers != nullptr || home.block_numbers != nullptr; }
  [[nodiscard]] std::int64_t scale_count() const { return count() / width() * blocks_of(width()); }
  // What products read: the copy, or the value where there is none. Precondition: not in blocks.
  [[nodiscard]] In operand() const { return copy != nullptr ? In(copy) : In(value); }
};

class ExpertStore;
class ExpertGradients;

// Where the optimizer's state of the trained numbers first .. first + count of a group is. Null: with the
// group, in HBM.
struct StateRun {
  std::int64_t first = 0, count = 0;
  float* value = nullptr;  // of those that have one there
  float *m = nullptr, *v = nullptr;
  Bf16* copy = nullptr;             // of experts whose block is in DDR
  const float* gradient = nullptr;  // of experts, where it is in DDR
};

class ParameterGroup {
 public:
  explicit ParameterGroup(std::string name, Training base = Training::kYes)
      : name_(std::move(name)), base_(base) {}
  // `training` of what is declared; the group's, where that is frozen, unless it is an adapter. The reference
  // stays valid; its pointers are set by allocate().
  Parameter& declare(Parameter parameter);
  Parameter& declare_adapter(Parameter parameter);
  struct Allocation {
    std::uint64_t seed = 0;
    Dtype compute = Dtype::kF32;
    FrozenForm frozen = FrozenForm::kCompute;
    StateTier state = StateTier::kHbm;    // moments, and fp32 values of what has a bf16 copy
    StateTier experts = StateTier::kHbm;  // what products read of them; in DDR trained ones need state there
    Pool expert_pool = Pool::kWeights;    // that their block counts in
    MatrixRule matrices = MatrixRule::kAdamW;  // Muon has its state in HBM
    StateTier gradients = StateTier::kHbm;     // of experts; in DDR together with the state
    Tier* cold = nullptr;                      // where is what DDR has no room for
    std::int64_t cold_experts = 0;             // so many, the last; of frozen ones in DDR only, and not all
    std::int64_t state_chunk = 0;              // of state in DDR, as StateHome::Plan has it
    std::vector<bool> cold_state = {};         // its chunks on NVMe
  };
  // Bytes of what products read of the experts, and whether they are trained.
  [[nodiscard]] Bytes expert_bytes(const Allocation& how);
  // Of state outside of HBM, and of experts' gradients there. After expert_bytes().
  [[nodiscard]] StateHome::Plan state_plan(const Allocation& how) const;
  [[nodiscard]] Bytes gradient_home_bytes(const Allocation& how) const;
  [[nodiscard]] bool trains_experts() const;
  // Reserves the arenas and sets the starting values; the copies are made by refresh_copies(). Throws
  // OutOfMemory.
  void allocate(Memory& memory, Ops& ops, Stream stream, const Allocation& how);
  // Makes the bf16 copies those of the values; nothing where there are none.
  void refresh_copies(Ops& ops, Stream stream) const;

  void clear_gradients(Session& session);
  void add_sum_of_squares(Ops& ops, Stream stream, float* sum) const;
  // Steps every parameter that AdamW steps, or those of one part, as `update` says; its pointers, count and,
  // where a parameter has none, its decay are filled in here. Precondition: the state is in HBM.
  void step(Ops& ops, Stream stream, const AdamW& update, std::optional<Part> only = std::nullopt) const;
  // Steps what Muon steps, or that of one part, as `update` says; its pointers and shape are filled in here.
  void step_matrices(Ops& ops, ScratchSource& scratch, Stream stream, Muon update,
                     std::optional<Part> only = std::nullopt) const;
  // As step(), those numbers whose state the run holds.
  void step_run(Ops& ops, Stream stream, AdamW update, std::optional<Part> only, const StateRun& run) const;

  // Numbers whose state lives outside of HBM, all of the group's or none, and where.
  [[nodiscard]] std::int64_t streamed_count() const { return state_home_ != nullptr ? trained_ : 0; }
  [[nodiscard]] const StateHome* state_home() const { return state_home_.get(); }
  // Where in DDR is what goes along: copies or values of experts whose block is there, and gradients.
  [[nodiscard]] StateRun home(std::int64_t first, std::int64_t count) const;
  struct StateExtent {  // numbers at the front of a run that have a value there, a copy, a gradient
    std::int64_t values = 0, copies = 0, gradients = 0;
  };
  [[nodiscard]] StateExtent extent(const StateRun& run) const;

  // Whether the experts' block lives outside of HBM.
  [[nodiscard]] bool experts_stream() const { return expert_home_ != nullptr; }
  [[nodiscard]] Bytes expert_block_bytes() const { return expert_layout().end; }
  [[nodiscard]] std::size_t expert_count() const;
  [[nodiscard]] std::int64_t bytes_of_expert_number() const { return bytes_of(compute_); }  // not in blocks
  // What products read of one of the experts' matrices: numbers, and scales of those in blocks.
  struct ExpertArray {
    std::size_t parameter;
    Bytes at;           // in the block
    std::int64_t each;  // bytes of a number
    std::int64_t count;
    bool scales;
  };
  // Where each expert's numbers lie in the block and live, in order; an expert is a part. Those on NVMe have
  // no home.
  [[nodiscard]] std::vector<SlotRing::PartRange> expert_ranges() const;
  [[nodiscard]] const ColdRanges* cold_experts() const { return cold_experts_.get(); }  // null: none
  // Puts the experts' pointers into a block that holds their bytes; null: they are where they live.
  void place_experts(std::byte* block);
  ExpertStore* expert_store = nullptr;  // set by the store that serves this group

  // Null where gradients of experts are in HBM, or there are none.
  [[nodiscard]] const Block* expert_gradient_home() const { return expert_gradient_home_.get(); }
  void place_expert_gradients(float* gradients);  // null: they are where they live
  ExpertGradients* expert_gradients = nullptr;    // as expert_store

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::deque<Parameter>& parameters() { return parameters_; }
  [[nodiscard]] const std::deque<Parameter>& parameters() const { return parameters_; }

 private:
  enum class Arena : std::uint8_t { kTrained, kVectors, kFrozen, kBlocks, kExpertFrozen, kExpertBlocks };
  [[nodiscard]] Arena arena_of(const Parameter& parameter) const;
  struct Range {
    std::int64_t first, count;
  };
  // Where in the arenas what is trained and decays, or doesn't, lies: in one piece, unless a part is asked
  // for.
  [[nodiscard]] std::vector<Range> trained_ranges(Decay decay, std::optional<Part> only) const;
  [[nodiscard]] static bool is_product_matrix(const Parameter& parameter);
  [[nodiscard]] bool has_copy(const Parameter& parameter) const;
  void lay_out(const Allocation& how);
  void reserve(const Allocation& how);
  void reserve_state(const Allocation& how);
  void set_pointers();
  void set_home_pointers(Parameter& parameter, std::int64_t offset) const;
  [[nodiscard]] std::vector<ExpertArray> expert_arrays() const;  // in order of the block
  void reserve_experts(const Allocation& how);
  void set_expert_homes();
  void fill_start(Ops& ops, Stream stream, std::uint64_t seed) const;
  void fill_piece(Ops& ops, Stream stream, const Parameter& parameter, RandomFill fill) const;
  void refresh_range(Ops& ops, Stream stream, std::int64_t first, std::int64_t count) const;
  struct ExpertLayout {
    Bytes frozen, blocks, scales, end;
  };
  [[nodiscard]] ExpertLayout expert_layout() const;
  [[nodiscard]] Out copy_at(std::int64_t number, const StateRun& run) const;
  [[nodiscard]] float* value_at(std::int64_t number, const StateRun& run) const;
  [[nodiscard]] const float* gradient_at(std::int64_t number, const StateRun& run) const;

  std::string name_;
  Training base_;
  std::deque<Parameter> parameters_;
  std::vector<std::int64_t> offsets_;  // of each parameter in the arenas, in numbers
  // Numbers at the front of the arenas: of trained experts; with those of all that products read by a bf16
  // copy; of all that decays, the matrices.
  std::int64_t experts_ = 0, copied_ = 0, decayed_ = 0;
  std::int64_t by_muon_ = 0;  // at the front as well; the second moments are without them
  std::int64_t trained_ = 0;  // those that are trained: then vectors that are not
  std::int64_t count_ = 0;
  std::int64_t frozen_count_ = 0;
  Memory* memory_ = nullptr;
  Dtype compute_ = Dtype::kF32;
  // The values without the first `values_from_` numbers, the copies without the first `experts_`.
  std::int64_t values_from_ = 0;
  Tensor values_, gradients_, m_, v_, copies_;
  std::unique_ptr<StateHome> state_home_;  // values of the first values_from_ numbers, moments of all trained
  std::int64_t gradients_from_ = 0;        // gradients_ without so many, which are in DDR
  float* placed_gradients_ = nullptr;      // where those are in HBM, while they are
  BlockRef expert_gradient_home_;
  FrozenForm form_ = FrozenForm::kCompute;
  Tensor frozen_;  // matrices that are not trained
  std::int64_t block_count_ = 0, scale_count_ = 0;
  std::vector<std::int64_t> scale_offsets_;  // of each parameter in blocks
  BlockRef block_numbers_, block_scales_;    // of such matrices
  // What products read of experts, in HBM or in DDR: of trained ones, then of frozen ones, then the scales.
  std::int64_t expert_frozen_count_ = 0, expert_block_count_ = 0, expert_scale_count_ = 0;
  BlockRef expert_block_, expert_home_;
  std::int64_t warm_experts_ = 0;      // in expert_home_, where that is
  std::vector<Bytes> expert_home_at_;  // of expert_arrays() in expert_home_
  std::unique_ptr<ColdRanges> cold_experts_;
};

// Numbers first .. first + from.size() of a parameter, from the host; rounded where only a copy is kept. Of
// one that has both, the copy is refresh_copies()'s to make. Precondition: of one in blocks, whole rows.
void set_values(Session& session, const Parameter& parameter, std::int64_t first,
                std::span<const float> from);

// All numbers of a parameter that lives outside of HBM, in the type that it is kept in, and the scales of one
// in blocks. The compute stream is idle.
[[nodiscard]] std::vector<std::byte> home_numbers(const Parameter& parameter);
[[nodiscard]] std::vector<std::byte> home_scales(const Parameter& parameter);

using ParameterGroups = std::vector<std::unique_ptr<ParameterGroup>>;

}  // namespace terrace::trainer
