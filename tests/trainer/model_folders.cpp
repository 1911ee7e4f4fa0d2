#include "tests/trainer/model_folders.hpp"

#include <cmath>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/families/family.hpp"
#include "examples/moe_trainer/families/stored_names.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer::test {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// What all three have.
Json common(const std::string& model_type) {
  return {{"model_type", model_type},    {"vocab_size", 256},        {"hidden_size", 32},
          {"intermediate_size", 48},     {"num_attention_heads", 2}, {"hidden_act", "silu"},
          {"moe_intermediate_size", 24}, {"rms_norm_eps", 1e-6},     {"tie_word_embeddings", false},
          {"attention_bias", false}};
}

// Norm weights about one, a decay's logarithm about zero, matrices that keep their input's size.
float random_weight(const FamilyTensor& tensor, const CounterRandom& random, std::uint64_t i) {
  const auto ends_with = [&](const std::string& end) {
    return tensor.name.size() >= end.size() &&
           tensor.name.compare(tensor.name.size() - end.size(), end.size(), end) == 0;
  };
  const double x = random.normal(i);
  if (tensor.shape.size() == 1 && ends_with("norm.weight")) return static_cast<float>(1 + 0.1 * x);
  if (ends_with("dt_bias")) return static_cast<float>(-3 + 0.5 * x);
  const double in = tensor.shape.size() > 1 ? static_cast<double>(tensor.shape.back()) : 100.0;
  return static_cast<float>(x / std::sqrt(in));
}

std::vector<std::byte> random_bytes(const FamilyTensor& tensor, DType type) {
  const TensorInfo info{.name = tensor.name, .type = type, .shape = tensor.shape};
  const CounterRandom random({.seed = 11, .stream = tensor.name});
  std::vector<std::byte> bytes(info.bytes().count());
  for (std::int64_t i = 0; i < info.count(); ++i) {
    const float value = random_weight(tensor, random, static_cast<std::uint64_t>(i));
    if (type == DType::kF32) {
      std::memcpy(bytes.data() + i * 4, &value, 4);
    } else {
      const Bf16 half = to_bf16(value);
      std::memcpy(bytes.data() + i * 2, &half, 2);
    }
  }
  return bytes;
}

}  // namespace

Json small_description(const std::string& model_type) {
  Json json = common(model_type);
  if (model_type == "qwen3_moe") {
    json.update({{"num_hidden_layers", 2},
                 {"num_key_value_heads", 1},
                 {"head_dim", 16},
                 {"num_experts", 4},
                 {"num_experts_per_tok", 2},
                 {"norm_topk_prob", true},
                 {"decoder_sparse_step", 1},
                 {"mlp_only_layers", Json::array()},
                 {"rope_parameters", {{"rope_theta", 10000.0}, {"rope_type", "default"}}}});
    return json;
  }
  json.update({{"kv_lora_rank", 16},
               {"qk_nope_head_dim", 16},
               {"qk_rope_head_dim", 8},
               {"v_head_dim", 16},
               {"first_k_dense_replace", 1},
               {"routed_scaling_factor", 1.5},
               {"topk_group", 1}});
  if (model_type == "kimi_linear") {
    json.update({{"num_hidden_layers", 3},
                 {"q_lora_rank", nullptr},
                 {"mla_use_nope", true},
                 {"num_experts", 4},
                 {"num_experts_per_token", 2},
                 {"num_expert_group", 1},
                 {"num_shared_experts", 1},
                 {"linear_attn_config",
                  {{"full_attn_layers", {3}},
                   {"kda_layers", {1, 2}},
                   {"head_dim", 16},
                   {"num_heads", 2},
                   {"short_conv_kernel_size", 4}}}});
    return json;
  }
  json.update({{"num_hidden_layers", 2},
               {"q_lora_rank", 24},
               {"n_routed_experts", 4},
               {"num_experts_per_tok", 2},
               {"n_group", 2},
               {"n_shared_experts", 1},
               {"index_n_heads", 2},
               {"index_head_dim", 16},
               {"index_topk", 8},
               {"rope_theta", 10000}});
  return json;
}

void make_model_folder(const fs::path& folder, const Json& description, const FolderForm& form) {
  fs::create_directories(folder);
  std::ofstream(folder / "config.json") << description.dump(1);
  const Family family = read_family(description, "made");
  Json index = {{"weight_map", Json::object()}};
  for (int file = 0; file < form.files; ++file) {
    const std::string name =
        form.files == 1 ? "model.safetensors" : "model-" + std::to_string(file + 1) + ".safetensors";
    std::vector<TensorInfo> header;
    std::vector<std::byte> bytes;
    for (std::size_t i = 0; i < family.tensors.size(); ++i) {
      if (static_cast<int>(i) % form.files != file) continue;
      const FamilyTensor& tensor = family.tensors[i];
      const auto of_tensor = random_bytes(tensor, form.type);
      bytes.insert(bytes.end(), of_tensor.begin(), of_tensor.end());
      if (form.names == FolderForm::Names::kLibrary) {
        header.push_back({.name = tensor.name, .type = form.type, .shape = tensor.shape});
      } else {
        const bool other = description["model_type"] == "kimi_linear";
        const auto pieces = stored_pieces(tensor);
        for (const StoredPiece& piece : pieces) {
          const bool expert = other && piece.name.find(".experts.") != std::string::npos;
          header.push_back(
              {.name = expert ? other_name(piece.name) : piece.name,
               .type = form.type,
               .shape = pieces.size() == 1 ? tensor.shape : std::vector<std::int64_t>{piece.count}});
        }
      }
      for (const TensorInfo& info : header) index["weight_map"][info.name] = name;
    }
    auto writer = require(SafetensorsWriter::create((folder / name).string(), {{"format", "pt"}}, header));
    require(writer.append(bytes));
    require(writer.finish());
  }
  if (form.files > 1) std::ofstream(folder / "model.safetensors.index.json") << index.dump();
}

std::map<std::string, std::vector<std::byte>> tensors_in(const fs::path& folder) {
  std::map<std::string, std::vector<std::byte>> all;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsReader file = require(SafetensorsReader::open(entry.path().string()));
    for (const TensorInfo& tensor : file.tensors()) {
      std::vector<std::byte>& bytes = all[tensor.name];
      bytes.resize(tensor.bytes().count());
      require(file.read(tensor, Bytes(), bytes));
    }
  }
  return all;
}

}  // namespace terrace::trainer::test
