// Optimizer state that DDR has no room for, on NVMe: the bits of a run that has all of it in HBM, inside the
// DDR budget, through checkpoints, and with the file failing.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <regex>

#include "runtime/fault.hpp"
#include "runtime/owned_fd.hpp"
#include "tests/trainer/tiers_rig.hpp"

namespace terrace::trainer::test {
namespace {

namespace fs = std::filesystem;

// Twenty megabytes of state, and no block in DDR of less than one.
Rig::Options large_state(Dtype compute) {
  Rig::Options options = plain(compute);
  options.config.model.layers = 3;
  options.config.moe.latent = 32;
  options.config.moe.expert_width = 768;
  options.capacity = 128_MiB;
  options.budget = 120_MiB;
  return options;
}

Rig::Options in_file(Rig::Options options, const Policy::Optimizer& optimizer, Bytes ddr) {
  options.optimizer = optimizer;
  options.ddr = Amount::of(ddr);
  options.nvme = {.path = ::testing::TempDir(), .budget = 24_MiB};
  return options;
}

Bytes state_in_ddr(Rig& rig) {
  return rig.session().ddr_usage().live_by_pool[static_cast<std::size_t>(Pool::kOptimizer)];
}

TEST(StateInFile, StepsToTheSameBits) {
  struct Case {
    Dtype compute;
    double clip;
    Policy::Optimizer optimizer;
    double resident;  // of the experts
    ExpertLoad load;
    Bytes ddr;
  };
  for (const Case& one : {Case{Dtype::kBf16, 0.05, kStateInDdr, 1, ExpertLoad::kLayer, 12_MiB},
                          Case{Dtype::kF32, 0, kStateInDdr, 1, ExpertLoad::kLayer, 12_MiB},
                          Case{Dtype::kBf16, 0, kStateInDdr, 0.2, ExpertLoad::kLayer, 16_MiB},
                          Case{Dtype::kF32, 0.05, kStateInDdr, 0.2, ExpertLoad::kRouter, 20_MiB},
                          Case{Dtype::kBf16, 0.05, kGradientsInDdr, 0.3, ExpertLoad::kAuto, 24_MiB},
                          Case{Dtype::kBf16, 0, kGradientsInDdr, 0, ExpertLoad::kRouter, 24_MiB}}) {
    Rig::Options resident = large_state(one.compute);
    resident.config.train.clip_norm = one.clip;
    const Numbers expected = numbers_of(resident);
    ASSERT_NE(expected.losses.front(), expected.losses.back());
    Rig::Options options = in_file(resident, one.optimizer, one.ddr);
    options.experts = streamed(one.resident, 1, one.load);
    for (const SwapMode swapcore : {SwapMode::kOff, SwapMode::kAuto}) {
      options.swapcore = swapcore;
      options.config.train.recompute = swapcore == SwapMode::kAuto ? Recompute::kFull : Recompute::kNone;
      Rig rig(options);
      const std::string what = std::string(name_of(one.compute)) + ", clip " + std::to_string(one.clip);
      EXPECT_TRUE(numbers_of(rig, kSteps) == expected) << what;
      const Bytes there = rig.trainer().model().nvme_bytes(Pool::kOptimizer);
      EXPECT_GT(there, state_in_ddr(rig)) << what << ": most of the state";
      const SlotRing::Counters& moved = rig.trainer().state()->counters();
      EXPECT_GE(moved.from_tier.count() * 10, there.count() * kSteps * 9) << what;
      EXPECT_GE(moved.to_tier.count() * 10, there.count() * kSteps * 9) << what;
      EXPECT_LE(rig.session().ddr_usage().mapped_peak, rig.session().ddr_usage().budget) << what;
    }
  }
}

TEST(StateInFile, StepsAdaptersAndIndexersThatWarmUp) {
  Rig::Options resident = large_state(Dtype::kBf16);
  resident.config.dsa.warmup_steps = 2;
  EXPECT_TRUE(numbers_of(in_file(resident, kStateInDdr, 12_MiB)) == numbers_of(resident)) << "warm-up";
  // Frozen experts take the file first; the adapters' state follows them there.
  Rig::Options frozen = adapters(Dtype::kBf16, LoraBase::kAsModel);
  frozen.config.moe.experts = 4;
  frozen.config.moe.latent = 32;
  frozen.config.moe.expert_width = 512;
  frozen.config.lora.rank = 32;
  const Numbers expected = numbers_of(frozen);
  Rig::Options options = in_file(frozen, kStateInDdr, 14_MiB);
  options.experts = streamed(0);
  Rig rig(options);
  EXPECT_TRUE(numbers_of(rig, kSteps) == expected) << "adapters";
  EXPECT_GT(rig.trainer().model().nvme_bytes(Pool::kExpert), 0_B);
  EXPECT_GT(rig.trainer().model().nvme_bytes(Pool::kOptimizer), 0_B);
}

TEST(StateInFile, StaysInDdrWhereThereIsRoom) {
  Rig rig(in_file(large_state(Dtype::kBf16), kStateInDdr, 64_MiB));
  (void)rig.steps(1);
  EXPECT_EQ(rig.trainer().model().nvme_bytes(Pool::kOptimizer), 0_B);
  EXPECT_EQ(rig.trainer().state()->counters().from_tier, 0_B);
}

// Experts are fetched no more often than without a file: none ahead of an update that a file holds up, to be
// fetched again behind it.
TEST(StateInFile, ExpertsAreFetchedBehindTheirUpdate) {
  Rig::Options options = in_file(large_state(Dtype::kBf16), kStateInDdr, 16_MiB);
  options.experts = streamed(0, 1);
  Rig file(options);
  options.ddr = Amount::of(64_MiB);
  Rig ddr(options);
  EXPECT_EQ(file.steps(4), ddr.steps(4));
  const auto fetched = [](Rig& rig) { return rig.trainer().model().expert_store()->counters().fetched; };
  EXPECT_LE(fetched(file), fetched(ddr));
}

TEST(StateInFile, SaysWhatWouldBeAccepted) {
  Rig::Options options = in_file(large_state(Dtype::kBf16), kStateInDdr, 12_MiB);
  options.nvme.budget = 1_MiB;
  const std::string text = failure_of([&] { Rig rig(options); });
  std::smatch found;
  ASSERT_TRUE(std::regex_search(text, found, std::regex("\\[nvme\\] budget = \"([0-9]+)MiB\""))) << text;
  EXPECT_NE(text.find("[ddr] budget"), std::string::npos) << text;
  options.nvme.budget = Bytes(std::stoull(found[1]) << 20);
  Rig accepted(options);
  (void)accepted.steps(1);
  options.nvme = {.path = "/nonexistent/folder", .budget = 24_MiB};
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("/nonexistent/folder"), std::string::npos);
  // Without a file the error names both ways out.
  options.nvme = {};
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("[nvme] budget"), std::string::npos);
}

