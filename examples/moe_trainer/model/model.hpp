// The decoder-only language model: embedding, layers, final norm, cross entropy with an untied head.
//
// In bf16 the residual stream is bf16 too: the layers' saved inputs are half as large, every operator sees
// one type, and it is what public models are trained with.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "examples/moe_trainer/expert_gradients.hpp"
#include "examples/moe_trainer/expert_store.hpp"
#include "examples/moe_trainer/model/cold_plan.hpp"
#include "examples/moe_trainer/model/group_keeper.hpp"
#include "examples/moe_trainer/model/layer.hpp"
#include "examples/moe_trainer/model/patch_embedder.hpp"
#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

// A micro-batch on the device, (batch, length) each.
struct MicroBatch {
  const std::int32_t* ids = nullptr;
  const std::int32_t* labels = nullptr;  // of each token, the next one; -100: counts for nothing
  std::int64_t counted = 0;              // labels that count, in the whole step
  ImageBatch images = {};                // only where the configuration has [images]
};

// Something a model keeps between steps, on the device.
struct NamedArray {
  std::string name;
  std::vector<std::int64_t> shape;
  float* value = nullptr;                // null: see Parameter
  const Parameter* parameter = nullptr;  // null: a router's bias, which has no gradient
};

class Model {
 public:
  Model(Session& session, const Config& config);
  // Reserves and sets every weight. Throws OutOfMemory.
  void allocate(Session& session, Memory& memory, Ops& ops, std::uint64_t seed);
  // Is told of every walk from now on; null: nobody is. Outlives the walks.
  void set_keeper(GroupKeeper* keeper) { keeper_ = keeper; }
  // Null where all experts are in HBM.
  [[nodiscard]] ExpertStore* expert_store() const { return experts_.get(); }
  // On NVMe, for a pool.
  [[nodiscard]] Bytes nvme_bytes(Pool pool) const {
    return nvme_ != nullptr ? nvme_->usage().live_by_pool[static_cast<std::size_t>(pool)] : 0_B;
  }
  // Null where their gradients are in HBM.
  [[nodiscard]] const ExpertGradients* expert_gradients() const { return gradients_.get(); }
  // Makes what products read that of the fp32 values; after whatever wrote those.
  void refresh_copies(Ops& ops, Stream stream) const;

  // Forward and backward of one micro-batch: adds to the gradients (of the mean loss over the step's counted
  // labels) and to *loss_sum, the sum over them.
  void train(const Pass& pass, const MicroBatch& batch, float* loss_sum);
  // Forward alone, with attention over all tokens in sparse layers: adds to the gradients of their indexers,
  // and to no other, and to *loss_sum. Outside of the session's steps.
  void warm_up(const Pass& pass, const MicroBatch& batch, float* loss_sum);
  // Adds to *loss_sum, and changes nothing that lasts. Outside of the session's steps.
  void evaluate(const Pass& pass, const MicroBatch& batch, float* loss_sum);
  // (tokens, vocabulary); between the session's begin_step and end_step.
  [[nodiscard]] Tensor logits(const Pass& pass, const MicroBatch& batch);
  // Moves the routers' biases; once, after a step's micro-batches.
  void balance(Ops& ops, Stream stream) const;

  [[nodiscard]] const ParameterGroups& groups() const { return groups_; }
  [[nodiscard]] std::vector<NamedArray> arrays() const;
  [[nodiscard]] std::int64_t parameter_count() const;

 private:
  void check_targets() const;
  [[nodiscard]] std::vector<StateTier> expert_tiers(const Policy& policy,
                                                    const ParameterGroup::Allocation& how);
  [[nodiscard]] DdrDemand ddr_demand(const Session& session, const std::vector<StateTier>& tiers,
                                     const ParameterGroup::Allocation& how) const;
  [[nodiscard]] Bytes file_bytes(const ColdPlan& cold, const ParameterGroup::Allocation& how) const;
  [[nodiscard]] ColdPlan open_file(Session& session, const std::vector<StateTier>& tiers,
                                   const ParameterGroup::Allocation& how);
  void open_stores(Memory& memory, std::vector<ParameterGroup*> streamed);
  [[nodiscard]] ParameterGroup& of_layer(std::size_t layer) const { return *groups_[1 + layer]; }
  [[nodiscard]] MatrixRule rule_of(const ParameterGroup& group) const;
  [[nodiscard]] ParameterGroup& of_head() const { return *groups_[1 + layers_.size()]; }
  void use(ParameterGroup& group) const {
    if (keeper_ != nullptr) keeper_->before_use(group);
  }
  void done_with(ParameterGroup& group) const {
    if (keeper_ != nullptr) keeper_->after_gradients(group);
  }
  void forward_alone(const Pass& pass, const MicroBatch& batch, float* loss_sum);
  [[nodiscard]] Tensor embed(const Pass& pass, const MicroBatch& batch) const;
  [[nodiscard]] ResidualStream run_layers(const Pass& pass, const MicroBatch& batch,
                                          std::vector<Layer::Saved>& saved) const;
  [[nodiscard]] ResidualStream head(const Pass& pass, const MicroBatch& batch, ResidualStream stream,
                                    float* loss_sum) const;

  const Config& config_;
  RowMaps maps_;
  std::unique_ptr<Tier> nvme_;  // null: nothing lives there
  ParameterGroups groups_;      // the embedding, the layers, the head, images
  GroupKeeper* keeper_ = nullptr;
  const Parameter* embedding_ = nullptr;
  const Parameter* head_ = nullptr;
  std::optional<PatchEmbedder> patches_;
  Norm norm_;
  std::optional<ResidualMix> mix_;  // before the last norm
  std::vector<std::unique_ptr<Layer>> layers_;
  std::unique_ptr<ExpertStore> experts_;
  std::unique_ptr<ExpertGradients> gradients_;
};

}  // namespace terrace::trainer
