// The weights of a model: declared by the layers, allocated together.
//
// Parameters of one group (a layer, the embedding, the head) lie in one arena, and so do their gradients and
// their optimizer state: a group is cleared, clipped and stepped by a handful of launches, and is the unit
// that a later tier would move.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "examples/moe_trainer/memory.hpp"
#include "examples/moe_trainer/ops/ops.hpp"
#include "examples/moe_trainer/tensor.hpp"

namespace terrace::trainer {

enum class Decay : std::uint8_t { kYes, kNo };  // matrices, and all else

// How a parameter starts, from counters: the same on every device.
struct Init {
  enum class Form : std::uint8_t { kConstant, kNormal, kUniform };
  Form form = Form::kConstant;
  double a = 0;  // the constant, the standard deviation, the least
  double b = 0;  // kUniform: the most
  [[nodiscard]] static Init constant(double value) { return {Form::kConstant, value, 0}; }
  [[nodiscard]] static Init normal(double deviation) { return {Form::kNormal, deviation, 0}; }
  struct Range {
    double least, most;
  };
  [[nodiscard]] static Init uniform(Range range) { return {Form::kUniform, range.least, range.most}; }
};

struct Parameter {
  std::string name;  // "layer.3.moe.fc2"
  std::vector<std::int64_t> shape;
  Init init;
  Decay decay = Decay::kYes;
  float* value = nullptr;     // on the device, shape as above
  float* gradient = nullptr;  // adds up over the micro-batches of a step
  float* m = nullptr;         // AdamW's moments
  float* v = nullptr;

  [[nodiscard]] std::int64_t count() const;
};

class ParameterGroup {
 public:
  explicit ParameterGroup(std::string name) : name_(std::move(name)) {}
  // The reference stays valid; its pointers are set by allocate().
  Parameter& declare(Parameter parameter);
  // Reserves the arenas and sets the starting values. Throws OutOfMemory.
  void allocate(Session& session, Memory& memory, std::uint64_t seed);

  void clear_gradients(Session& session);
  void add_sum_of_squares(Ops& ops, Stream stream, float* sum) const;
  // Steps every parameter as `update` says; its pointers, count and, where a parameter has none, its decay
  // are filled in here.
  void step(Ops& ops, Stream stream, AdamW update);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::deque<Parameter>& parameters() { return parameters_; }
  [[nodiscard]] const std::deque<Parameter>& parameters() const { return parameters_; }

 private:
  void lay_out();
  void upload_start(Session& session, std::uint64_t seed);

  std::string name_;
  std::deque<Parameter> parameters_;
  std::vector<std::int64_t> offsets_;  // of each parameter in the arenas, in floats
  std::int64_t decayed_ = 0;           // floats at the front of the arenas that decay
  std::int64_t count_ = 0;
  Tensor values_, gradients_, m_, v_;
};

using ParameterGroups = std::vector<std::unique_ptr<ParameterGroup>>;

}  // namespace terrace::trainer