TEST(StateInFile, CheckpointsGoFromOneToTheOther) {
  const std::string path = (fs::path(::testing::TempDir()) / "state-in-file.safetensors").string();
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options[2] = {large_state(compute), in_file(large_state(compute), kStateInDdr, 20_MiB)};
    options[1].experts = streamed(0.2);
    const Numbers expected = numbers_of(options[0], 4);
    const std::vector<float> last(expected.losses.begin() + 2, expected.losses.end());
    for (const auto& [from, to] : {std::pair{0, 1}, std::pair{1, 0}, std::pair{1, 1}}) {
      {
        Rig first(options[from]);
        (void)first.steps(2);
        first.trainer().save(path);
        EXPECT_EQ(first.steps(2), last) << "saving changed the run";
      }
      Rig second(options[to]);
      (void)second.steps(1);  // what it resumes over
      second.trainer().resume(path);
      const Numbers rest = numbers_of(second, 2);
      EXPECT_EQ(rest.losses, last) << from << " to " << to;
      EXPECT_TRUE(rest.lasting == expected.lasting) << from << " to " << to;
    }
  }
  fs::remove(path);
}

// Few chunks, so that each operation of the file can have its turn.
Rig::Options few_chunks() {
  Rig::Options options = in_file(plain(Dtype::kBf16), kStateInDdr, 5_MiB);
  options.config = small_config();
  options.config.train.compute = Dtype::kBf16;
  options.config.train.micro_batches = 1;
  options.nvme.budget = 2_MiB;
  return options;
}

