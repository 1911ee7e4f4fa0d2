// What a frozen model keeps until backward: nothing that only the gradient of a frozen matrix would read.
#include <algorithm>
#include <map>

#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

constexpr std::int64_t kLayers = 6;
constexpr std::int64_t kTokens = 128;

// Layers of one kind. Adapters on `all` read inputs that those on `few` leave: `let_go` numbers a token and
// layer.
struct Case {
  const char* name;
  LayerKind kind;
  std::vector<std::string> few, all;
  std::int64_t let_go;
};

Config config_of(const LayerKind& kind) {
  Config config = small_config();
  config.model.layers = kLayers;
  config.model.kinds.assign(kLayers, kind);
  config.model.dense_width = 48;
  config.gqa = {.heads = 4, .key_heads = 2, .head_width = 8};
  config.mla = {.heads = 2,
                .q_rank = 24,
                .kv_rank = 16,
                .nope_width = 8,
                .rope_width = 8,
                .value_width = 16,
                .rope_theta = 1e4};
  config.train.batch = 1;
  config.train.length = kTokens;
  config.train.micro_batches = 1;
  return config;
}

std::vector<Case> cases() {
  const Config c = config_of({});
  const std::int64_t hidden = c.model.hidden;
  const std::int64_t gathered = c.moe.top_k;
  return {
      {"kda",
       {MixerKind::kKda, FfnKind::kDense},
       {"kda.out", "dense.fc2"},
       {"kda.out", "dense.fc2", "kda.q", "kda.gate_up", "dense.fc1_up"},
       2 * hidden + c.kda.gate_rank},
      {"kda output",
       {MixerKind::kKda, FfnKind::kDense},
       {"kda.q", "dense.fc1_up"},
       {"kda.out", "dense.fc2", "kda.q", "dense.fc1_up"},
       c.kda.heads * c.kda.head_width},
      {"latent experts",
       {MixerKind::kGqa, FfnKind::kLatentMoe},
       {"moe.fc2", "gqa.out"},
       {"moe.fc2", "gqa.out", "moe.up", "moe.down", "moe.fc1_up", "gqa.k"},
       2 * hidden + c.moe.latent + gathered * c.moe.latent},
      {"experts",
       {MixerKind::kGqa, FfnKind::kMoe},
       {"gqa.out", "moe.fc2"},
       {"gqa.out", "moe.fc2", "moe.fc1_gate", "moe.shared_fc1_gate", "gqa.v"},
       2 * hidden + gathered * hidden},
      {"dsa",  // with what the indexer scored by, and its key before the norm
       {MixerKind::kDsa, FfnKind::kDense},
       {"dense.fc2"},
       {"dense.fc2", "dsa.index_k", "dsa.out", "dsa.v", "dense.fc1_gate"},
       2 * hidden + c.dsa.heads * c.dsa.value_width + (c.dsa.index_heads + 2) * c.dsa.index_width +
           c.dsa.index_heads},
      {"mla",  // with the query's narrow row and the latent one
       {MixerKind::kMla, FfnKind::kDense},
       {"dense.fc2", "mla.out"},
       {"dense.fc2", "mla.out", "mla.q", "mla.k_up", "mla.k_rope", "dense.fc1_gate"},
       2 * hidden + c.mla.q_rank + c.mla.kv_rank},
  };
}

Rig::Options options_of(const Case& of, const std::vector<std::string>& targets, Dtype compute) {
  Rig::Options options;
  options.config = config_of(of.kind);
  options.config.lora = {.rank = 1, .targets = targets};
  options.config.train.compute = compute;
  return options;
}

// Bytes that a step takes beside what lasts.
std::int64_t step_bytes(const Case& of, const std::vector<std::string>& targets, Dtype compute) {
  Rig rig(options_of(of, targets, compute));
  const std::uint64_t before = rig.session().hbm_usage().live.count();
  rig.session().reset_peaks();
  (void)rig.trainer().step();
  return static_cast<std::int64_t>(rig.session().hbm_usage().live_peak.count() - before);
}

std::map<std::string, std::vector<float>> first_gradients(Rig& rig) {
  std::map<std::string, std::vector<float>> all;
  (void)rig.trainer().step();
  for (const auto& group : rig.trainer().model().groups()) {
    for (const Parameter& parameter : group->parameters()) {
      if (parameter.m != nullptr) all[parameter.name] = rig.read(parameter.gradient, parameter.count());
    }
  }
  return all;
}

TEST(LoraMemory, FrozenMatricesKeepNoInput) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    for (const Case& of : cases()) {
      const std::int64_t saved = step_bytes(of, of.all, compute) - step_bytes(of, of.few, compute);
      const std::int64_t layer = of.let_go * kTokens * bytes_of(compute);
      // The peak lies in the last layer's backward, where some of that layer's has gone in either.
      EXPECT_GE(saved, (kLayers - 1) * layer) << of.name << " in " << name_of(compute);
      EXPECT_LE(saved, (kLayers + 1) * layer) << of.name << " in " << name_of(compute);
    }
  }
}

// Adapters add zeros at first, so that what others are there changes no bit of a gradient.
TEST(LoraMemory, GradientsAreWhatTheyAreWithAllInputsKept) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    for (const Case& of : cases()) {
      Rig few(options_of(of, of.few, compute));
      Rig all(options_of(of, of.all, compute));
      const auto expected = first_gradients(all);
      const auto found = first_gradients(few);
      ASSERT_EQ(found.size(), 2 * kLayers * of.few.size()) << of.name;
      for (const auto& [name, gradient] : found) EXPECT_EQ(gradient, expected.at(name)) << name;
    }
  }
}

TEST(LoraMemory, RecomputedLayersGiveTheSameBits) {
  for (const Case& of : cases()) {
    for (const auto* targets : {&of.few, &of.all}) {
      Rig::Options options = options_of(of, *targets, Dtype::kBf16);
      Rig kept(options);
      options.config.train.recompute = Recompute::kFull;
      options.swapcore = SwapMode::kAuto;
      Rig recomputed(options);
      EXPECT_EQ(kept.steps(4), recomputed.steps(4)) << of.name;
    }
  }
}

// Heads that choose their tokens by an indexer multiply parts of two matrices from either side: those stay.
TEST(LoraMemory, SparseLatentAttentionTrainsItsOtherMatrices) {
  Rig::Options options;
  options.config = config_of({MixerKind::kMla, FfnKind::kDense});
  options.config.mla.index_heads = 2;
  options.config.mla.index_width = 16;
  options.config.mla.index_top_k = 32;
  options.config.train.learning_rate = 2e-2;
  for (const std::vector<std::string>& targets :
       {std::vector<std::string>{"mla.q"}, std::vector<std::string>{"mla.out", "mla.index_q"}}) {
    options.config.lora = {.rank = 4, .targets = targets};
    Rig rig(options);
    const auto losses = rig.steps(12);
    EXPECT_LT(losses.back(), losses.front());
  }
  options.config.lora = {.rank = 4, .targets = {"mla.k_up"}};
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("\"mla.k_up\""), std::string::npos);
}

}  // namespace
}  // namespace terrace::trainer::test
