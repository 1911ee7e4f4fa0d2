// What is trained and how: the configuration file as a value. docs/TRAINER.md lists every key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "examples/moe_trainer/ops/moe.hpp"

namespace terrace::trainer {

enum class Recompute : std::uint8_t {
  kNone,  // keep every activation that backward reads
  kFull,  // keep a layer's input and its decisions; run its forward again in backward
};
[[nodiscard]] const char* name_of(Recompute recompute);  // "none", "full"

inline constexpr std::int64_t kByteVocabulary = 256;

enum class MixerKind : std::uint8_t { kKda, kDsa, kMla, kGqa };
enum class FfnKind : std::uint8_t { kLatentMoe, kMoe, kDense };
struct LayerKind {
  MixerKind mixer = MixerKind::kKda;
  FfnKind ffn = FfnKind::kLatentMoe;
};

enum class ResidualKind : std::uint8_t { kPlain, kAttnRes };  // model/residual.hpp
enum class Balance : std::uint8_t { kSign, kQuantile };       // of the routers' biases

// A model is either our own, described by a configuration file, or one of a public family, described by its
// config.json (families/): then `kinds` says what each layer is and `source` holds that description.
struct ModelConfig {
  std::int64_t layers = 4;
  std::int64_t hidden = 64;
  std::int64_t dsa_every = 4;  // layers dsa_every - 1, 2 dsa_every - 1, ... are DSA, the others KDA
  double norm_eps = 1e-6;
  ResidualKind residual = ResidualKind::kPlain;
  std::int64_t residual_block = 4;  // layers in a block of attention residuals
  std::int64_t vocabulary = kByteVocabulary;
  GluActivation activation = GluActivation::kSitu;
  std::int64_t dense_width = 0;       // inner width of dense layers
  std::vector<LayerKind> kinds = {};  // empty: from dsa_every
  std::string source = {};            // a family's description, as one line
};
struct KdaConfig {
  std::int64_t heads = 2;
  std::int64_t head_width = 32;
  std::int64_t conv_taps = 4;
  std::int64_t gate_rank = 16;
  double lower_bound = -5;         // 0: the softplus gate
  std::int64_t out_gate_rank = 0;  // 0: full rank
};
struct DsaConfig {
  std::int64_t heads = 2;
  std::int64_t key_width = 32;
  std::int64_t value_width = 32;
  std::int64_t index_heads = 2;
  std::int64_t index_width = 16;
  std::int64_t top_k = 32;
  double index_loss_weight = 0.1;  // of the mean over tokens
  std::int64_t select_every = 1;   // of the sparse layers, the first and every n-th after it select
  std::int64_t warmup_steps = 0;   // the first steps, in which the indexers alone learn, of all tokens
};
// Attention whose keys and values come from a narrow row of each token.
struct MlaConfig {
  std::int64_t heads = 0;
  std::int64_t q_rank = 0;  // 0: queries straight from the layer's input
  std::int64_t kv_rank = 0;
  std::int64_t nope_width = 0;  // of a head's key without position, and the part that is rotated
  std::int64_t rope_width = 0;
  std::int64_t value_width = 0;
  double rope_theta = 0;  // 0: nothing is rotated
  double norm_eps = 1e-6;
  std::int64_t index_heads = 0;  // 0: dense; else an indexer chooses index_top_k tokens
  std::int64_t index_width = 0;
  std::int64_t index_top_k = 0;
};
// Grouped-query attention, queries and keys normed by head, then rotated.
struct GqaConfig {
  std::int64_t heads = 0;
  std::int64_t key_heads = 0;
  std::int64_t head_width = 0;
  double rope_theta = 1e4;
};
enum class ExpertCompute : std::uint8_t {
  kAsModel,  // in train.compute
  kFp8,      // products and input gradients in 8 bits (ops/fp8.hpp); needs train.compute = "bf16"
};
struct MoeConfig {
  std::int64_t latent = 32;
  std::int64_t experts = 8;
  std::int64_t top_k = 2;
  std::int64_t groups = 1;
  std::int64_t top_groups = 1;
  std::int64_t expert_width = 64;
  std::int64_t shared_width = 64;
  double scaling = 1;
  RouterScore scoring = RouterScore::kSigmoid;
  Renormalise renormalise = Renormalise::kYes;
  Balance balance = Balance::kSign;
  double balance_rate = 1e-3;       // kSign: how far a router bias moves in a step
  double sequence_loss_weight = 0;  // of each sequence's balance loss, in the mean over sequences
  double capacity = 0;              // of an expert, in even shares of a micro-batch's slots; 0: unlimited
  ExpertCompute compute = ExpertCompute::kAsModel;
};
enum class LoraBase : std::uint8_t {
  kAsModel,  // in train.compute
  kInt8,     // in blocks of 8-bit numbers (ops/quantised.hpp)
};
// Low-rank adapters on a frozen model.
struct LoraConfig {
  std::int64_t rank = 0;                  // 0: all of the model is trained
  std::vector<std::string> targets = {};  // matrices by their name without the layer's: "kda.q", "moe.fc2"
  LoraBase base = LoraBase::kAsModel;     // how frozen matrices are kept
};
// Images in the sequences, each before its caption. A square of pixels is cut into square patches, and each
// of those is a token.
enum class ImageContent : std::uint8_t {
  kPixels,
  kBlank,  // all of one grey: what a model without eyes reaches on the same captions
};
inline constexpr std::int64_t kShortestCaption = 2;  // a byte and a line feed
struct ImagesConfig {
  std::int64_t patch = 0;  // pixels of a side; 0: no images
  std::int64_t size = 32;  // of the image's side, a multiple of patch
  ImageContent content = ImageContent::kPixels;

