// Optimizer state and experts in DDR: the bits of a run that has all of it in HBM, inside a budget that would
// not hold it, and through checkpoints.
#include <filesystem>

#include "tests/trainer/tiers_rig.hpp"

namespace terrace::trainer::test {
namespace {

namespace fs = std::filesystem;

// Recomputation and Swap Core change no bit, so all of these are one run's.
void expect_same_numbers(const Rig::Options& resident, const Rig::Options& tiered, const std::string& what) {
  const Numbers expected = numbers_of(resident);
  ASSERT_NE(expected.losses.front(), expected.losses.back());
  for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
    for (const SwapMode swapcore : {SwapMode::kOff, SwapMode::kAuto}) {
      Rig::Options options = tiered;
      options.config.train.recompute = recompute;
      options.swapcore = swapcore;
      EXPECT_TRUE(numbers_of(options) == expected)
          << what << (recompute == Recompute::kFull ? ", recomputed" : "")
          << (swapcore == SwapMode::kAuto ? ", with Swap Core" : "");
    }
  }
}

TEST(OptimizerTier, StepsToTheSameBits) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    for (const double clip : {0.05, 0.0}) {
      Rig::Options resident = plain(compute);
      resident.config.train.clip_norm = clip;
      Rig::Options tiered = resident;
      tiered.optimizer = kStateInDdr;
      expect_same_numbers(resident, tiered, std::string(name_of(compute)) + ", clip " + std::to_string(clip));
    }
  }
}

TEST(OptimizerTier, StepsAdaptersAndIndexersThatWarmUp) {
  Rig::Options resident = adapters(Dtype::kBf16, LoraBase::kAsModel);
  Rig::Options tiered = resident;
  tiered.optimizer = kStateInDdr;
  expect_same_numbers(resident, tiered, "adapters");
  resident = plain(Dtype::kBf16);
  resident.config.dsa.warmup_steps = 2;
  tiered = resident;
  tiered.optimizer = kStateInDdr;
  expect_same_numbers(resident, tiered, "warm-up");
}

TEST(OptimizerTier, GradientsOfExpertsAddUpToTheSameBits) {
  struct Case {
    Dtype compute;
    double clip;
    int micro_batches;
  };
  for (const Case& one : {Case{Dtype::kF32, 0.05, 3}, Case{Dtype::kBf16, 0.05, 1}, Case{Dtype::kBf16, 0, 3},
                          Case{Dtype::kF32, 0, 1}}) {
    Rig::Options resident = plain(one.compute);
    resident.config.train.clip_norm = one.clip;
    resident.config.train.micro_batches = one.micro_batches;
    Rig::Options tiered = resident;
    tiered.optimizer = kGradientsInDdr;
    expect_same_numbers(resident, tiered,
                        std::string(name_of(one.compute)) + ", clip " + std::to_string(one.clip));
  }
  Rig::Options resident = plain(Dtype::kBf16);
  resident.config.dsa.warmup_steps = 1;
  Rig::Options tiered = resident;
  tiered.optimizer = kGradientsInDdr;
  expect_same_numbers(resident, tiered, "warm-up");
}

TEST(OptimizerTier, TakesGradientsOfExpertsOutOfHbm) {
  Rig::Options options = plain(Dtype::kBf16);
  options.optimizer = kStateInDdr;
  Rig there(options);
  options.optimizer = kGradientsInDdr;
  Rig away(options);
  EXPECT_EQ(there.steps(2), away.steps(2));
  const auto gradients = [](const PoolUsage& usage) {
    return usage.live_by_pool[static_cast<std::size_t>(Pool::kGradient)];
  };
  // Two layers of five have room for theirs.
  EXPECT_LT(gradients(away.session().hbm_usage()).count() * 3,
            gradients(there.session().hbm_usage()).count() * 2);
  EXPECT_GT(gradients(away.session().ddr_usage()), 0_B);
}

TEST(OptimizerTier, TakesTheStateOutOfHbm) {
  Rig resident(plain(Dtype::kBf16));
  Rig::Options options = plain(Dtype::kBf16);
  options.optimizer = kStateInDdr;
  Rig tiered(options);
  (void)resident.steps(2);
  (void)tiered.steps(2);
  const auto live = [](Rig& rig, Pool pool) {
    return rig.session().hbm_usage().live_by_pool[static_cast<std::size_t>(pool)];
  };
  EXPECT_LT(live(tiered, Pool::kOptimizer) * 2, live(resident, Pool::kOptimizer));
  EXPECT_LT(live(tiered, Pool::kWeights) * 2, live(resident, Pool::kWeights)) << "the fp32 values stayed";
  EXPECT_GT(tiered.session().ddr_usage().live, live(resident, Pool::kOptimizer));
}

