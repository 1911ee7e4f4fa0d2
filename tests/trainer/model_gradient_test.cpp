// The whole model's backward against finite differences of its loss, parameter by parameter.
#include <algorithm>
#include <cmath>

#include "tests/trainer/model_folders.hpp"
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

// Every choice is forced (all experts, all tokens), so that the loss is smooth; weights never move; the text
// is one sequence long, so that every step sees the same.
Rig::Options smooth() {
  Rig::Options options;
  Config& config = options.config;
  config.moe.top_k = config.moe.experts;
  config.moe.balance_rate = 0;
  config.dsa.top_k = config.train.length;
  config.dsa.index_loss_weight = 0;
  config.train.learning_rate = 0;
  config.train.final_learning_rate = 0;
  options.text = sample_text(static_cast<std::size_t>(config.train.length) + 1);
  return options;
}

double norm_of(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

// dL/de of L(w + e d), d the gradient's direction: the gradient's norm, if backward is right.
double measured_slope(Rig& rig, const Parameter& parameter, const std::vector<float>& gradient,
                      double reach) {
  const std::vector<float> start = rig.read(parameter.value, parameter.count());
  const double norm = norm_of(gradient);
  const auto loss_at = [&](double distance) {
    std::vector<float> moved = start;
    for (std::size_t i = 0; i < moved.size(); ++i) {
      moved[i] += static_cast<float>(distance * gradient[i] / norm);
    }
    rig.write(parameter.value, moved);
    return static_cast<double>(rig.trainer().step());
  };
  // Central, of fourth order: the third derivative cancels.
  const double near = loss_at(reach) - loss_at(-reach);
  const double far = loss_at(2 * reach) - loss_at(-2 * reach);
  const double slope = (8 * near - far) / (12 * reach);
  rig.write(parameter.value, start);
  return slope;
}

// Every parameter's gradient, but of those named `without`; returns how many there were.
int check_gradients(Rig& rig, const std::string& without = "nothing") {
  int checked = 0;
  for (const auto& group : rig.trainer().model().groups()) {
    for (const Parameter& parameter : group->parameters()) {
      if (parameter.name.find(without) != std::string::npos) continue;
      (void)rig.trainer().step();
      const std::vector<float> gradient = rig.read(parameter.gradient, parameter.count());
      const double norm = norm_of(gradient);
      EXPECT_TRUE(std::isfinite(norm)) << parameter.name;
      if (parameter.name.find(".index_") != std::string::npos) {
        EXPECT_EQ(norm, 0.0) << parameter.name << " learns from the index loss only";
        continue;
      }
      EXPECT_GT(norm, 0.0) << parameter.name << " gets no gradient";
      if (!(norm > 0)) continue;
      // Far enough to rise above the loss's rounding (3e-7), near enough for short queries, which l2norm
      // bends.
      const double reach = std::clamp(6e-4 / norm, 0.003, 0.03);
      const double noise = 1.5e-6 / reach;
      EXPECT_NEAR(measured_slope(rig, parameter, gradient, reach), norm, 0.01 * norm + noise)
          << parameter.name;
      ++checked;
    }
  }
  return checked;
}

TEST(ModelGradient, AgreesWithFiniteDifferences) {
  Rig rig(smooth());
  EXPECT_NEAR(rig.trainer().step(), std::log(256.0), 0.3);
  EXPECT_GT(check_gradients(rig), 40);
}

TEST(ModelGradient, AgreesWhereLayersShareAChoice) {
  Rig::Options options = smooth();
  options.config.model.layers = 3;
  options.config.model.dsa_every = 1;
  options.config.dsa.select_every = 2;
  Rig rig(options);
  EXPECT_GT(check_gradients(rig), 40);
}

// With routers of zeros all weights are equal: each expert drops its latest slots, whatever else moves a
// little, and the loss is smooth. The routers themselves would break the ties.
TEST(ModelGradient, AgreesWhereExpertsDropSlots) {
  Rig::Options options = smooth();
  Rig exact(options);
  options.config.moe.capacity = 0.75;
  Rig limited(options);
  for (Rig* rig : {&exact, &limited}) {
    for (const auto& group : rig->trainer().model().groups()) {
      for (const Parameter& parameter : group->parameters()) {
        if (parameter.name.find("moe.router") == std::string::npos) continue;
        rig->write(parameter.value, std::vector<float>(static_cast<std::size_t>(parameter.count()), 0.0F));
      }
    }
  }
  EXPECT_NE(exact.trainer().step(), limited.trainer().step());
  EXPECT_GT(check_gradients(limited, "moe.router"), 40);
}

class FamilyGradient : public ::testing::TestWithParam<std::string> {};

TEST_P(FamilyGradient, AgreesWithFiniteDifferences) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / ("gradient-" + GetParam());
  std::filesystem::remove_all(folder);
  nlohmann::json description = small_description(GetParam());
  const bool kimi = GetParam() == "kimi_linear";
  description[kimi ? "num_experts_per_token" : "num_experts_per_tok"] = 4;
  description["n_group"] = 1;
  description["index_topk"] = 1000;
  make_model_folder(folder, description);
  Rig::Options options = smooth();
  options.model = folder.string();
  {
    Rig rig(options);
    EXPECT_GT(check_gradients(rig), 20);
  }
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(All, FamilyGradient, ::testing::ValuesIn(kFamilyNames),
                         [](const auto& info) { return info.param; });

// The index loss reaches the indexer's weights and nothing else.
TEST(ModelGradient, IndexLossTeachesTheIndexerAlone) {
  Rig::Options options = smooth();
  options.config.dsa.top_k = 8;
  Rig without(options);
  options.config.dsa.index_loss_weight = 1;
  Rig with(options);
  EXPECT_EQ(with.trainer().step(), without.trainer().step());
  for (std::size_t g = 0; g < with.trainer().model().groups().size(); ++g) {
    const auto& taught = with.trainer().model().groups()[g]->parameters();
    const auto& untaught = without.trainer().model().groups()[g]->parameters();
    for (std::size_t i = 0; i < taught.size(); ++i) {
      const auto gradient = with.read(taught[i].gradient, taught[i].count());
      if (taught[i].name.find("dsa.index_bias") != std::string::npos) continue;  // shifts no softmax by much
      if (taught[i].name.find("dsa.index") != std::string::npos) {
        EXPECT_GT(norm_of(gradient), 0.0) << taught[i].name;
      } else {
        EXPECT_EQ(gradient, without.read(untaught[i].gradient, untaught[i].count())) << taught[i].name;
      }
    }
  }
}

TEST(ModelGradient, AddsUpOverMicroBatches) {
  Rig::Options options = smooth();
  options.config.train.micro_batches = 1;
  Rig one(options);
  options.config.train.micro_batches = 3;
  Rig three(options);
  EXPECT_NEAR(one.trainer().step(), three.trainer().step(), 1e-5);
  const Parameter& a = one.trainer().model().groups()[1]->parameters()[0];
  const Parameter& b = three.trainer().model().groups()[1]->parameters()[0];
  const auto left = one.read(a.gradient, a.count());
  const auto right = three.read(b.gradient, b.count());
  for (std::size_t i = 0; i < left.size(); ++i)
    ASSERT_NEAR(left[i], right[i], 1e-5F + 1e-4F * std::abs(left[i]));
}

}  // namespace
}  // namespace terrace::trainer::test
