#include "examples/moe_trainer/parameters.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer {

namespace {

// Gaps between parameters hold zeros, have zero gradients, and so stay zero.
constexpr std::int64_t kAlignment = 64;  // floats

float start_value(const Init& init, const CounterRandom& random, std::uint64_t index) {
  switch (init.form) {
    case Init::Form::kNormal:
      return static_cast<float>(init.a * random.normal(index));
    case Init::Form::kUniform:
      return static_cast<float>(init.a + (init.b - init.a) * random.uniform(index));
    case Init::Form::kConstant:
      break;
  }
  return static_cast<float>(init.a);
}

}  // namespace

std::int64_t Parameter::count() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

Parameter& ParameterGroup::declare(Parameter parameter) {
  return parameters_.emplace_back(std::move(parameter));
}

void ParameterGroup::lay_out() {
  offsets_.assign(parameters_.size(), 0);
  count_ = 0;
  for (const Decay decay : {Decay::kYes, Decay::kNo}) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].decay != decay) continue;
      offsets_[i] = count_;
      count_ += (parameters_[i].count() + kAlignment - 1) / kAlignment * kAlignment;
    }
    if (decay == Decay::kYes) decayed_ = count_;
  }
}

void ParameterGroup::allocate(Session& session, Memory& memory, std::uint64_t seed) {
  lay_out();
  values_ = memory.tensor(1, count_, Pool::kWeights);
  gradients_ = memory.zeros(1, count_, Pool::kGradient);
  m_ = memory.zeros(1, count_, Pool::kOptimizer);
  v_ = memory.zeros(1, count_, Pool::kOptimizer);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.value = values_.data + offsets_[i];
    parameter.gradient = gradients_.data + offsets_[i];
    parameter.m = m_.data + offsets_[i];
    parameter.v = v_.data + offsets_[i];
  }
  upload_start(session, seed);
}

void ParameterGroup::upload_start(Session& session, std::uint64_t seed) {
  Device& device = session.device();
  const PinnedBuffer staging(device, values_.bytes());
  const std::span<float> host = staging.as<float>();
  std::fill(host.begin(), host.end(), 0.0F);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    const CounterRandom random({.seed = seed, .stream = parameter.name});
    float* out = host.data() + offsets_[i];
    for (std::int64_t j = 0; j < parameter.count(); ++j) {
      out[j] = start_value(parameter.init, random, static_cast<std::uint64_t>(j));
    }
  }
  const Status copied = device.copy(session.compute(), Direction::kH2D, values_.block->address,
                                    staging.address(), values_.bytes());
  const Status arrived = device.synchronize(session.compute());  // before the staging buffer goes
  require(copied);
  require(arrived);
}

void ParameterGroup::clear_gradients(Session& session) {
  require(session.device().fill(session.compute(), gradients_.block->address, 0, gradients_.bytes()));
}

void ParameterGroup::add_sum_of_squares(Ops& ops, Stream stream, float* sum) const {
  ops.run(stream, SumOfSquares{.count = count_, .x = gradients_.data, .out = sum});
}

void ParameterGroup::step(Ops& ops, Stream stream, AdamW update) {
  const auto run = [&](std::int64_t first, std::int64_t count) {
    if (count == 0) return;
    update.count = count;
    update.parameter = values_.data + first;
    update.gradient = gradients_.data + first;
    update.m = m_.data + first;
    update.v = v_.data + first;
    ops.run(stream, update);
  };
  run(0, decayed_);
  update.weight_decay = 0;
  run(decayed_, count_ - decayed_);
}

}  // namespace terrace::trainer
