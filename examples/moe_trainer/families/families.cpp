#include <algorithm>
#include <array>
#include <string>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/families/description.hpp"
#include "examples/moe_trainer/families/family.hpp"
#include "examples/moe_trainer/families/tensor_list.hpp"

namespace terrace::trainer {

namespace {

// What all families say in the same words.
Config common_config(const Description& d) {
  d.expect({{"tie_word_embeddings", false},
            {"attention_bias", false},
            {"hidden_act", "silu"},
            {"attention_dropout", 0.0},
            {"mlp_bias", false},
            {"moe_layer_freq", 1},
            {"quantization_config", nullptr}});
  Config config;
  config.model.layers = d.whole({"num_hidden_layers"});
  config.model.hidden = d.whole({"hidden_size"});
  config.model.vocabulary = d.whole({"vocab_size"});
  config.model.norm_eps = d.real({"rms_norm_eps"});
  config.model.activation = GluActivation::kSwi;
  config.model.dense_width = d.whole({"intermediate_size"});
  config.dsa.index_loss_weight = 0;  // their indexers do not learn
  config.moe.experts = d.whole({"num_local_experts", "num_experts", "n_routed_experts"});
  config.moe.top_k = d.whole({"num_experts_per_tok", "num_experts_per_token"});
  config.moe.expert_width = d.whole({"moe_intermediate_size"});
  config.moe.groups = d.whole_or({"n_group", "num_expert_group"}, 1);
  config.moe.top_groups = d.whole_or({"topk_group"}, 1);
  config.moe.scaling = d.real_or({"routed_scaling_factor"}, 1);
  config.moe.shared_width =
      config.moe.expert_width * d.whole_or({"n_shared_experts", "num_shared_experts"}, 0);
  config.moe.renormalise =
      d.flag_or({"norm_topk_prob", "moe_renormalize"}, true) ? Renormalise::kYes : Renormalise::kNo;
  return config;
}

double rope_theta(const Description& d) {
  const Description rope = d.inside("rope_parameters");
  rope.expect({{"rope_type", "default"}});
  d.inside("rope_scaling").expect({{"type", "default"}, {"rope_type", "default"}});
  return rope.real_or({"rope_theta"}, d.real_or({"rope_theta"}, 1e4));
}

void read_mla(const Description& d, MlaConfig& mla) {
  mla.heads = d.whole({"num_attention_heads"});
  mla.q_rank = d.whole_or({"q_lora_rank"}, 0);
  mla.kv_rank = d.whole({"kv_lora_rank"});
  mla.nope_width = d.whole({"qk_nope_head_dim"});
  mla.rope_width = d.whole({"qk_rope_head_dim"});
  mla.value_width = d.whole({"v_head_dim"});
  mla.norm_eps = 1e-6;  // whatever the other norms have
}

// "dense" or "sparse" for each layer; the first few are dense where the file names a number only.
std::vector<std::string> ffn_words(const Description& d, std::int64_t layers, std::int64_t dense) {
  std::vector<std::string> words(static_cast<std::size_t>(layers), "sparse");
  const std::int64_t first = d.whole_or({"first_k_dense_replace"}, dense);
  for (std::int64_t i = 0; i < std::min(first, layers); ++i) words[static_cast<std::size_t>(i)] = "dense";
  words = d.words_or({"mlp_layer_types"}, std::move(words));
  if (static_cast<std::int64_t>(words.size()) != layers) {
    d.refuse("mlp_layer_types", "must name each of the " + std::to_string(layers) + " layers");
  }
  return words;
}

FfnKind ffn_kind(const std::string& word) { return word == "dense" ? FfnKind::kDense : FfnKind::kMoe; }

Config kimi_linear(const Description& d) {
  Config config = common_config(d);
  d.expect({{"mla_use_nope", true}, {"moe_router_activation_func", "sigmoid"}, {"q_lora_rank", nullptr}});
  read_mla(d, config.mla);
  const Description linear = d.inside("linear_attn_config");
  config.kda.heads = linear.whole_or({"num_heads"}, d.whole_or({"linear_num_heads"}, 32));
  config.kda.head_width = linear.whole_or({"head_dim"}, d.whole_or({"linear_head_dim"}, 128));
  config.kda.conv_taps =
      linear.whole_or({"short_conv_kernel_size"}, d.whole_or({"linear_conv_kernel_dim"}, 4));
  config.kda.gate_rank = config.kda.head_width;
  config.kda.out_gate_rank = config.kda.head_width;
  config.kda.lower_bound = 0;
  std::vector<std::string> mixers = d.words_or({"layer_types"}, {});
  if (mixers.empty()) {
    mixers.assign(static_cast<std::size_t>(config.model.layers), "linear_attention");
    for (const std::int64_t layer : linear.wholes("full_attn_layers")) {  // counted from 1
      if (layer < 1 || layer > config.model.layers) linear.refuse("full_attn_layers", "names no layer");
      mixers[static_cast<std::size_t>(layer - 1)] = "full_attention";
    }
  }
  const auto ffns = ffn_words(d, config.model.layers, 1);
  if (mixers.size() != ffns.size()) d.refuse("layer_types", "must name each layer");
  for (std::size_t i = 0; i < mixers.size(); ++i) {
    const bool full = mixers[i] == "full_attention";
    config.model.kinds.push_back({full ? MixerKind::kMla : MixerKind::kKda, ffn_kind(ffns[i])});
  }
  return config;
}

Config deepseek_v32(const Description& d) {
  Config config = common_config(d);
  d.expect({{"scoring_func", "sigmoid"}, {"topk_method", "noaux_tc"}});
  read_mla(d, config.mla);
  if (config.mla.q_rank == 0) d.refuse("q_lora_rank", "is missing");
  config.mla.rope_theta = rope_theta(d);
  config.mla.index_heads = d.whole({"index_n_heads"});
  config.mla.index_width = d.whole({"index_head_dim"});
  config.mla.index_top_k = d.whole({"index_topk"});
  for (const std::string& word : ffn_words(d, config.model.layers, 3)) {
    config.model.kinds.push_back({MixerKind::kMla, ffn_kind(word)});
  }
  return config;
}

Config qwen3_moe(const Description& d) {
  Config config = common_config(d);
  d.expect({{"decoder_sparse_step", 1},
            {"mlp_only_layers", nlohmann::json::array()},
            {"use_sliding_window", false},
            {"output_router_logits", false}});
  config.gqa.heads = d.whole({"num_attention_heads"});
  config.gqa.key_heads = d.whole({"num_key_value_heads"});
  config.gqa.head_width = d.whole({"head_dim"});
  config.gqa.rope_theta = rope_theta(d);
  config.moe.scoring = RouterScore::kSoftmax;
  config.moe.balance_rate = 0;
  config.model.kinds.assign(static_cast<std::size_t>(config.model.layers), {MixerKind::kGqa, FfnKind::kMoe});
  return config;
}

struct Row {
  const char* model_type;
  Config (*read)(const Description& d);
};
constexpr std::array<Row, 3> kFamilies = {
    {{"kimi_linear", kimi_linear}, {"deepseek_v32", deepseek_v32}, {"qwen3_moe", qwen3_moe}}};

std::vector<FamilyTensor> tensors_of(const Config& config) {
  TensorList list(config);
  list.add_frame();
  for (std::int64_t layer = 0; layer < config.model.layers; ++layer) {
    switch (config.kind(layer).mixer) {
      case MixerKind::kKda:
        list.add_kda(layer);
        break;
      case MixerKind::kMla:
        list.add_mla(layer);
        break;
      default:
        list.add_gqa(layer);
    }
    list.add_ffn(layer);
  }
  return list.take();
}

}  // namespace

Family read_family(const nlohmann::json& description, const std::string& source) {
  const Description d(description, source);
  const auto type = description.is_object() ? description.find("model_type") : description.end();
  std::string known;
  for (const Row& row : kFamilies) {
    known += (known.empty() ? "" : ", ") + std::string(row.model_type);
    if (type == description.end() || *type != row.model_type) continue;
    Family family;
    family.config = row.read(d);
    family.config.model.source = description.dump();
    family.tensors = tensors_of(family.config);
    return family;
  }
  bad_input(source + ": model_type must be one of " + known);
}

}  // namespace terrace::trainer
