// A training state on disk: one safetensors file with weights, optimizer moments and router biases; step,
// seed, configuration and the text's fingerprint in its metadata.
//
// It is written beside its name and renamed, so a full disk or a killed process leaves the previous one
// whole.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "examples/moe_trainer/state_home.hpp"
#include "examples/moe_trainer/tensor.hpp"

namespace terrace::trainer {

struct CheckpointInfo {
  std::int64_t steps_done = 0;  // also says where in the data the run is: draws are numbered
  std::uint64_t seed = 0;
  std::string config;  // canonical_text()
  std::uint64_t data_fingerprint = 0;
  std::uint64_t base_fingerprint = 0;  // of what adapters were put on by --base; 0: on what the seed made
};

// A tensor that a checkpoint holds, on the device, on the host, or among a group's state outside of HBM.
struct CheckpointTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  float* device = nullptr;
  float* host = nullptr;
  struct Away {
    StateHome* state = nullptr;
    StateKind kind = StateKind::kM;
    std::int64_t first = 0;
  };
  Away away = {};
  [[nodiscard]] Bytes bytes() const;
};

// Errors of the disk throw Failure (kFailed): which file, what went wrong, what to do.
void write_checkpoint(const std::string& path, const CheckpointInfo& info,
                      const std::vector<CheckpointTensor>& tensors, Session& session);

// Throws Failure (kBadInput): no such file, not a checkpoint, truncated.
[[nodiscard]] CheckpointInfo read_checkpoint_info(const std::string& path);
// Fills the tensors. Throws Failure (kBadInput) where one is missing or of another shape; then the tensors'
// contents are not defined.
void read_checkpoint(const std::string& path, const std::vector<CheckpointTensor>& tensors, Session& session);
// A tensor whose numbers are handed over in pieces, in order.
struct CheckpointNumbers {
  std::string name;
  std::vector<std::int64_t> shape;
  std::function<void(std::int64_t first, std::span<const float> numbers)> take;
};
// Throws as read_checkpoint does.
void read_checkpoint_numbers(const std::string& path, const std::vector<CheckpointNumbers>& tensors);

}  // namespace terrace::trainer
