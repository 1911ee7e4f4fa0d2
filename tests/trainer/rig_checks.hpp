// What every feature of the model keeps: the same losses however activations are kept, and after a resume.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {

// Kept, once more, recomputed, and cached by Swap Core. Returns the losses.
inline std::vector<float> expect_same_bits_however_kept(Rig::Options options, int steps) {
  options.config.train.recompute = Recompute::kNone;
  options.swapcore = SwapMode::kOff;
  std::vector<float> losses = Rig(options).steps(steps);
  EXPECT_EQ(Rig(options).steps(steps), losses) << "again";
  options.config.train.recompute = Recompute::kFull;
  EXPECT_EQ(Rig(options).steps(steps), losses) << "recomputed";
  options.swapcore = SwapMode::kAuto;
  Rig cached(options);
  EXPECT_EQ(cached.steps(steps), losses) << "cached";
  EXPECT_GT(cached.session().counters().hits, 0U);
  return losses;
}

// Stops after two steps of four and goes on in a run that was elsewhere before. Returns the checkpoint.
inline std::string expect_resumes(const Rig::Options& options, const std::string& name) {
  const auto path = (std::filesystem::path(::testing::TempDir()) / (name + ".safetensors")).string();
  const auto losses = Rig(options).steps(4);
  {
    Rig first(options);
    (void)first.steps(2);
    first.trainer().save(path);
  }
  Rig second(options);
  (void)second.steps(1);
  second.trainer().resume(path);
  EXPECT_EQ(second.steps(2), std::vector<float>(losses.begin() + 2, losses.end()));
  return path;
}

}  // namespace terrace::trainer::test
