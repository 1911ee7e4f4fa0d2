// The weights of a model: declared by the layers, allocated together.
//
// Parameters of one group (a layer, the embedding, the head) lie in one arena, and so do their gradients and
// their optimizer state: a group is cleared, clipped and stepped by a handful of launches, and is the unit
// that a later tier would move.
//
// Values, gradients and moments are fp32. Where a model computes in bf16, the matrices also have a bf16 copy,
// made again after each step: that is what products read, while the optimizer's small steps add up in fp32.
//
// Of a frozen group only what is declared as trained has a gradient of use and moments. Its other matrices
// are kept once, in the type that products read or in blocks of 8-bit numbers, and its vectors as they are.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "examples/moe_trainer/memory.hpp"
#include "examples/moe_trainer/ops/ops.hpp"
#include "examples/moe_trainer/tensor.hpp"

namespace terrace::trainer {

enum class Decay : std::uint8_t { kYes, kNo };  // matrices, and all else
enum class Training : std::uint8_t { kYes, kNo };
enum class Part : std::uint8_t { kModel, kIndexer };  // an indexer may learn while the rest stands still
enum class Precision : std::uint8_t {
  kBase,
  kCompute,
  kFp32
};  // of a frozen matrix: as the model's, that of products, full
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
  float* value = nullptr;     // on the device, shape as above; null where only the copy is kept
  float* gradient = nullptr;  // adds up over the micro-batches of a step; null: frozen
  float* m = nullptr;         // AdamW's moments; null: frozen
  float* v = nullptr;
  Bf16* copy = nullptr;  // of a matrix where the model computes in bf16
  // Of a frozen matrix in blocks, which has neither value nor copy: rows of the last dimension.
  std::int8_t* block_numbers = nullptr;
  float* block_scale = nullptr;
  // A low-rank addition to a matrix (out, in), or to each of a stack: w + up down, down (rank, in), up (out,
  // rank).
  const Parameter* down = nullptr;
  const Parameter* up = nullptr;

  [[nodiscard]] std::int64_t count() const;
  [[nodiscard]] std::int64_t width() const { return shape.back(); }
  [[nodiscard]] bool in_blocks() const { return block_numbers != nullptr; }
  [[nodiscard]] std::int64_t scale_count() const { return count() / width() * blocks_of(width()); }
  // What products read: the copy, or the value where there is none. Precondition: not in blocks.
  [[nodiscard]] In operand() const { return copy != nullptr ? In(copy) : In(value); }
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
  };
  // Reserves the arenas and sets the starting values; the copies are made by refresh_copies(). Throws
  // OutOfMemory.
  void allocate(Memory& memory, Ops& ops, Stream stream, const Allocation& how);
  // Makes the bf16 copies those of the values; nothing where there are none.
  void refresh_copies(Ops& ops, Stream stream) const;

  void clear_gradients(Session& session);
  void add_sum_of_squares(Ops& ops, Stream stream, float* sum) const;
  // Steps every parameter, or those of one part, as `update` says; its pointers, count and, where a parameter
  // has none, its decay are filled in here.
  void step(Ops& ops, Stream stream, AdamW update, std::optional<Part> only = std::nullopt);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::deque<Parameter>& parameters() { return parameters_; }
  [[nodiscard]] const std::deque<Parameter>& parameters() const { return parameters_; }

 private:
  enum class Arena : std::uint8_t { kTrained, kVectors, kFrozen, kBlocks };
  [[nodiscard]] Arena arena_of(const Parameter& parameter) const;
  struct Range {
    std::int64_t first, count;
  };
  // Where in the arenas what is trained and decays, or doesn't, lies: in one piece, unless a part is asked
  // for.
  [[nodiscard]] std::vector<Range> trained_ranges(Decay decay, std::optional<Part> only) const;
  void lay_out();
  void set_pointers(Dtype compute);
  void fill_start(Memory& memory, Ops& ops, Stream stream, std::uint64_t seed) const;

  std::string name_;
  Training base_;
  std::deque<Parameter> parameters_;
  std::vector<std::int64_t> offsets_;  // of each parameter in the arenas, in numbers
  std::int64_t decayed_ = 0;           // numbers at the front of the arenas that decay: the matrices
  std::int64_t trained_ = 0;           // those that are trained: then vectors that are not
  std::int64_t count_ = 0;
  std::int64_t frozen_count_ = 0;
  Tensor values_, gradients_, m_, v_, copies_;
  FrozenForm form_ = FrozenForm::kCompute;
  Tensor frozen_;  // matrices that are not trained
  std::int64_t block_count_ = 0, scale_count_ = 0;
  std::vector<std::int64_t> scale_offsets_;  // of each parameter in blocks
  BlockRef block_numbers_, block_scales_;    // of such matrices
};

// Numbers first .. first + from.size() of a parameter, from the host; rounded where only a copy is kept. Of
// one that has both, the copy is refresh_copies()'s to make. Precondition: of one in blocks, whole rows.
void set_values(Session& session, const Parameter& parameter, std::int64_t first,
                std::span<const float> from);

using ParameterGroups = std::vector<std::unique_ptr<ParameterGroup>>;

}  // namespace terrace::trainer