std::vector<float> two_steps(const Rig::Options& options, const std::string&) {
  Rig rig(options);
  std::vector<float> losses = rig.steps(2);
  rig.trainer().settle();
  return losses;
}

// A step, its checkpoint and what goes on from it.
std::vector<float> save_and_resume(const Rig::Options& options, const std::string& path) {
  Rig rig(options);
  std::vector<float> losses = rig.steps(1);
  rig.trainer().save(path);
  rig.trainer().resume(path);
  for (const float loss : rig.steps(1)) losses.push_back(loss);
  rig.trainer().settle();
  return losses;
}

std::ptrdiff_t open_files() {
  const fs::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

// Each operation of the file fails in its turn, or of many each so manieth. Returns how many runs ended.
template <typename Run>
std::uint64_t fail_the_file(const Run& run, std::uint64_t of_many) {
  const std::string path = (fs::path(::testing::TempDir()) / "state-faults.safetensors").string();
  const Rig::Options options = few_chunks();
  const std::vector<float> expected = run(options, path);
  const std::ptrdiff_t open_before = open_files();
  std::uint64_t failures = 0;
  for (const FaultPoint point : {FaultPoint::kNvmeOpen, FaultPoint::kNvmeAllocate, FaultPoint::kNvmeSubmit,
                                 FaultPoint::kNvmeComplete}) {
    bool fired = true;
    for (std::uint64_t nth = 1; fired; nth += of_many) {
      const ScopedFaults faults(fail_call(point, nth));
      try {
        EXPECT_EQ(run(options, path), expected) << name_of(point) << " call " << nth;
      } catch (const Failure& failure) {
        ++failures;
        const std::string text = failure.what();
        EXPECT_EQ(text.find('\n'), std::string::npos) << text;
        EXPECT_NE(text.find("nvme"), std::string::npos) << text;
        EXPECT_EQ(failure.exit_code(), ExitCode::kFailed) << text;
      }
      EXPECT_EQ(open_files(), open_before) << name_of(point) << " call " << nth;
      fired = faults.fired();
    }
  }
  fs::remove(path);
  return failures;
}

TEST(StateInFile, NoFailureOfTheFileIsAWrongValue) {
  EXPECT_GT(fail_the_file(two_steps, 1), 100U) << "the file is asked more often than that";
}

TEST(StateInFile, NorWithCheckpoints) {
  EXPECT_GT(fail_the_file(save_and_resume, 11), 10U) << "the file is asked more often than that";
}

TEST(StateInFile, EndsCleanlyOrChangesNothing) {
  const Rig::Options options = few_chunks();
  const Numbers expected = numbers_of(options, 2);
  for (const FaultPoint point : {FaultPoint::kDeviceCopy, FaultPoint::kDeviceWait, FaultPoint::kDeviceRecord,
                                 FaultPoint::kDeviceCreateEvent, FaultPoint::kHostMap}) {
    bool fired = true;
    for (std::uint64_t nth = 1; fired; nth += 1 + nth / 4) {
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

// The file without a name, by its descriptor.
OwnedFd file_beneath() {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = fs::read_symlink(entry.path(), gone);
    if (!gone && target.string().find("terrace-nvme-") != std::string::npos) {
      return OwnedFd(open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
    }
  }
  return {};
}

TEST(StateInFile, WhatADriveChangedIsNeverUsed) {
  Rig rig(few_chunks());
  (void)rig.steps(1);
  rig.trainer().settle();
  const OwnedFd file = file_beneath();
  ASSERT_TRUE(file.valid());
  const auto size = static_cast<std::size_t>(lseek(file.get(), 0, SEEK_END));
  const std::vector<char> other(size, 0x5A);
  ASSERT_EQ(pwrite(file.get(), other.data(), size, 0), static_cast<ssize_t>(size));
  const std::string text = failure_of([&] { (void)rig.steps(2); });
  EXPECT_NE(text.find("optimizer state of"), std::string::npos) << text;
  EXPECT_NE(text.find("torn or stale"), std::string::npos) << text;
}

}  // namespace
}  // namespace terrace::trainer::test
