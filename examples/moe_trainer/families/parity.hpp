// Whether a public model, run here, gives what its own library gave.
#pragma once

#include <string>
#include <vector>

#include "examples/moe_trainer/families/model_folder.hpp"

namespace terrace::trainer {

inline constexpr double kLossTolerance = 1e-5;
inline constexpr double kGradientTolerance = 1e-3;  // of the logits too

// Errors are relative, ||a - b|| / ||b||, and infinite where either side has a NaN.
struct TensorError {
  std::string name;
  double error = 0;
};
struct ParityReport {
  std::string model_type;
  double loss = 0, reference_loss = 0;
  double loss_error = 0, logits_error = 0;
  std::vector<TensorError> gradients;  // of every tensor that the reference has one of

  [[nodiscard]] TensorError worst_gradient() const;
  [[nodiscard]] bool passed() const;
};

// The reference is `reference.safetensors` of the folder: `input_ids` (batch, length), `loss` (mean over all
// tokens but each sequence's last), `logits`, and `grad.<tensor>`.
class Parity {
 public:
  // Throws Failure (kBadInput) where a file is missing or damaged.
  static Parity open(const std::string& folder);
  // The model's configuration, batch and length as the reference has them.
  [[nodiscard]] const Config& config() const { return config_; }
  // Throws Failure, OutOfMemory.
  [[nodiscard]] ParityReport run(Session& session) const;

 private:
  Parity(ModelFolder folder, SafetensorsReader reference);
  [[nodiscard]] std::vector<std::int32_t> labels() const;
  void compare(Session& session, const Model& model, ParityReport& report) const;

  ModelFolder folder_;
  SafetensorsReader reference_;
  Config config_;
  std::vector<std::int32_t> ids_;
};

// The report as one JSON object.
[[nodiscard]] std::string json_text(const ParityReport& report, const std::string& device);

}  // namespace terrace::trainer
