// Adapters on a base that is kept in blocks of 8-bit numbers.
#include <filesystem>

#include "examples/moe_trainer/base.hpp"
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

// More experts than are widened together, the last piece a short one.
Rig::Options on_blocks(Dtype compute) {
  Rig::Options options;
  options.config.moe.experts = 20;
  options.config.moe.top_k = 4;
  options.config.lora = {
      .rank = 4, .targets = {"kda.q", "dsa.out", "moe.fc1_gate", "moe.fc2"}, .base = LoraBase::kInt8};
  options.config.train.compute = compute;
  return options;
}

struct Frozen {
  std::int64_t numbers = 0, bytes = 0, scales = 0;
};
// Of the matrices in blocks; nothing else than the embedding, the head and the routers is frozen in full.
Frozen in_blocks(Rig& rig) {
  Frozen all;
  for (const auto& group : rig.trainer().model().groups()) {
    for (const Parameter& p : group->parameters()) {
      if (!p.in_blocks()) continue;
      EXPECT_EQ(p.value, nullptr) << p.name;
      EXPECT_EQ(p.copy, nullptr) << p.name;
      all.numbers += p.count();
      all.bytes += (p.count() + 63) / 64 * 64;
      all.scales += p.scale_count();
    }
  }
  return all;
}

TEST(LoraBase, LearnsAndLeavesTheBlocksAsTheyWere) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = on_blocks(compute);
    options.config.train.learning_rate = 2e-2;
    Rig rig(options);
    const std::uint64_t before = base_fingerprint(rig.session(), rig.trainer().model());
    const auto losses = rig.steps(18);
    EXPECT_LT(losses.back(), losses.front());
    EXPECT_EQ(base_fingerprint(rig.session(), rig.trainer().model()), before);
  }
}

TEST(LoraBase, BeginsCloseToTheModelThatItRounds) {
  Rig blocks(on_blocks(Dtype::kF32));
  Rig::Options full = on_blocks(Dtype::kF32);
  full.config.lora.base = LoraBase::kAsModel;
  Rig whole(full);
  const float want = whole.trainer().step();
  const float got = blocks.trainer().step();
  EXPECT_NEAR(got, want, 0.01 * want);
  EXPECT_NE(got, want);
}

TEST(LoraBase, TakesTheBytesOfItsBlocks) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = on_blocks(compute);
    Rig blocks(options);
    options.config.lora.base = LoraBase::kAsModel;
    Rig whole(options);
    const Frozen frozen = in_blocks(blocks);
    EXPECT_GT(frozen.numbers, 50'000);
    const auto weights = [](Rig& rig) {
      return static_cast<std::int64_t>(
          rig.session().hbm_usage().live_by_pool[static_cast<std::size_t>(Pool::kWeights)].count());
    };
    const std::int64_t saved = frozen.bytes * (bytes_of(compute) - 1) - frozen.scales * 4;
    // Of each group's arenas the ends are rounded to what the allocator gives.
    EXPECT_NEAR(static_cast<double>(weights(whole) - weights(blocks)), static_cast<double>(saved),
                0.02 * static_cast<double>(saved));
  }
}

TEST(LoraBase, GivesTheSameBitsHoweverActivationsAreKept) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = on_blocks(compute);
    Rig kept(options);
    options.config.train.recompute = Recompute::kFull;
    Rig recomputed(options);
    options.swapcore = SwapMode::kAuto;
    Rig cached(options);
    const auto losses = kept.steps(4);
    EXPECT_EQ(recomputed.steps(4), losses);
    EXPECT_EQ(cached.steps(4), losses);
  }
}

TEST(LoraBase, ReadsAllOfACheckpointAndResumes) {
  const std::filesystem::path folder = ::testing::TempDir();
  const std::string base = (folder / "whole.safetensors").string();
  const std::string adapters = (folder / "adapters.safetensors").string();
  Rig::Options options = on_blocks(Dtype::kBf16);
  // Stacks larger than what a checkpoint is read in, in rows that do not divide it: pieces end within rows.
  options.config.model.layers = 1;
  options.config.lora.targets = {"kda.q", "moe.fc2"};
  options.config.moe.latent = 112;
  options.config.moe.expert_width = 1000;
  {
    Rig::Options whole = options;
    whole.config.lora = {};
    whole.seed = 9;
    Rig rig(whole);
    (void)rig.steps(1);
    rig.trainer().save(base);
  }
  Rig::Options full = options;
  full.base = options.base = base;
  full.config.lora.base = LoraBase::kAsModel;
  Rig rounded(options);
  Rig exact(full);
  const auto losses = rounded.steps(4);
  EXPECT_NEAR(losses.front(), exact.trainer().step(), 0.01 * losses.front());
  {
    Rig first(options);
    EXPECT_EQ(first.steps(2), std::vector<float>(losses.begin(), losses.begin() + 2));
    first.trainer().save(adapters);
  }
  Rig second(options);
  second.trainer().resume(adapters);
  EXPECT_EQ(second.steps(2), std::vector<float>(losses.begin() + 2, losses.end()));
  std::filesystem::remove(base);
  std::filesystem::remove(adapters);
}

// Heads multiply their parts of two matrices from either side.
TEST(LoraBase, ServesLatentAttentionOfEitherKind) {
  for (const std::int64_t index_heads : {0, 2}) {
    Rig::Options options = on_blocks(Dtype::kF32);
    options.config.model.kinds.assign(2, {MixerKind::kMla, FfnKind::kMoe});
    options.config.mla = {.heads = 2,
                          .q_rank = 24,
                          .kv_rank = 16,
                          .nope_width = 8,
                          .rope_width = 8,
                          .value_width = 16,
                          .rope_theta = 1e4,
                          .index_heads = index_heads,
                          .index_width = 16,
                          .index_top_k = 8};
    options.config.lora.targets = {"mla.q", "moe.fc2"};
    options.config.train.learning_rate = 2e-2;
    Rig blocks(options);
    options.config.lora.base = LoraBase::kAsModel;
    Rig whole(options);
    const auto losses = blocks.steps(18);
    EXPECT_LT(losses.back(), losses.front());
    EXPECT_NEAR(losses.front(), whole.trainer().step(), 0.01 * losses.front());
  }
}

TEST(LoraBase, IsForAFrozenModel) {
  const auto failure = [](const std::string& text) {
    return failure_of([&] { (void)parse_config(text, "file"); });
  };
  EXPECT_NE(failure("[lora]\nbase = \"int8\"\n").find("file:2:8: lora.base: \"int8\" is for a frozen model"),
            std::string::npos);
  EXPECT_NE(failure("[lora]\nbase = \"int4\"\n").find("use \"same\" or \"int8\""), std::string::npos);
  EXPECT_NE(failure("[train]\ncompute = \"bf16\"\n[moe]\ncompute = \"fp8\"\n[lora]\nrank = 2\n"
                    "targets = [\"kda.q\"]\nbase = \"int8\"\n")
                .find("moe.compute = \"fp8\""),
            std::string::npos);
}

}  // namespace
}  // namespace terrace::trainer::test
