// What is trained and how: the configuration file as a value. docs/TRAINER.md lists every key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace terrace::trainer {

enum class Recompute : std::uint8_t {
  kNone,  // keep every activation that backward reads
  kFull,  // keep a layer's input and its decisions; run its forward again in backward
};
[[nodiscard]] const char* name_of(Recompute recompute);  // "none", "full"

inline constexpr std::int64_t kVocabulary = 256;  // bytes

struct ModelConfig {
  std::int64_t layers = 4;
  std::int64_t hidden = 64;
  std::int64_t dsa_every = 4;  // layers dsa_every - 1, 2 dsa_every - 1, ... are DSA, the others KDA
  double norm_eps = 1e-6;
};
struct KdaConfig {
  std::int64_t heads = 2;
  std::int64_t head_width = 32;
  std::int64_t conv_taps = 4;
  std::int64_t gate_rank = 16;
  double lower_bound = -5;
};
struct DsaConfig {
  std::int64_t heads = 2;
  std::int64_t key_width = 32;
  std::int64_t value_width = 32;
  std::int64_t index_heads = 2;
  std::int64_t index_width = 16;
  std::int64_t top_k = 32;
  double index_loss_weight = 0.1;  // of the mean over tokens
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
  double balance_rate = 1e-3;  // how far a router bias moves in a step
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
  double beta1 = 0.9;
  double beta2 = 0.95;
  double adam_eps = 1e-8;
  double weight_decay = 0.1;  // of matrices only
  double clip_norm = 1;       // of all gradients together; 0: off
  Recompute recompute = Recompute::kNone;
};

struct Config {
  ModelConfig model;
  KdaConfig kda;
  DsaConfig dsa;
  MoeConfig moe;
  TrainConfig train;

  [[nodiscard]] std::int64_t tokens() const { return train.batch * train.length; }  // in a micro-batch
  [[nodiscard]] std::int64_t tokens_per_step() const { return tokens() * train.micro_batches; }
  [[nodiscard]] bool is_dsa(std::int64_t layer) const {
    return layer % model.dsa_every == model.dsa_every - 1;
  }
};

// Reads TOML text; `source` names it in errors. Throws Failure (kBadInput) with one line:
// source:line:column, the key, what is wrong and what would be accepted.
[[nodiscard]] Config parse_config(std::string_view toml, const std::string& source);
// The same from a file; a file that cannot be read is a Failure too.
[[nodiscard]] Config load_config(const std::string& path);

// Every key that decides the numbers of a run (not how long it is, nor how activations are kept), one
// `table.key = value` a line, in a fixed order.
[[nodiscard]] std::string canonical_text(const Config& config);

}  // namespace terrace::trainer
