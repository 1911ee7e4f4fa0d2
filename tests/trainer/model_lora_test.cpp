// Adapters on a frozen model.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "tests/trainer/rig_checks.hpp"

namespace terrace::trainer::test {
namespace {

constexpr int kSteps = 6;

Rig::Options adapted(Dtype compute = Dtype::kF32) {
  Rig::Options options;
  options.config.lora = {.rank = 4, .targets = {"kda.q", "dsa.out", "moe.down", "moe.fc1_gate", "moe.fc2"}};
  options.config.train.compute = compute;
  return options;
}

bool is_adapter(const Parameter& parameter) { return parameter.m != nullptr; }

std::map<std::string, std::vector<float>> frozen_bits(Rig& rig) {
  std::map<std::string, std::vector<float>> all;
  for (const NamedArray& array : rig.trainer().model().arrays()) {
    if (array.parameter == nullptr) {
      all[array.name] = rig.read(array.value, array.shape[0]);
    } else if (!is_adapter(*array.parameter)) {
      const bool rounded = array.value == nullptr;  // read as half as many floats
      const std::int64_t count = array.parameter->count();
      all[array.name] = rounded ? rig.read(reinterpret_cast<const float*>(array.parameter->copy), count / 2)
                                : rig.read(array.value, count);
    }
  }
  return all;
}

TEST(Lora, BeginsAsTheModelItIsPutOn) {
  Rig with(adapted());
  Rig without({});
  EXPECT_EQ(with.trainer().step(), without.trainer().step());
}

TEST(Lora, LearnsAndLeavesTheModelAsItWas) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = adapted(compute);
    options.config.train.learning_rate = 2e-2;
    Rig rig(options);
    const auto before = frozen_bits(rig);
    EXPECT_GT(before.size(), 30U);
    const auto losses = rig.steps(3 * kSteps);
    EXPECT_LT(losses.back(), losses.front());
    EXPECT_EQ(frozen_bits(rig), before);
    int adapters = 0;
    for (const NamedArray& array : rig.trainer().model().arrays()) {
      if (array.parameter == nullptr || !is_adapter(*array.parameter)) continue;
      const auto values = rig.read(array.value, array.parameter->count());
      EXPECT_TRUE(std::any_of(values.begin(), values.end(), [](float x) { return x != 0; })) << array.name;
      ++adapters;
    }
    // A pair for each: kda.q and dsa.out in one layer each, three of the experts in both.
    EXPECT_EQ(adapters, 2 * (2 + 3 * 2));
  }
}

TEST(Lora, GivesTheSameBitsHoweverActivationsAreKept) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    (void)expect_same_bits_however_kept(adapted(compute), kSteps);
  }
}

TEST(Lora, GradientAgreesWithFiniteDifferences) {
  Rig::Options options = adapted();
  Config& config = options.config;
  config.moe.top_k = config.moe.experts;
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
      if (!is_adapter(parameter)) continue;
      std::vector<float> start = rig.read(parameter.value, parameter.count());
      if (parameter.name.find(".up") + 3 == parameter.name.size()) {  // away from zero
        for (std::size_t i = 0; i < start.size(); ++i) start[i] = 0.1F * std::sin(static_cast<float>(i));
        rig.write(parameter.value, start);
      }
    }
    for (const Parameter& parameter : group->parameters()) {
      if (!is_adapter(parameter)) continue;
      const std::vector<float> start = rig.read(parameter.value, parameter.count());
      (void)rig.trainer().step();
      const auto gradient = rig.read(parameter.gradient, parameter.count());
      double norm = 0;
      for (const float g : gradient) norm += static_cast<double>(g) * g;
      norm = std::sqrt(norm);
      ASSERT_GT(norm, 0) << parameter.name;
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
  EXPECT_EQ(checked, 16);
}

TEST(Lora, ResumesWithTheSameLosses) {
  std::filesystem::remove(expect_resumes(adapted(Dtype::kBf16), "lora"));
}

TEST(Lora, TakesLessMemory) {
  Rig with(adapted());
  Rig without({});
  (void)with.steps(2);
  (void)without.steps(2);
  EXPECT_LT(with.session().hbm_usage().live_peak, without.session().hbm_usage().live_peak);
}

TEST(Lora, NamesATargetThatIsNotThere) {
  Rig::Options options = adapted();
  options.config.lora.targets.emplace_back("kda.x");
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("\"kda.x\""), std::string::npos);
}

}  // namespace
}  // namespace terrace::trainer::test
