// Public model families: what their config.json means, and where their tensors are our parameters.
//
// A family is a description only. It names, for each tensor of the file, the parameters that lie in it and
// their rows; reading, writing and comparing gradients all follow from that.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "examples/moe_trainer/config.hpp"

namespace terrace::trainer {

// The rows of a parameter inside a tensor of the same row width: runs of `run` rows, the first at `offset`,
// one every `stride`. A run of 0 is all rows.
struct TensorRows {
  std::int64_t offset = 0, run = 0, stride = 0;
  [[nodiscard]] std::int64_t place(std::int64_t row) const {
    return run == 0 ? offset + row : offset + row / run * stride + row % run;
  }
};
struct TensorPart {
  std::string parameter;  // "layer.3.kda.q"
  TensorRows rows;
};
// A tensor of the file; its parts fill it.
struct FamilyTensor {
  std::string name;  // "model.layers.3.self_attn.q_proj.weight"
  std::vector<std::int64_t> shape;
  std::vector<TensorPart> parts;
};

struct Family {
  Config config;  // of the model; what is in [train] is left at its defaults
  std::vector<FamilyTensor> tensors;
};

// By model_type. `source` names the description in errors. Throws Failure (kBadInput): a family that is not
// known, a value that is missing, or one that asks for something this trainer does not do.
[[nodiscard]] Family read_family(const nlohmann::json& description, const std::string& source);

}  // namespace terrace::trainer
