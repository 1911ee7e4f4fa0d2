#include "examples/moe_trainer/config.hpp"

#include "examples/moe_trainer/default_config.hpp"
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

std::string error_of(const std::string& toml) {
  return failure_of([&] { (void)parse_config(toml, "model.toml"); });
}

TEST(Config, ReadsWhatIsWritten) {
  const Config config =
      parse_config("[model]\nlayers = 3\n[train]\nlearning_rate = 1\nrecompute = \"full\"\n", "x");
  EXPECT_EQ(config.model.layers, 3);
  EXPECT_EQ(config.train.learning_rate, 1.0);
  EXPECT_EQ(config.train.recompute, Recompute::kFull);
  EXPECT_EQ(config.moe.experts, MoeConfig{}.experts);
}

TEST(Config, NamesTheNearestKey) {
  EXPECT_EQ(error_of("[model]\nlayer = 3\n"),
            "model.toml:2:1: model.layer: unknown key; did you mean \"layers\"?");
  EXPECT_EQ(error_of("\n[modle]\nlayers = 3\n"),
            "model.toml:2:2: unknown section \"modle\"; did you mean [model]?");
  EXPECT_EQ(error_of("layers = 3\n"), "model.toml:1:1: unknown section \"layers\"; did you mean [model]?");
}

TEST(Config, RefusesWrongTypesAndRanges) {
  EXPECT_EQ(error_of("[model]\nlayers = \"3\"\n"),
            "model.toml:2:10: model.layers: use a whole number, 1 or more");
  EXPECT_EQ(error_of("[model]\nlayers = 0\n"),
            "model.toml:2:10: model.layers: use a whole number, 1 or more");
  EXPECT_EQ(error_of("[train]\nbeta1 = 2\n"), "model.toml:2:9: train.beta1: use a number from 0 to 1");
  EXPECT_EQ(error_of("[train]\nbeta1 = nan\n"), "model.toml:2:9: train.beta1: use a number from 0 to 1");
  EXPECT_EQ(error_of("[train]\nrecompute = true\n"),
            "model.toml:2:13: train.recompute: use \"none\" or \"full\"");
  EXPECT_EQ(error_of("model = 3\n"), "model.toml:1:1: model: write a section, [model]");
}

TEST(Config, RefusesContradictionsAndBadToml) {
  EXPECT_EQ(error_of("[moe]\nexperts = 4\ntop_k = 5\n"),
            "model.toml:3:9: moe.top_k: at most the 4 experts that a token may choose from");
  EXPECT_EQ(error_of("[moe]\nexperts = 4\ngroups = 3\n"),
            "model.toml:3:10: moe.groups: must divide moe.experts, 4, evenly");
  EXPECT_EQ(error_of("[model\n").rfind("model.toml:1:", 0), 0U);
  EXPECT_NE(failure_of([] { (void)load_config("no/such.toml"); }).find("no/such.toml: cannot read"),
            std::string::npos);
}

TEST(Config, CanonicalTextHoldsWhatDecidesTheNumbers) {
  const std::string before = canonical_text(Config{});
  Config config;
  config.train.steps += 1;
  config.train.recompute = Recompute::kFull;
  EXPECT_EQ(canonical_text(config), before);
  config.train.learning_rate *= 2;
  EXPECT_NE(canonical_text(config), before);
}

TEST(Config, ShippedFilesAreValid) {
  EXPECT_NO_THROW((void)tiny_config());
  EXPECT_GT(parse_config(kDefaultConfig, "default").model.hidden, tiny_config().model.hidden);
}

// Parameters of a shipped preset; declared, not allocated.
std::int64_t parameters_of(const std::string& preset) {
  const auto path = terrace::test::source_dir() / "examples/moe_trainer/configs" / (preset + ".toml");
  const Config config = load_config(path.string());
  Rig rig({});
  return Model(rig.session(), config).parameter_count();
}

TEST(Config, PresetsHaveTheSizesTheyAreNamedFor) {
  EXPECT_NEAR(static_cast<double>(parameters_of("small")), 300e6, 30e6);
  EXPECT_GT(parameters_of("slice"), 3'000'000'000);
  EXPECT_GT(parameters_of("k3-layer"), 29'000'000'000);
}

TEST(Config, ReadsLists) {
  const Config config = parse_config("[lora]\nrank = 4\ntargets = [\"kda.q\", \"moe.fc2\"]\n", "x");
  EXPECT_EQ(config.lora.targets, (std::vector<std::string>{"kda.q", "moe.fc2"}));
  EXPECT_NE(canonical_text(config).find("lora.targets = kda.q moe.fc2"), std::string::npos);
  EXPECT_NE(error_of("[lora]\nrank = 4\ntargets = \"kda.q\"\n").find("use a list of names"),
            std::string::npos);
  EXPECT_NE(error_of("[lora]\nrank = 4\n").find("go together"), std::string::npos);
}

TEST(Config, ReadsChoices) {
  const Config config = parse_config(
      "[model]\nresidual = \"attnres\"\n[moe]\nbalance = \"quantile\"\n[train]\ncompute = \"bf16\"\n", "x");
  EXPECT_EQ(config.model.residual, ResidualKind::kAttnRes);
  EXPECT_EQ(config.moe.balance, Balance::kQuantile);
  EXPECT_EQ(config.train.compute, Dtype::kBf16);
  EXPECT_EQ(error_of("[train]\ncompute = \"fp8\"\n"),
            "model.toml:2:11: train.compute: use \"fp32\" or \"bf16\"");
  EXPECT_EQ(error_of("[model]\nlayers = 40\nresidual = \"attnres\"\nresidual_block = 2\n"),
            "model.toml:4:18: model.residual_block: makes 20 blocks of 40 layers; at most 15");
  EXPECT_EQ(error_of("[moe]\nexperts = 4\ntop_k = 4\nbalance = \"quantile\"\n"),
            "model.toml:4:11: moe.balance: \"quantile\" needs more experts than moe.top_k");
}

}  // namespace
}  // namespace terrace::trainer::test
