#include "examples/moe_trainer/optimizer.hpp"

#include <cmath>
#include <limits>

#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

TEST(LearningRate, WarmsUpAndFallsAlongACosine) {
  TrainConfig config;
  config.warmup_steps = 10;
  config.schedule_steps = 110;
  config.learning_rate = 1;
  config.final_learning_rate = 0.1;
  EXPECT_NEAR(learning_rate_at(config, 1), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate_at(config, 10), 1, 1e-12);
  EXPECT_NEAR(learning_rate_at(config, 60), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate_at(config, 110), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate_at(config, 1000), 0.1, 1e-12);
  config.warmup_steps = 0;
  EXPECT_LT(learning_rate_at(config, 1), 1);
}

const Parameter& parameter_named(Trainer& trainer, const std::string& name) {
  for (const auto& group : trainer.model().groups()) {
    for (const Parameter& parameter : group->parameters()) {
      if (parameter.name == name) return parameter;
    }
  }
  throw std::runtime_error("no parameter " + name);
}

TEST(Parameters, StartFromTheSeed) {
  Rig first({.seed = 1});
  Rig same({.seed = 1});
  Rig other({.seed = 2});
  const auto values = [](Rig& rig, const char* name) {
    const Parameter& parameter = parameter_named(rig.trainer(), name);
    return rig.read(parameter.value, parameter.count());
  };
  EXPECT_EQ(values(first, "layer.0.kda.q"), values(same, "layer.0.kda.q"));
  EXPECT_NE(values(first, "layer.0.kda.q"), values(other, "layer.0.kda.q"));
  EXPECT_NE(values(first, "layer.0.kda.q"), values(first, "layer.0.kda.k"));
  double squares = 0;
  const auto matrix = values(first, "layer.0.kda.q");
  for (const float x : matrix) squares += static_cast<double>(x) * x;
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(matrix.size())), 1 / std::sqrt(32.0), 0.02);
}

// With no gradient and no moments a step only decays, and vectors do not.
TEST(Optimizer, DecaysMatricesOnly) {
  Rig rig({});
  Trainer& trainer = rig.trainer();
  TrainConfig config;
  config.learning_rate = 0.5;
  config.warmup_steps = 1;
  config.weight_decay = 0.1;
  const Parameter& matrix = parameter_named(trainer, "layer.0.moe.fc2");
  const Parameter& vector = parameter_named(trainer, "layer.0.mixer_norm");
  const auto before = rig.read(matrix.value, matrix.count());
  Optimizer optimizer(config, trainer.memory(), trainer.model().groups());
  optimizer.step(trainer.ops(), {.model = 1, .indexers = 1});
  const auto after = rig.read(matrix.value, matrix.count());
  for (std::size_t i = 0; i < before.size(); ++i) ASSERT_NEAR(after[i], before[i] * 0.95F, 1e-6F);
  for (const float x : rig.read(vector.value, vector.count())) EXPECT_EQ(x, 1.0F);
}

// However large the gradient, the clipped one's moments are bounded by the clip.
TEST(Optimizer, ClipsByTheNormOfAllGradients) {
  Rig rig({});
  Trainer& trainer = rig.trainer();
  TrainConfig config;
  config.clip_norm = 2;
  config.beta1 = 0;
  const Parameter& one = parameter_named(trainer, "layer.0.moe.fc2");
  const Parameter& two = parameter_named(trainer, "head");
  std::vector<float> gradient(static_cast<std::size_t>(one.count()), 0.0F);
  gradient[0] = 300;
  rig.write(one.gradient, gradient);
  gradient.assign(static_cast<std::size_t>(two.count()), 0.0F);
  gradient[0] = 400;
  rig.write(two.gradient, gradient);
  Optimizer(config, trainer.memory(), trainer.model().groups())
      .step(trainer.ops(), {.model = 1, .indexers = 1});
  EXPECT_NEAR(rig.read(one.m, 1)[0], 2 * 0.6F, 1e-5F);
  EXPECT_NEAR(rig.read(two.m, 1)[0], 2 * 0.8F, 1e-5F);
}

}  // namespace
}  // namespace terrace::trainer::test
