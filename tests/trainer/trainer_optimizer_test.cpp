#include "examples/moe_trainer/optimizer.hpp"

#include <cmath>
#include <limits>

#include "examples/moe_trainer/ops/muon.hpp"
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
TEST(Optimizer, WhatIsSteppedLastIsAskedForLate) {
  using Order = std::vector<std::size_t>;
  const auto order = [](const std::vector<std::int64_t>& numbers) { return update_order(numbers); };
  // An embedding, eight layers and a head: backward makes the head's and the last layer's gradients first.
  EXPECT_EQ(order({1, 100, 100, 100, 100, 100, 100, 100, 100, 1}), Order({9, 8, 6, 5, 4, 0, 1, 2, 3, 7}));
  const Order deep = order(std::vector<std::int64_t>(60, 100));
  EXPECT_EQ(Order(deep.begin(), deep.begin() + 3), Order({59, 58, 54})) << "a thirty-second is made first";
  EXPECT_EQ(Order(deep.end() - 4, deep.end()), Order({19, 55, 56, 57}));
  EXPECT_EQ(order({5}), Order({0}));
  EXPECT_EQ(order({5, 5}), Order({1, 0}));
  EXPECT_EQ(order({}), Order());
}

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

Rig::Options with_muon() {
  Rig::Options options;
  options.config.train.optimizer = OptimizerKind::kMuon;
  return options;
}

// One expert of a stack stepped by itself, by the operator alone.
std::vector<float> stepped_alone(Rig& rig, const TrainConfig& config, const Parameter& stack,
                                 std::int64_t which) {
  Trainer& trainer = rig.trainer();
  const std::int64_t rows = stack.shape[1], columns = stack.shape[2], count = rows * columns;
  const Tensor value = trainer.memory().zeros(1, count, Pool::kScratch);
  const Tensor momentum = trainer.memory().zeros(1, count, Pool::kScratch);
  rig.write(value.f32(), rig.read(stack.value + which * count, count));
  muon_step(trainer.ops(), trainer.memory(), rig.session().compute(),
            {.matrices = 1,
             .rows = rows,
             .columns = columns,
             .parameter = value.f32(),
             .gradient = stack.gradient + which * count,
             .momentum = momentum.f32(),
             .learning_rate = static_cast<float>(learning_rate_at(config, 1)),
             .momentum_factor = static_cast<float>(config.muon_momentum),
             .weight_decay = static_cast<float>(config.weight_decay),
             .products = config.compute});
  return rig.read(value.f32(), count);
}

TEST(Optimizer, MuonStepsTheMatricesOfLayersEachExpertByItself) {
  const Rig::Options options = with_muon();
  Rig rig(options);
  Trainer& trainer = rig.trainer();
  const Parameter& stack = parameter_named(trainer, "layer.0.moe.fc2");
  const Parameter& router = parameter_named(trainer, "layer.0.moe.router");
  const Parameter& norm = parameter_named(trainer, "layer.0.mixer_norm");
  const Parameter& embedding = parameter_named(trainer, "embedding");
  EXPECT_EQ(stack.v, nullptr);  // momentum is all its state
  for (const Parameter* other : {&router, &norm, &embedding}) EXPECT_NE(other->v, nullptr);
  std::vector<float> gradient(static_cast<std::size_t>(stack.count()));
  const CounterRandom random({.seed = 5, .stream = "gradient"});
  for (std::size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = static_cast<float>(random.uniform(i)) - 0.5F;
  rig.write(stack.gradient, gradient);
  const std::vector<float> start = rig.read(stack.value, stack.count());
  const std::vector<float> routed = rig.read(router.value, router.count());
  std::vector<float> expected;
  for (std::int64_t expert = 0; expert < stack.shape[0]; ++expert) {
    const std::vector<float> one = stepped_alone(rig, options.config.train, stack, expert);
    expected.insert(expected.end(), one.begin(), one.end());
  }
  Optimizer optimizer(options.config.train, trainer.memory(), trainer.model().groups());
  optimizer.step(trainer.ops(), {.model = 1, .indexers = 1});
  EXPECT_EQ(rig.read(stack.value, stack.count()), expected);
  EXPECT_NE(expected, start);
  // Without a gradient AdamW only decays.
  const double kept = 1 - learning_rate_at(options.config.train, 1) * options.config.train.weight_decay;
  const std::vector<float> after = rig.read(router.value, router.count());
  for (std::size_t i = 0; i < after.size(); ++i) ASSERT_NEAR(after[i], routed[i] * kept, 1e-6);
}

TEST(Optimizer, MuonTrainsInBothTypesAndTheCopyFollows) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = with_muon();
    options.config.train.compute = compute;
    options.config.train.learning_rate = 1e-2;
    Rig rig(options);
    const std::vector<float> losses = rig.steps(30);
    EXPECT_LT(losses.back(), 0.85F * losses.front());
    if (compute == Dtype::kF32) continue;
    const Parameter& stack = parameter_named(rig.trainer(), "layer.1.moe.fc2");
    const std::vector<float> value = rig.read(stack.value, stack.count());
    const std::vector<float> copy =
        rig.read(reinterpret_cast<const float*>(stack.copy), (stack.count() + 1) / 2);
    const auto* rounded = reinterpret_cast<const Bf16*>(copy.data());
    for (std::size_t i = 0; i < value.size(); ++i)
      ASSERT_EQ(to_float(rounded[i]), to_float(to_bf16(value[i])));
  }
}

TEST(Optimizer, MuonWantsItsStateInHbm) {
  Rig::Options options = with_muon();
  options.optimizer = {.tier = StateTier::kDdr};
  try {
    Rig rig(options);
    FAIL() << "accepted";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("train.optimizer"), std::string::npos);
  }
}

}  // namespace
}  // namespace terrace::trainer::test
