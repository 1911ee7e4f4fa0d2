// The training loop's body: batches in, losses out, everything on one session's compute stream.
//
// The host runs ahead of the stream and waits once a step, for the loss.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/moe_trainer/checkpoint.hpp"
#include "examples/moe_trainer/config.hpp"
#include "examples/moe_trainer/data.hpp"
#include "examples/moe_trainer/families/model_folder.hpp"
#include "examples/moe_trainer/image_feed.hpp"
#include "examples/moe_trainer/memory.hpp"
#include "examples/moe_trainer/model/model.hpp"
#include "examples/moe_trainer/optimizer.hpp"

namespace terrace::trainer {

class Trainer {
 public:
  struct Options {
    Config config;
    std::uint64_t seed = 1;
    const ModelFolder* model =
        nullptr;            // where the weights come from; null: from the seed. Outlives the trainer
    std::string base = {};  // a checkpoint: the frozen model under adapters; empty: that of seed or model
    const ImageSource* images = nullptr;  // in the corpus' place where the configuration has [images]; so too
  };
  // Reserves all that lasts: weights, gradients, optimizer state, buffers. Throws OutOfMemory, Failure.
  // Session and corpus outlive the trainer.
  Trainer(Session& session, const Corpus& corpus, Options options);
  ~Trainer() = default;  // waits for the compute stream
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // One step: micro-batches, optimizer, balancing. Returns the mean loss over the step's tokens, before the
  // update. After an exception the trainer is good for nothing but to be destroyed.
  [[nodiscard]] float step();

  // Writes a checkpoint beside `path`, then renames it: what was there survives any failure.
  void save(const std::string& path);
  // Continues from a checkpoint: the next losses are those of a run that was never interrupted. Throws
  // Failure (kBadInput) where it is of another shape, seed, configuration or text, or damaged.
  void resume(const std::string& path);

  // Writes the public model that is trained. Precondition: there is one. Throws Failure.
  void export_model(const std::string& path);

  // All that lasts is as the last step made it, in HBM for the compute stream and in DDR for the host, which
  // may write it until the next step.
  void settle();

  [[nodiscard]] std::int64_t steps_done() const { return steps_done_; }
  [[nodiscard]] const Config& config() const { return options_.config; }
  // Of what Options::base put under the adapters, as it was then; 0: nothing was.
  [[nodiscard]] std::uint64_t base_fingerprint() const { return base_fingerprint_; }
  [[nodiscard]] Model& model() { return *model_; }
  [[nodiscard]] const StateStream* state() const { return optimizer_->state(); }
  [[nodiscard]] Ops& ops() { return *ops_; }
  [[nodiscard]] Memory& memory() { return memory_; }

 private:
  struct StreamEnd {
    Session& session;
    ~StreamEnd() { (void)session.device().synchronize(session.compute()); }
  };
  [[nodiscard]] float take_step();
  void upload_batch();
  [[nodiscard]] MicroBatch micro_batch(std::uint32_t index) const;
  [[nodiscard]] float wait_for_loss();
  [[nodiscard]] std::uint64_t data_fingerprint() const;
  [[nodiscard]] std::vector<CheckpointTensor> checkpoint_tensors() const;

  Session& session_;
  Options options_;
  const Corpus& corpus_;
  std::optional<Sampler> sampler_;  // of text
  Memory memory_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Model> model_;
  std::optional<Optimizer> optimizer_;
  Tensor tokens_;  // int32: the ids of each micro-batch, then the labels
  Tensor loss_sum_;
  std::optional<PinnedBuffer> host_tokens_, host_loss_;
  std::optional<ImageFeed> images_;
  std::int64_t counted_ = 0;  // labels of the step that count
  std::int64_t steps_done_ = 0;
  std::uint64_t base_fingerprint_ = 0;
  // Copies in flight use the host's buffers and the homes in DDR, launches the operators' scratch. The last
  // member, so that a constructor that throws waits too.
  StreamEnd stream_end_;
};

}  // namespace terrace::trainer
