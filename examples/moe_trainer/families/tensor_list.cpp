#include "examples/moe_trainer/families/tensor_list.hpp"

#include <utility>

namespace terrace::trainer {

namespace {

std::string in_file(std::int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }
std::string ours(std::int64_t layer) { return "layer." + std::to_string(layer) + "."; }

}  // namespace

void TensorList::add(const std::string& name, const Shape& shape, const std::string& parameter) {
  tensors_.push_back({name, shape, {{parameter, {}}}});
}

void TensorList::add_frame() {
  const ModelConfig& model = config_.model;
  add("model.embed_tokens.weight", {model.vocabulary, model.hidden}, "embedding");
  add("model.norm.weight", {model.hidden}, "final_norm");
  add("lm_head.weight", {model.vocabulary, model.hidden}, "head");
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    add(in_file(layer) + "input_layernorm.weight", {model.hidden}, ours(layer) + "mixer_norm");
    add(in_file(layer) + "post_attention_layernorm.weight", {model.hidden}, ours(layer) + "moe_norm");
  }
}

void TensorList::add_glu(const std::string& prefix, const std::string& parameters, std::int64_t width) {
  const std::int64_t hidden = config_.model.hidden;
  add(prefix + "gate_proj.weight", {width, hidden}, parameters + "fc1_gate");
  add(prefix + "up_proj.weight", {width, hidden}, parameters + "fc1_up");
  add(prefix + "down_proj.weight", {hidden, width}, parameters + "fc2");
}

void TensorList::add_experts(std::int64_t layer) {
  const MoeConfig& moe = config_.moe;
  const std::int64_t hidden = config_.model.hidden;
  const std::string name = in_file(layer) + "mlp.";
  add(name + "gate.weight", {moe.experts, hidden}, ours(layer) + "moe.router");
  if (moe.scoring == RouterScore::kSigmoid) {
    add(name + "gate.e_score_correction_bias", {moe.experts}, ours(layer) + "moe.router_bias");
  }
  const std::int64_t width = moe.expert_width;
  tensors_.push_back({name + "experts.gate_up_proj",
                      {moe.experts, 2 * width, hidden},
                      {{ours(layer) + "moe.fc1_gate", {.offset = 0, .run = width, .stride = 2 * width}},
                       {ours(layer) + "moe.fc1_up", {.offset = width, .run = width, .stride = 2 * width}}}});
  add(name + "experts.down_proj", {moe.experts, hidden, width}, ours(layer) + "moe.fc2");
  if (moe.shared_width > 0) {
    add_glu(name + "shared_experts.", ours(layer) + "moe.shared_", moe.shared_width);
  }
}

void TensorList::add_ffn(std::int64_t layer) {
  if (config_.kind(layer).ffn == FfnKind::kDense) {
    add_glu(in_file(layer) + "mlp.", ours(layer) + "dense.", config_.model.dense_width);
  } else {
    add_experts(layer);
  }
}

