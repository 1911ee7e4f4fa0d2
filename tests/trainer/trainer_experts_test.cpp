// Experts that come one by one, hot ones that stay, and which of both ways is taken: the bits of a run with
// all of them in HBM.
#include "examples/moe_trainer/base.hpp"
#include "runtime/fault.hpp"
#include "swapcore/streamed/load_choice.hpp"
#include "tests/trainer/tiers_rig.hpp"

namespace terrace::trainer::test {
namespace {

// Few tokens and many experts: most of them idle.
Rig::Options idle_experts(Dtype compute) {
  Rig::Options options = adapters(compute, LoraBase::kAsModel);
  options.config.moe.experts = 32;
  options.config.train.batch = 1;
  options.config.train.length = 6;
  return options;
}

Rig::Options with(Rig::Options options, Policy::Experts experts) {
  options.experts = experts;
  return options;
}

TEST(ExpertLoading, FrozenExpertsGiveTheSameBits) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    for (const LoraBase base : {LoraBase::kAsModel, LoraBase::kInt8}) {
      Rig::Options resident = idle_experts(compute);
      resident.config.lora.base = base;
      const Numbers expected = numbers_of(resident);
      for (const ExpertLoad load : {ExpertLoad::kRouter, ExpertLoad::kAuto}) {
        for (const double share : {0.0, 0.3}) {
          for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
            Rig::Options tiered = with(resident, streamed(share, 1 + static_cast<int>(recompute), load));
            tiered.config.train.recompute = recompute;
            EXPECT_TRUE(numbers_of(tiered) == expected)
                << name_of(compute) << " by " << name_of(load) << ", " << share << " resident";
          }
        }
      }
    }
  }
}

TEST(ExpertLoading, TrainedExpertsGiveTheSameBits) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    for (const double clip : {0.05, 0.0}) {
      Rig::Options resident = plain(compute);
      resident.config.train.clip_norm = clip;
      const Numbers expected = numbers_of(resident);
      for (const ExpertLoad load : {ExpertLoad::kRouter, ExpertLoad::kAuto}) {
        for (const Policy::Optimizer& optimizer : {kStateInDdr, kGradientsInDdr}) {
          Rig::Options tiered = with(resident, streamed(0.3, 2, load));
          tiered.config.train.recompute = Recompute::kFull;
          tiered.optimizer = optimizer;
          EXPECT_TRUE(numbers_of(tiered) == expected)
              << name_of(compute) << " by " << name_of(load) << ", clip " << clip;
        }
      }
    }
  }
}

TEST(ExpertLoading, ByRouterWhatHasNoTokensStaysAtHome) {
  Rig whole(with(idle_experts(Dtype::kBf16), streamed(0, 1, ExpertLoad::kLayer)));
  Rig fired(with(idle_experts(Dtype::kBf16), streamed(0, 1, ExpertLoad::kRouter)));
  EXPECT_EQ(whole.steps(3), fired.steps(3));
  const ExpertStore& store = *fired.trainer().model().expert_store();
  const double share = store.report().fired_share;
  EXPECT_GT(share, 0.05);
  EXPECT_LT(share, 0.7) << "twelve choices among 32 experts";
  EXPECT_LT(store.counters().fetched.count(),
            whole.trainer().model().expert_store()->counters().fetched.count() * 7 / 10);
}

TEST(ExpertLoading, HotExpertsDoNotCrossTheLink) {
  Rig none(with(idle_experts(Dtype::kBf16), streamed(0, 1, ExpertLoad::kRouter)));
  Rig some(with(idle_experts(Dtype::kBf16), streamed(0.5, 1, ExpertLoad::kRouter)));
  EXPECT_EQ(none.steps(6), some.steps(6));
  const ExpertStore& store = *some.trainer().model().expert_store();
  const Bytes moved = store.counters().fetched,
              all = none.trainer().model().expert_store()->counters().fetched;
  EXPECT_GT(store.counters().from_kept, 0_B);
  // Half of the experts by chance would leave half of the bytes: the hot half is more than that.
  EXPECT_LT(moved.count() * 2, all.count());
}

