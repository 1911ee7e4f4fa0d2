// Small public models with random weights, made where a test wants them.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/moe_trainer/safetensors.hpp"

namespace terrace::trainer::test {

// Descriptions of the three families, a dense layer and all kinds of the others in each.
[[nodiscard]] nlohmann::json small_description(const std::string& model_type);
inline const std::vector<std::string> kFamilyNames = {"kimi_linear", "deepseek_v32", "qwen3_moe"};

struct FolderForm {
  DType type = DType::kF32;
  int files = 1;  // more: with an index
  enum class Names { kLibrary, kReleased } names = Names::kLibrary;
};
// Writes config.json and the weights.
void make_model_folder(const std::filesystem::path& folder, const nlohmann::json& description,
                       const FolderForm& form = {});

// Every tensor of every safetensors file in a folder, as bytes.
[[nodiscard]] std::map<std::string, std::vector<std::byte>> tensors_in(const std::filesystem::path& folder);

}  // namespace terrace::trainer::test
