// Attention residuals, and the ways in which routers are balanced, inside the whole model.
#include <algorithm>
#include <cmath>

#include "tests/trainer/rig_checks.hpp"

namespace terrace::trainer::test {
namespace {

constexpr int kSteps = 5;

// Three blocks of two layers, but for the last.
Rig::Options attention_residuals() {
  Rig::Options options;
  options.config.model.layers = 5;
  options.config.model.residual = ResidualKind::kAttnRes;
  options.config.model.residual_block = 2;
  return options;
}

double norm_of(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

TEST(AttentionResiduals, GiveTheSameBitsHoweverActivationsAreKept) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = attention_residuals();
    options.config.train.compute = compute;
    const auto losses = expect_same_bits_however_kept(options, kSteps);
    EXPECT_LT(losses.back(), losses.front());
  }
}

// Everything chosen, so that the loss is smooth; a step along the gradient changes the loss as it says.
TEST(AttentionResiduals, GradientAgreesWithFiniteDifferences) {
  Rig::Options options = attention_residuals();
  Config& config = options.config;
  config.moe.top_k = config.moe.experts;
  config.moe.balance_rate = 0;
  config.dsa.top_k = config.train.length;
  config.dsa.index_loss_weight = 0;
  config.train.learning_rate = 0;
  config.train.final_learning_rate = 0;
  config.train.micro_batches = 1;
  options.text = sample_text(static_cast<std::size_t>(config.train.length) + 1);
  Rig rig(options);
  int checked = 0;
  for (const auto& group : rig.trainer().model().groups()) {
    for (const Parameter& parameter : group->parameters()) {
      const bool of_the_mix = parameter.name.find("mix.") != std::string::npos;
      if (!of_the_mix && parameter.name != "embedding" && parameter.name.find("norm") == std::string::npos)
        continue;
      if (parameter.name.find("index") != std::string::npos) continue;
      std::vector<float> start = rig.read(parameter.value, parameter.count());
      if (parameter.name.find("query") != std::string::npos) {  // away from zero, where it begins
        for (std::size_t i = 0; i < start.size(); ++i) start[i] = 0.3F * std::sin(static_cast<float>(i));
        rig.write(parameter.value, start);
      }
      (void)rig.trainer().step();
      const auto gradient = rig.read(parameter.gradient, parameter.count());
      const double norm = norm_of(gradient);
      if (norm == 0) continue;  // a norm under a query that is still zero
      const double reach = std::clamp(6e-4 / norm, 0.003, 0.03);
      const auto loss_at = [&](double distance) {
        std::vector<float> moved = start;
        for (std::size_t i = 0; i < moved.size(); ++i) {
          moved[i] += static_cast<float>(distance * gradient[i] / norm);
        }
        rig.write(parameter.value, moved);
        return static_cast<double>(rig.trainer().step());
      };
      const double near = loss_at(reach) - loss_at(-reach);
      const double far = loss_at(2 * reach) - loss_at(-2 * reach);
      rig.write(parameter.value, start);
      EXPECT_NEAR((8 * near - far) / (12 * reach), norm, 0.01 * norm + 1.5e-6 / reach) << parameter.name;
      ++checked;
    }
  }
  EXPECT_GT(checked, 20);
}

// Without sublayers' say the two kinds of stream differ: the configuration is not ignored.
TEST(AttentionResiduals, AreNotPlainOnes) {
  Rig::Options options = attention_residuals();
  Rig mixed(options);
  options.config.model.residual = ResidualKind::kPlain;
  Rig plain(options);
  EXPECT_NE(mixed.trainer().step(), plain.trainer().step());
}

std::vector<float> biases(Rig& rig) {
  for (const NamedArray& array : rig.trainer().model().arrays()) {
    if (array.parameter == nullptr) return rig.read(array.value, array.shape[0]);
  }
  return {};
}

TEST(Balance, QuantilesMoveTheBiasAndKeepTheBits) {
  Rig::Options options;
  options.config.moe.balance = Balance::kQuantile;
  Rig kept(options);
  options.config.train.recompute = Recompute::kFull;
  Rig recomputed(options);
  EXPECT_EQ(kept.steps(kSteps), recomputed.steps(kSteps));
  const auto bias = biases(kept);
  ASSERT_FALSE(bias.empty());
  EXPECT_GT(norm_of(bias), 0.0);
  double sum = 0;
  for (const float b : bias) sum += b;
  EXPECT_NEAR(sum, 0, 1e-4) << "centred";
}

TEST(Balance, SequenceLossReachesTheRouter) {
  Rig::Options options;
  Rig without(options);
  options.config.moe.sequence_loss_weight = 1;
  Rig with(options);
  EXPECT_EQ(with.trainer().step(), without.trainer().step()) << "it is no part of the reported loss";
  int routers = 0;
  for (std::size_t g = 0; g < with.trainer().model().groups().size(); ++g) {
    const auto& a = with.trainer().model().groups()[g]->parameters();
    const auto& b = without.trainer().model().groups()[g]->parameters();
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (a[i].name.find("moe.router") == std::string::npos) continue;
      EXPECT_NE(with.read(a[i].gradient, a[i].count()), without.read(b[i].gradient, b[i].count()));
      ++routers;
    }
  }
  EXPECT_EQ(routers, 2);
}

}  // namespace
}  // namespace terrace::trainer::test
