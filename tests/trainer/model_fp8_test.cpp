// Experts' products in 8 bits: near the bf16 run, the same bits however activations are kept, and really in 8
// bits.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "tests/trainer/rig_checks.hpp"

namespace terrace::trainer::test {
namespace {

constexpr int kSteps = 8;

Rig::Options in(ExpertCompute compute) {
  Rig::Options options;
  options.config.train.compute = Dtype::kBf16;
  options.config.moe.compute = compute;
  return options;
}

// With fp8 nothing but numbers differs: no choice of experts or tokens can fall the other way.
Rig::Options without_choices(ExpertCompute compute) {
  Rig::Options options = in(compute);
  options.config.moe.top_k = options.config.moe.experts;
  options.config.dsa.top_k = options.config.train.length;
  return options;
}

TEST(Fp8Config, IsRead) {
  const Config config = parse_config("[moe]\ncompute = \"fp8\"\n[train]\ncompute = \"bf16\"\n", "x");
  EXPECT_EQ(config.moe.compute, ExpertCompute::kFp8);
  EXPECT_NE(canonical_text(config).find("moe.compute = fp8\n"), std::string::npos);
  EXPECT_NE(canonical_text(Config{}).find("moe.compute = same\n"), std::string::npos);
}

TEST(Fp8Config, NeedsBf16) {
  const auto error_of = [](const char* toml) { return failure_of([&] { (void)parse_config(toml, "x"); }); };
  EXPECT_EQ(error_of("[moe]\ncompute = \"fp8\"\n"),
            "x:2:11: moe.compute: \"fp8\" needs train.compute = \"bf16\"");
  EXPECT_EQ(error_of("[moe]\ncompute = \"bf16\"\n"), "x:2:11: moe.compute: use \"same\" or \"fp8\"");
}

TEST(Fp8, FollowsTheBf16Run) {
  Rig half(in(ExpertCompute::kAsModel));
  Rig quarter(in(ExpertCompute::kFp8));
  const auto want = half.steps(kSteps);
  const auto got = quarter.steps(kSteps);
  for (int i = 0; i < kSteps; ++i) {
    ASSERT_TRUE(std::isfinite(got[i])) << "step " << i;
    EXPECT_NEAR(got[i], want[i], 0.02F * want[i]) << "step " << i;
  }
  EXPECT_LT(got.back(), got.front());
}

struct Difference {
  double off = 0, size = 0;  // squares
  void add(const std::vector<float>& got, const std::vector<float>& want) {
    for (std::size_t j = 0; j < want.size(); ++j) {
      off += std::pow(static_cast<double>(got[j]) - want[j], 2);
      size += std::pow(static_cast<double>(want[j]), 2);
    }
  }
  [[nodiscard]] double relative() const { return off == 0 ? 0 : std::sqrt(off / size); }
};

TEST(Fp8, GradientsAreThoseOfBf16WithinItsPrecision) {
  Rig half(without_choices(ExpertCompute::kAsModel));
  Rig quarter(without_choices(ExpertCompute::kFp8));
  const auto want_loss = half.steps(1);
  const auto got_loss = quarter.steps(1);
  EXPECT_NEAR(got_loss[0], want_loss[0], 0.01F * want_loss[0]);
  EXPECT_NE(got_loss, want_loss);
  // Rounding an operand to 3 bits of mantissa costs 2.6%, a product of two 3.7%; a gradient has come through
  // several.
  Difference all;
  for (std::size_t g = 0; g < half.trainer().model().groups().size(); ++g) {
    const auto& exact = half.trainer().model().groups()[g]->parameters();
    const auto& rounded = quarter.trainer().model().groups()[g]->parameters();
    for (std::size_t i = 0; i < exact.size(); ++i) {
      // What the indexer learns is a small difference of probabilities.
      if (exact[i].name.find("dsa.index") != std::string::npos) continue;
      Difference one;
      one.add(quarter.read(rounded[i].gradient, rounded[i].count()),
              half.read(exact[i].gradient, exact[i].count()));
      EXPECT_LT(one.relative(), 0.16) << exact[i].name;
      all.off += one.off;
      all.size += one.size;
    }
  }
  EXPECT_LT(all.relative(), 0.07);
  EXPECT_GT(all.relative(), 0.002);
}

TEST(Fp8, GivesTheSameBitsHoweverActivationsAreKept) {
  (void)expect_same_bits_however_kept(in(ExpertCompute::kFp8), kSteps);
}

// The second run's 8-bit weights are its own until the resume.
TEST(Fp8, ResumesWithTheSameLosses) {
  const std::string path = expect_resumes(in(ExpertCompute::kFp8), "fp8");
  const std::string refused = failure_of([&] {
    Rig other(in(ExpertCompute::kAsModel));
    other.trainer().resume(path);
  });
  EXPECT_NE(refused.find("moe.compute"), std::string::npos) << refused;
  std::filesystem::remove(path);
}

// Passes everything on and counts what concerns grouped products.
class CountingOps final : public Ops {
 public:
  explicit CountingOps(Ops& ops) : ops_(ops) {}
#define TERRACE_COUNT_OP(Op)                       \
  void run(Stream stream, const Op& op) override { \
    ++counts_[#Op];                                \
    ops_.run(stream, op);                          \
  }
  TERRACE_TRAINER_OPS(TERRACE_COUNT_OP)
#undef TERRACE_COUNT_OP
  void grouped_forward(Stream stream, const GroupedMatmul& op) override {
    ++counts_["GroupedMatmul"];
    ops_.grouped_forward(stream, op);
  }
  void grouped_input_gradient(Stream stream, const GroupedMatmul& op) override {
    ++counts_["GroupedMatmul"];
    ops_.grouped_input_gradient(stream, op);
  }
  double gemm_flops_per_second(std::int64_t rows, std::int64_t width) override {
    return ops_.gemm_flops_per_second(rows, width);
  }
  // Since the last call.
  [[nodiscard]] std::map<std::string, int> take() { return std::exchange(counts_, {}); }

 private:
  Ops& ops_;
  std::map<std::string, int> counts_;
};

// What one step launches.
std::map<std::string, int> launches_of_step(Rig& rig) {
  Trainer& trainer = rig.trainer();
  const Config& config = trainer.config();
  CountingOps ops(trainer.ops());
  const Tensor tokens = trainer.memory().zeros(2, config.tokens(), Pool::kActivation);  // ids, labels
  const Tensor loss = trainer.memory().zeros(1, 1, Pool::kActivation);
  rig.session().begin_step();
  for (std::uint32_t i = 0; i < config.train.micro_batches; ++i) {
    const Pass pass{.session = rig.session(),
                    .memory = trainer.memory(),
                    .ops = ops,
                    .stream = rig.session().compute(),
                    .recompute = config.train.recompute,
                    .compute = config.train.compute,
                    .phase = Phase::kForward,
                    .micro_batch = i};
    MicroBatch batch;
    batch.ids = tokens.as<const std::int32_t>();
    batch.labels = batch.ids + config.tokens();
    batch.counted = config.tokens_per_step();
    trainer.model().train(pass, batch, loss.f32());
  }
  rig.session().end_step();
  return ops.take();
}

TEST(Fp8, EveryProductOfAnExpertsWeightsIsInEightBits) {
  constexpr int kLayers = 2, kMicroBatches = 2, kMatrices = 3;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
    Rig::Options options = in(ExpertCompute::kFp8);
    options.config.train.recompute = recompute;
    Rig rig(options);
    const int forwards = recompute == Recompute::kFull ? 2 : 1;
    for (int step = 0; step < 2; ++step) {
      auto counts = launches_of_step(rig);
      EXPECT_EQ(counts["GroupedMatmulFp8"], kLayers * kMicroBatches * kMatrices * (forwards + 1));
      // gate and up read the same rows, and their gradients lie together: two a direction.
      EXPECT_EQ(counts["QuantiseRows"], kLayers * kMicroBatches * 2 * (forwards + 1));
      EXPECT_EQ(counts["QuantiseWeights"], kLayers * kMatrices) << "once a step";
      EXPECT_EQ(counts["GroupedMatmul"], 0);
      EXPECT_EQ(counts["GroupedWeightGradient"], kLayers * kMicroBatches * kMatrices);
    }
  }
  Rig rig(in(ExpertCompute::kAsModel));
  auto counts = launches_of_step(rig);
  EXPECT_EQ(counts["GroupedMatmul"], kLayers * kMicroBatches * kMatrices * 2);
  EXPECT_EQ(counts["GroupedMatmulFp8"] + counts["QuantiseRows"] + counts["QuantiseWeights"], 0);
}

Rig::Options adapted() {
  Rig::Options options = in(ExpertCompute::kFp8);
  options.config.lora = {.rank = 4, .targets = {"moe.fc1_gate", "moe.fc2"}};
  return options;
}

TEST(Fp8, AdaptersLearnOnQuantisedExperts) {
  Rig::Options options = adapted();
  options.config.train.learning_rate = 2e-2;
  Rig rig(options);
  Rig without(in(ExpertCompute::kFp8));
  const auto losses = rig.steps(3 * kSteps);
  EXPECT_EQ(losses[0], without.trainer().step());
  EXPECT_LT(losses.back(), losses.front());
  options.config.train.recompute = Recompute::kFull;
  Rig recomputed(options);
  EXPECT_EQ(recomputed.steps(kSteps), std::vector<float>(losses.begin(), losses.begin() + kSteps));
}

TEST(Fp8, FrozenWeightsAreQuantisedOnce) {
  Rig rig(adapted());
  EXPECT_EQ(launches_of_step(rig)["QuantiseWeights"], 2 * 3);
  auto later = launches_of_step(rig);
  EXPECT_EQ(later["QuantiseWeights"], 0);
  EXPECT_GT(later["GroupedMatmulFp8"], 0);
  EXPECT_GT(later["GroupedMatmul"], 0);  // of the adapters
}

}  // namespace
}  // namespace terrace::trainer::test