TEST(ExpertStore, SpreadsWhatStays) {
  const auto staying = [](std::vector<Bytes> layers, Bytes resident) {
    std::string text;
    for (const StateTier tier : ExpertStore::spread(layers, resident))
      text += tier == StateTier::kHbm ? 'h' : 'd';
    return text;
  };
  const std::vector<Bytes> eight(8, 3_MiB);
  EXPECT_EQ(staying(eight, 24_MiB), "hhhhhhhh");
  EXPECT_EQ(staying(eight, 0_B), "dddddddd");
  EXPECT_EQ(staying(eight, 6_MiB), "dddhdddh");
  EXPECT_EQ(staying(eight, 12_MiB), "dhdhdhdh");
  EXPECT_EQ(staying(eight, 13_MiB), "dhdhdhdh") << "a layer stays whole or not at all";
  EXPECT_EQ(staying({0_B, 4_MiB, 0_B, 4_MiB}, 4_MiB), "hdhh") << "a layer without experts takes none of it";
}

TEST(ExpertStore, FrozenExpertsGiveTheSameBits) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    for (const LoraBase base : {LoraBase::kAsModel, LoraBase::kInt8}) {
      const Rig::Options resident = adapters(compute, base);
      Rig::Options tiered = resident;
      tiered.experts = streamed(0);
      expect_same_numbers(resident, tiered, std::string(name_of(compute)) + " adapters");
      tiered.experts = streamed(0.4, 2);
      tiered.optimizer = kStateInDdr;
      expect_same_numbers(resident, tiered, std::string(name_of(compute)) + " adapters, two stay");
    }
  }
}

TEST(ExpertStore, TrainedExpertsGiveTheSameBits) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    for (const double clip : {0.05, 0.0}) {
      Rig::Options resident = plain(compute);
      resident.config.train.clip_norm = clip;
      Rig::Options tiered = resident;
      tiered.optimizer = kStateInDdr;
      tiered.experts = streamed(0.2, clip > 0 ? 1 : 3);
      expect_same_numbers(resident, tiered, std::string(name_of(compute)) + ", clip " + std::to_string(clip));
    }
  }
}

// Weights four times the budget.
TEST(ExpertStore, AModelOfFourTimesTheBudgetRuns) {
  Rig::Options large = adapters(Dtype::kBf16, LoraBase::kAsModel);
  large.config.model.layers = 24;
  large.config.moe.experts = 20;
  large.config.moe.latent = 64;
  large.config.moe.expert_width = 128;
  large.config.lora.targets = {"kda.q", "dsa.out"};
  large.config.train.recompute = Recompute::kFull;
  Rig::Options small = large;
  small.budget = 5_MiB;
  Rig resident(large);
  EXPECT_GT(resident.session().hbm_usage().live, small.budget * 4);
  const std::vector<float> expected = resident.steps(3);
  for (const ExpertLoad load : {ExpertLoad::kLayer, ExpertLoad::kRouter}) {
    small.experts = streamed(load == ExpertLoad::kLayer ? 0 : 0.05, 1, load);
    Rig tiered(small);
    EXPECT_EQ(tiered.steps(3), expected);
    EXPECT_LE(tiered.session().hbm_usage().mapped_peak, small.budget);
  }
}

TEST(ExpertStore, SaysWhatItDoesNotDo) {
  Rig::Options options = plain(Dtype::kBf16);
  options.experts = streamed(0.5);
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("[optimizer]"), std::string::npos);
  options.optimizer.gradients = StateTier::kDdr;
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("optimizer.gradients"), std::string::npos);
  options.optimizer = kStateInDdr;
  options.config.moe.compute = ExpertCompute::kFp8;
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("moe.compute"), std::string::npos);
  options.config.moe.compute = ExpertCompute::kAsModel;
  options.ddr = Amount::of(64_KiB);
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("[ddr] budget"), std::string::npos);
}

// A checkpoint says nothing of tiers: what one wrote the other goes on from.
TEST(Tiers, CheckpointsGoFromOneToTheOther) {
  const fs::path folder = fs::path(::testing::TempDir()) / "checkpoint-tiers";
  fs::remove_all(folder);
  fs::create_directories(folder);
  const std::string path = (folder / "run.safetensors").string();
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options[2] = {plain(compute), plain(compute)};
    options[1].optimizer = kStateInDdr;
    options[1].experts = streamed(0.2);
    const Numbers expected = numbers_of(options[0], 4);
    for (const int from : {0, 1}) {
      for (const int to : {0, 1}) {
        {
          Rig first(options[from]);
          (void)first.steps(2);
          first.trainer().save(path);
          EXPECT_EQ(first.steps(2), std::vector<float>(expected.losses.begin() + 2, expected.losses.end()))
              << "saving changed the run";
        }
        Rig second(options[to]);
        (void)second.steps(1);  // what it resumes over
        second.trainer().resume(path);
        const Numbers rest = numbers_of(second, 2);
        EXPECT_EQ(rest.losses, std::vector<float>(expected.losses.begin() + 2, expected.losses.end()));
        EXPECT_TRUE(rest.lasting == expected.lasting) << from << " to " << to;
      }
    }
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace terrace::trainer::test