void TensorList::add_mla(std::int64_t layer) {
  const MlaConfig& mla = config_.mla;
  const std::int64_t hidden = config_.model.hidden;
  const std::string name = in_file(layer) + "self_attn.";
  const std::string parameter = ours(layer) + "mla.";
  const std::int64_t q_width = mla.heads * (mla.nope_width + mla.rope_width);
  if (mla.q_rank == 0) {
    add(name + "q_proj.weight", {q_width, hidden}, parameter + "q");
  } else {
    add(name + "q_a_proj.weight", {mla.q_rank, hidden}, parameter + "q_down");
    add(name + "q_a_layernorm.weight", {mla.q_rank}, parameter + "q_norm");
    add(name + "q_b_proj.weight", {q_width, mla.q_rank}, parameter + "q");
  }
  tensors_.push_back({name + "kv_a_proj_with_mqa.weight",
                      {mla.kv_rank + mla.rope_width, hidden},
                      {{parameter + "kv_down", {}}, {parameter + "k_rope", {.offset = mla.kv_rank}}}});
  add(name + "kv_a_layernorm.weight", {mla.kv_rank}, parameter + "kv_norm");
  const std::int64_t head = mla.nope_width + mla.value_width;
  tensors_.push_back(
      {name + "kv_b_proj.weight",
       {mla.heads * head, mla.kv_rank},
       {{parameter + "k_up", {.offset = 0, .run = mla.nope_width, .stride = head}},
        {parameter + "v_up", {.offset = mla.nope_width, .run = mla.value_width, .stride = head}}}});
  add(name + "o_proj.weight", {hidden, mla.heads * mla.value_width}, parameter + "out");
  if (mla.index_heads == 0) return;
  add(name + "indexer.wq_b.weight", {mla.index_heads * mla.index_width, mla.q_rank}, parameter + "index_q");
  add(name + "indexer.wk.weight", {mla.index_width, hidden}, parameter + "index_k");
  add(name + "indexer.k_norm.weight", {mla.index_width}, parameter + "index_norm");
  add(name + "indexer.k_norm.bias", {mla.index_width}, parameter + "index_bias");
  add(name + "indexer.weights_proj.weight", {mla.index_heads, hidden}, parameter + "index_w");
}

void TensorList::add_gqa(std::int64_t layer) {
  const GqaConfig& gqa = config_.gqa;
  const std::int64_t hidden = config_.model.hidden;
  const std::string name = in_file(layer) + "self_attn.";
  const std::string parameter = ours(layer) + "gqa.";
  add(name + "q_proj.weight", {gqa.heads * gqa.head_width, hidden}, parameter + "q");
  add(name + "k_proj.weight", {gqa.key_heads * gqa.head_width, hidden}, parameter + "k");
  add(name + "v_proj.weight", {gqa.key_heads * gqa.head_width, hidden}, parameter + "v");
  add(name + "o_proj.weight", {hidden, gqa.heads * gqa.head_width}, parameter + "out");
  add(name + "q_norm.weight", {gqa.head_width}, parameter + "q_norm");
  add(name + "k_norm.weight", {gqa.head_width}, parameter + "k_norm");
}

void TensorList::add_kda(std::int64_t layer) {
  const KdaConfig& kda = config_.kda;
  const std::int64_t hidden = config_.model.hidden;
  const std::int64_t inner = kda.heads * kda.head_width;
  const std::string name = in_file(layer) + "self_attn.";
  const std::string parameter = ours(layer) + "kda.";
  for (const char* part : {"q", "k", "v"}) {
    add(name + part + "_proj.weight", {inner, hidden}, parameter + part);
  }
  tensors_.push_back({name + "conv1d.weight",
                      {3 * inner, 1, kda.conv_taps},
                      {{parameter + "q_conv", {}},
                       {parameter + "k_conv", {.offset = inner}},
                       {parameter + "v_conv", {.offset = 2 * inner}}}});
  add(name + "forget_gate.f_a_proj.weight", {kda.gate_rank, hidden}, parameter + "gate_down");
  add(name + "forget_gate.f_b_proj.weight", {inner, kda.gate_rank}, parameter + "gate_up");
  add(name + "forget_gate.dt_bias", {inner}, parameter + "dt_bias");
  add(name + "forget_gate.A_log", {1, 1, kda.heads, 1}, parameter + "a_log");
  add(name + "b_proj.weight", {kda.heads, hidden}, parameter + "beta");
  add(name + "g_a_proj.weight", {kda.out_gate_rank, hidden}, parameter + "out_gate_down");
  add(name + "g_b_proj.weight", {inner, kda.out_gate_rank}, parameter + "out_gate");
  add(name + "o_norm.weight", {kda.head_width}, parameter + "norm");
  add(name + "o_proj.weight", {hidden, inner}, parameter + "out");
}

}  // namespace terrace::trainer