  [[nodiscard]] std::int64_t grid() const { return size / patch; }  // patches of a side
  [[nodiscard]] std::int64_t tokens() const { return grid() * grid(); }
  [[nodiscard]] std::int64_t numbers() const { return 3 * patch * patch; }  // of a patch: red, green, blue
};
enum class OptimizerKind : std::uint8_t {
  kAdamW,
  kMuon,  // of the matrices of layers; AdamW of all else
};
struct TrainConfig {
  std::int64_t batch = 2;  // sequences in a micro-batch
  std::int64_t length = 64;
  std::int64_t micro_batches = 1;
  std::int64_t steps = 100;           // how long to run where --steps does not say
  std::int64_t schedule_steps = 100;  // where the cosine ends; apart from how long a run is
  std::int64_t warmup_steps = 10;
  double learning_rate = 3e-3;
  double final_learning_rate = 3e-4;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double muon_momentum = 0.95;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double adam_eps = 1e-8;
  double weight_decay = 0.1;  // of matrices only
  double clip_norm = 1;       // of all gradients together; 0: off
  Recompute recompute = Recompute::kNone;
  Dtype compute = Dtype::kF32;  // of activations and of the matrices that multiply them
};

struct Config {
  ModelConfig model;
  KdaConfig kda;
  DsaConfig dsa;
  MlaConfig mla;
  GqaConfig gqa;
  MoeConfig moe;
  LoraConfig lora;
  ImagesConfig images;
  TrainConfig train;

  [[nodiscard]] std::int64_t tokens() const { return train.batch * train.length; }  // in a micro-batch
  [[nodiscard]] std::int64_t tokens_per_step() const { return tokens() * train.micro_batches; }
  // Image tokens that a micro-batch has at most. Precondition: there are images.
  [[nodiscard]] std::int64_t most_image_rows() const {
    return train.batch * (train.length / (images.tokens() + kShortestCaption)) * images.tokens();
  }
  [[nodiscard]] LayerKind kind(std::int64_t layer) const {
    if (!model.kinds.empty()) return model.kinds[static_cast<std::size_t>(layer)];
    const bool sparse = layer % model.dsa_every == model.dsa_every - 1;
    return {.mixer = sparse ? MixerKind::kDsa : MixerKind::kKda, .ffn = FfnKind::kLatentMoe};
  }
};

// Reads TOML text; `source` names it in errors. Throws Failure (kBadInput) with one line:
// source:line:column, the key, what is wrong and what would be accepted.
[[nodiscard]] Config parse_config(std::string_view toml, const std::string& source);
// The same from a file; a file that cannot be read is a Failure too.
[[nodiscard]] Config load_config(const std::string& path);
// What a file may say beside a model that comes from a folder.
struct RunConfig {
  TrainConfig train;
  LoraConfig lora;
  ImagesConfig images;
};
// [train], [lora] and [images] of a file: another section is an error.
[[nodiscard]] RunConfig load_run_config(const std::string& path);

// Every key that decides the numbers of a run (not how long it is, nor how activations are kept), one
// `table.key = value` a line, in a fixed order.
[[nodiscard]] std::string canonical_text(const Config& config);

}  // namespace terrace::trainer
