#include "examples/moe_trainer/checkpoint.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "runtime/fault.hpp"
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

namespace fs = std::filesystem;

class Checkpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / (name_of_test());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  // A parameter's place follows a slash.
  static std::string name_of_test() {
    std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(name.begin(), name.end(), '/', '-');
    return "checkpoint-" + name;
  }
  [[nodiscard]] std::string path() const { return (folder_ / "run.safetensors").string(); }
  [[nodiscard]] std::string refusal(const Rig::Options& options) const {
    return failure_of([&] {
      Rig rig(options);
      rig.trainer().resume(path());
    });
  }
  [[nodiscard]] std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}));
  }

  fs::path folder_;
};

class ResumedBy : public Checkpoint, public ::testing::WithParamInterface<OptimizerKind> {};
INSTANTIATE_TEST_SUITE_P(Checkpoint, ResumedBy,
                         ::testing::Values(OptimizerKind::kAdamW, OptimizerKind::kMuon));

TEST_P(ResumedBy, HasTheSameLosses) {
  Rig::Options options;
  options.config.train.optimizer = GetParam();
  Rig whole(options);
  const auto losses = whole.steps(6);
  {
    Rig first(options);
    (void)first.steps(3);
    first.trainer().save(path());
  }
  EXPECT_EQ(files(), 1U) << "something was left beside it";
  options.config.train.recompute = Recompute::kFull;  // decides no number, so it may change
  Rig second(options);
  second.trainer().resume(path());
  EXPECT_EQ(second.trainer().steps_done(), 3);
  EXPECT_EQ(second.steps(3), std::vector<float>(losses.begin() + 3, losses.end()));
  EXPECT_EQ(read_checkpoint_info(path()).steps_done, 3);
  EXPECT_EQ(read_checkpoint_info(path()).seed, options.seed);
}

TEST_F(Checkpoint, RefusesWhatDoesNotFit) {
  Rig::Options options;
  {
    Rig rig(options);
    (void)rig.steps(1);
    rig.trainer().save(path());
  }
  Rig::Options other = options;
  other.config.model.hidden = 48;
  EXPECT_NE(refusal(other).find("model.hidden"), std::string::npos);
  other = options;
  other.config.train.learning_rate *= 2;
  EXPECT_NE(refusal(other).find("train.learning_rate"), std::string::npos);
  other = options;
  other.seed = 9;
  EXPECT_NE(refusal(other).find("--seed 1"), std::string::npos);
  other = options;
  other.text += "more";
  EXPECT_NE(refusal(other).find("--data"), std::string::npos);
}

TEST_F(Checkpoint, RefusesDamagedFiles) {
  const Rig::Options options;
  EXPECT_NE(refusal(options).find(path()), std::string::npos);
  {
    Rig rig(options);
    rig.trainer().save(path());
  }
  const auto size = fs::file_size(path());
  for (const std::uintmax_t left :
       {size - 1, size / 2, std::uintmax_t{100}, std::uintmax_t{4}, std::uintmax_t{0}}) {
    fs::resize_file(path(), left);
    EXPECT_NE(refusal(options).find(path()), std::string::npos) << left << " bytes left";
  }
  std::ofstream(path(), std::ios::binary)
      << "this is a text, not a checkpoint, and long enough to hold a header";
  EXPECT_NE(refusal(options).find(path()), std::string::npos);
}

TEST_F(Checkpoint, AFailedWriteKeepsThePreviousOne) {
  Rig rig({});
  (void)rig.steps(1);
  rig.trainer().save(path());
  (void)rig.steps(1);
  for (const FaultPoint point : {FaultPoint::kFileWrite, FaultPoint::kFileRename}) {
    const ScopedFaults faults(fail_call(point, 1));
    EXPECT_NE(failure_of([&] { rig.trainer().save(path()); }).find(path()), std::string::npos);
    EXPECT_TRUE(faults.fired());
    EXPECT_EQ(read_checkpoint_info(path()).steps_done, 1);
    EXPECT_EQ(files(), 1U) << "the broken file was left";
  }
  rig.trainer().save(path());
  EXPECT_EQ(read_checkpoint_info(path()).steps_done, 2);
}

TEST_F(Checkpoint, SaysWhenTheDiskIsFull) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  Rig rig({});
  EXPECT_NE(failure_of([&] { rig.trainer().save("/dev/full/run.safetensors"); }).find("/dev/full"),
            std::string::npos);
}

}  // namespace
}  // namespace terrace::trainer::test