// Trained ones too: the update renews the copies.
TEST(ExpertLoading, AnUpdateReachesTheCopiesOfHotExperts) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = plain(compute);
    options.optimizer = kStateInDdr;
    Rig none(with(options, streamed(0, 1, ExpertLoad::kRouter)));
    Rig most(with(options, streamed(0.8, 1, ExpertLoad::kRouter)));
    EXPECT_EQ(none.steps(4), most.steps(4));
    const auto fetched = [](Rig& rig) { return rig.trainer().model().expert_store()->counters().fetched; };
    EXPECT_LT(fetched(most).count() * 2, fetched(none).count());
  }
}

TEST(ExpertLoading, TheCheaperWayIsTaken) {
  // The link is all that counts, and few experts have tokens.
  Rig::Options options = with(idle_experts(Dtype::kBf16), streamed(0, 1, ExpertLoad::kAuto));
  options.config.moe.experts = 64;
  options.config.moe.expert_width = 128;
  options.link_bytes_per_second = 30e6;
  Rig sparse(options);
  (void)sparse.steps(4);
  const ExpertStore::Report report = sparse.trainer().model().expert_store()->report();
  EXPECT_EQ(report.load, ExpertLoad::kRouter);
  ASSERT_TRUE(report.break_even_share);
  EXPECT_LT(report.fired_share, *report.break_even_share);
  // A token for each expert and more: whole layers come in order.
  options.config.moe.experts = 4;
  options.config.train.length = 40;
  Rig dense(options);
  (void)dense.steps(4);
  EXPECT_EQ(dense.trainer().model().expert_store()->report().load, ExpertLoad::kLayer);
}

// Evaluations in between leave no trace, and a checkpoint none of where experts were.
TEST(ExpertLoading, AnEvaluationInBetweenChangesNothing) {
  Rig::Options options = with(idle_experts(Dtype::kBf16), streamed(0.3, 1, ExpertLoad::kRouter));
  const Numbers expected = numbers_of(options, 4);
  Rig rig(options);
  Numbers got{.losses = rig.steps(2), .lasting = {}};
  Tensor sum = rig.trainer().memory().zeros(1, 1, Pool::kWeights);
  Tensor ids = rig.trainer().memory().zeros(2, rig.trainer().config().tokens(), Pool::kWeights);
  const Pass pass{.session = rig.session(),
                  .memory = rig.trainer().memory(),
                  .ops = rig.trainer().ops(),
                  .stream = rig.session().compute(),
                  .compute = Dtype::kBf16};
  const MicroBatch batch{.ids = ids.as<const std::int32_t>(),
                         .labels = ids.as<const std::int32_t>() + rig.trainer().config().tokens(),
                         .counted = rig.trainer().config().tokens()};
  rig.trainer().model().evaluate(pass.in(Phase::kEvaluate), batch, sum.f32());
  const Numbers rest = numbers_of(rig, 2);
  got.losses.insert(got.losses.end(), rest.losses.begin(), rest.losses.end());
  EXPECT_EQ(got.losses, expected.losses);
  EXPECT_TRUE(rest.lasting == expected.lasting);
}

// DDR holds about half of the experts, the file the others.
Rig::Options with_file(Dtype compute, LoraBase base, ExpertLoad load) {
  Rig::Options options = with(idle_experts(compute), streamed(0.2, 1, load));
  options.config.lora.base = base;
  options.config.moe.latent = 32;
  options.config.model.layers = 3;
  // Three megabytes a layer, whatever a number takes: DDR blocks of less than one are carved from larger
  // ones.
  options.config.moe.expert_width = base == LoraBase::kInt8 ? 1024 : compute == Dtype::kF32 ? 256 : 512;
  options.ddr = Amount::of(7_MiB);
  options.nvme = {.path = ::testing::TempDir(), .budget = 12_MiB};
  return options;
}

