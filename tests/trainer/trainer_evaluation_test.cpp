// Losses on text that is not trained on, and adapters on a model that was trained before.
#include "examples/moe_trainer/evaluation.hpp"

#include <cmath>
#include <filesystem>
#include <string>

#include "examples/moe_trainer/base.hpp"
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

TEST(Evaluation, ChangesNoBitOfTheTraining) {
  for (const Balance balance : {Balance::kSign, Balance::kQuantile}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      Rig::Options options;
      options.config.moe.balance = balance;
      options.config.train.recompute = recompute;
      options.swapcore = SwapMode::kAuto;
      Rig alone(options);
      Rig evaluated(options);
      const Corpus held_out = Corpus::from_text(sample_text(900), "held out");
      Evaluator evaluator(evaluated.session(), evaluated.trainer().memory(), evaluated.trainer().config(),
                          held_out);
      for (int i = 0; i < 5; ++i) {
        const double first = evaluator.loss(evaluated.trainer().model(), evaluated.trainer().ops());
        EXPECT_EQ(evaluator.loss(evaluated.trainer().model(), evaluated.trainer().ops()), first);
        EXPECT_EQ(evaluated.trainer().step(), alone.trainer().step()) << "step " << i;
      }
    }
  }
}

// On a text of one sequence a step has nothing else to draw.
TEST(Evaluation, IsTheLossThatAStepWouldHave) {
  Rig::Options options;
  options.text = sample_text(static_cast<std::size_t>(options.config.train.length) + 1);
  Rig rig(options);
  const Corpus held_out = Corpus::from_text(options.text, "held out");
  Evaluator evaluator(rig.session(), rig.trainer().memory(), rig.trainer().config(), held_out);
  for (int i = 0; i < 3; ++i) {
    const double loss = evaluator.loss(rig.trainer().model(), rig.trainer().ops());
    EXPECT_NEAR(loss, static_cast<double>(rig.trainer().step()), 2e-6 * loss);
  }
}

TEST(Evaluation, RefusesTextShorterThanASequence) {
  Rig rig({});
  const Corpus held_out = Corpus::from_text("short", "held out");
  EXPECT_NE(failure_of([&] {
              Evaluator(rig.session(), rig.trainer().memory(), rig.trainer().config(), held_out);
            }).find("--evaluate"),
            std::string::npos);
}

class Base : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path()); }
  [[nodiscard]] static std::string path() {
    return (std::filesystem::path(::testing::TempDir()) / "base-of-adapters.safetensors").string();
  }
  [[nodiscard]] static Rig::Options adapted() {
    Rig::Options options;
    options.config.lora = {.rank = 4, .targets = {"kda.q", "moe.fc2"}};
    options.base = path();
    return options;
  }
};

TEST_F(Base, BeginsWhereItsTrainingEnded) {
  Rig trained({});
  (void)trained.steps(4);
  trained.trainer().save(path());
  Rig rig(adapted());
  const Corpus held_out = Corpus::from_text(sample_text(900), "held out");
  Evaluator of_base(trained.session(), trained.trainer().memory(), trained.trainer().config(), held_out);
  Evaluator of_adapted(rig.session(), rig.trainer().memory(), rig.trainer().config(), held_out);
  EXPECT_EQ(of_adapted.loss(rig.trainer().model(), rig.trainer().ops()),
            of_base.loss(trained.trainer().model(), trained.trainer().ops()));
  (void)rig.steps(3);
  EXPECT_NE(rig.trainer().base_fingerprint(), 0U);
  EXPECT_EQ(base_fingerprint(rig.session(), rig.trainer().model()), rig.trainer().base_fingerprint());
}

TEST_F(Base, RefusesWhatIsNoBaseOfThisModel) {
  Rig::Options other = adapted();
  {
    Rig trained({});
    trained.trainer().save(path());
  }
  other.config.model.hidden = 48;
  EXPECT_NE(failure_of([&] { Rig rig(other); }).find("model.hidden"), std::string::npos);
  {
    Rig::Options alone = adapted();
    alone.base.clear();
    Rig adapters(alone);
    adapters.trainer().save(path());
  }
  EXPECT_NE(failure_of([&] { Rig rig(adapted()); }).find("adapters alone"), std::string::npos);
}

}  // namespace
}  // namespace terrace::trainer::test
