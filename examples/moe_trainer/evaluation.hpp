// The loss on text that is not trained on.
//
// Forward alone, outside of the session's steps, and of each layer only what its next one reads: it needs
// less memory than a step, and changes no bit of what is trained.
#pragma once

#include <cstdint>
#include <optional>

#include "examples/moe_trainer/config.hpp"
#include "examples/moe_trainer/data.hpp"
#include "examples/moe_trainer/memory.hpp"
#include "examples/moe_trainer/model/model.hpp"

namespace terrace::trainer {

inline constexpr std::int64_t kEvaluationSequences = 32;  // at least, in whole micro-batches

class Evaluator {
 public:
  // Reserves the tokens of a micro-batch. Throws OutOfMemory, Failure (kBadInput) where the text is shorter
  // than a sequence and its last label. All four outlive the evaluator.
  Evaluator(Session& session, Memory& memory, const Config& config, const Corpus& held_out);
  ~Evaluator();  // waits for the compute stream
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  // The mean loss over the same sequences each time: they begin at even distances over all of the text.
  [[nodiscard]] double loss(Model& model, Ops& ops);
  [[nodiscard]] std::int64_t sequences() const { return batches_ * config_.train.batch; }

 private:
  void upload_batch(std::int64_t index);

  Session& session_;
  Memory& memory_;
  const Config& config_;
  const Corpus& held_out_;
  std::int64_t batches_;
  Tensor tokens_;  // int32: ids, then labels
  Tensor loss_sum_;
  std::optional<PinnedBuffer> host_tokens_, host_loss_;
};

}  // namespace terrace::trainer