TEST(ExpertsOnNvme, GiveTheSameBits) {
  struct Case {
    Dtype compute;
    LoraBase base;
    ExpertLoad load;
  };
  for (const Case& one : {Case{Dtype::kF32, LoraBase::kAsModel, ExpertLoad::kRouter},
                          Case{Dtype::kBf16, LoraBase::kAsModel, ExpertLoad::kLayer},
                          Case{Dtype::kBf16, LoraBase::kInt8, ExpertLoad::kRouter}}) {
    Rig::Options resident = with_file(one.compute, one.base, one.load);
    resident.ddr = {};
    resident.nvme = {};
    resident.experts = {};
    Rig in_hbm(resident);
    const std::uint64_t fingerprint = base_fingerprint(in_hbm.session(), in_hbm.trainer().model());
    Rig rig(with_file(one.compute, one.base, one.load));
    Model& model = rig.trainer().model();
    const std::string what = std::string(name_of(one.compute)) + " by " + name_of(one.load);
    EXPECT_EQ(base_fingerprint(rig.session(), model), fingerprint) << what;
    EXPECT_TRUE(numbers_of(rig, 2) == numbers_of(in_hbm, 2)) << what;
    EXPECT_GT(model.nvme_bytes(Pool::kExpert), 0_B) << what;
    EXPECT_GT(model.expert_store()->counters().from_tier, 0_B) << what;
    EXPECT_LE(rig.session().ddr_usage().mapped_peak, rig.session().ddr_usage().budget);
  }
}

// A model's folder or another base is written over what the seed made, by rows and not by experts.
TEST(ExpertsOnNvme, TakeOtherValues) {
  for (const LoraBase base : {LoraBase::kAsModel, LoraBase::kInt8}) {
    Rig::Options options = with_file(Dtype::kBf16, base, ExpertLoad::kLayer);
    Rig rig(options);
    options.ddr = {};
    options.nvme = {};
    Rig in_ddr(options);
    for (Rig* one : {&rig, &in_ddr}) {
      for (const auto& group : one->trainer().model().groups()) {
        for (const Parameter& p : group->parameters()) {
          if (p.holder != Holder::kExperts || p.trained()) continue;
          std::vector<float> values(static_cast<std::size_t>(p.count() / 2 / p.width() * p.width()));
          for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17) / 16;
          set_values(one->session(), p, p.width(), values);
          set_values(one->session(), p, p.count() - p.width(), std::span(values).first(p.width()));
        }
      }
    }
    EXPECT_EQ(base_fingerprint(rig.session(), rig.trainer().model()),
              base_fingerprint(in_ddr.session(), in_ddr.trainer().model()));
    EXPECT_EQ(rig.steps(1), in_ddr.steps(1));
  }
}

TEST(ExpertsOnNvme, StayInDdrWhereThereIsRoom) {
  Rig::Options options = with_file(Dtype::kBf16, LoraBase::kAsModel, ExpertLoad::kLayer);
  options.ddr = Amount::of(64_MiB);
  Rig rig(options);
  (void)rig.steps(1);
  EXPECT_EQ(rig.trainer().model().nvme_bytes(Pool::kExpert), 0_B);
}

TEST(ExpertsOnNvme, SayWhatIsMissing) {
  Rig::Options options = with_file(Dtype::kBf16, LoraBase::kAsModel, ExpertLoad::kLayer);
  options.nvme.budget = 256_KiB;
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("[nvme] budget"), std::string::npos);
  options.nvme = {.path = "/nonexistent/folder", .budget = 12_MiB};
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("/nonexistent/folder"), std::string::npos);
}

TEST(ExpertsOnNvme, EndCleanlyOrChangeNothing) {
  Rig::Options options = with_file(Dtype::kBf16, LoraBase::kAsModel, ExpertLoad::kLayer);
  options.config.model.layers = 2;
  options.ddr = Amount::of(6_MiB);
  const Numbers expected = numbers_of(options, 2);
  for (const FaultPoint point :
       {FaultPoint::kNvmeOpen, FaultPoint::kNvmeAllocate, FaultPoint::kNvmeSubmit, FaultPoint::kNvmeComplete,
        FaultPoint::kDeviceCopy, FaultPoint::kDeviceWait}) {
    bool fired = true;
    for (std::uint64_t nth = 1; fired; nth += 1 + nth / 2) {
      const ScopedFaults faults(fail_call(point, nth));
      try {
        EXPECT_TRUE(numbers_of(options, 2) == expected) << name_of(point) << " call " << nth;
      } catch (const std::exception& error) {
        EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      }
      fired = faults.fired();
    }
  }
}

}  // namespace
}  // namespace terrace::trainer::test
