// The decoder-only language model on bytes: embedding, layers, final norm, cross entropy with an untied head.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "examples/moe_trainer/model/layer.hpp"
#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

// A micro-batch on the device, (batch, length) each.
struct MicroBatch {
  const std::int32_t* ids = nullptr;
  const std::int32_t* labels = nullptr;
};

class Model {
 public:
  Model(Session& session, const Config& config);
  // Reserves and sets every weight. Throws OutOfMemory.
  void allocate(Session& session, Memory& memory, std::uint64_t seed);

  // Forward and backward of one micro-batch: adds to the gradients (of the mean loss over the step's tokens)
  // and to *loss_sum, the sum over the tokens.
  void train(const Pass& pass, const MicroBatch& batch, float* loss_sum);
  // Moves the routers' biases; once, after a step's micro-batches.
  void balance(Ops& ops, Stream stream) const;

  [[nodiscard]] const ParameterGroups& groups() const { return groups_; }
  [[nodiscard]] const std::vector<std::unique_ptr<Layer>>& layers() const { return layers_; }
  [[nodiscard]] std::int64_t parameter_count() const;

 private:
  [[nodiscard]] Tensor embed(const Pass& pass, const MicroBatch& batch) const;
  [[nodiscard]] Tensor head(const Pass& pass, const MicroBatch& batch, Tensor x, float* loss_sum) const;

  const Config& config_;
  ParameterGroups groups_;
  const Parameter* embedding_ = nullptr;
  const Parameter* head_ = nullptr;
  Norm norm_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace terrace::trainer
