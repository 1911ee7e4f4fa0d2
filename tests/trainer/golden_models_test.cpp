// Whole tiny models of public families: loss, logits and every gradient against what their own library gave.
// The folders lie in TERRACE_GOLDEN_DIR/models; they are too large for the repository. TERRACE_TEST_DEVICE
// names the device.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/families/parity.hpp"
#include "runtime/device.hpp"
#include "swapcore/session.hpp"

namespace terrace::trainer::test {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* set = std::getenv(name);
  return set != nullptr ? set : "";
}

class GoldenModel : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string golden = variable("TERRACE_GOLDEN_DIR");
    folder_ = fs::path(golden) / "models" / GetParam();
    if (golden.empty() || !fs::exists(folder_)) {
      GTEST_SKIP() << "no " << folder_.string()
                   << "; TERRACE_GOLDEN_DIR must name the folder of golden vectors";
    }
    const std::string kind = variable("TERRACE_TEST_DEVICE");
    if (kind == "cuda" && !cuda_available()) GTEST_SKIP() << "no CUDA device on this machine";
    device_ = kind == "cuda" ? require(open_device("cuda", {})) : require(open_emulated_device({}));
    stream_ = require(device_->create_stream(StreamPriority::kNormal));
    Session::Options options;
    options.policy.hbm.budget = Amount::of(1_GiB);
    options.join_daemon = false;
    options.compute = stream_;
    session_ = require(Session::open(*device_, options));
  }
  void TearDown() override {
    session_.reset();
    if (device_ != nullptr) device_->destroy_stream(stream_);
  }

  fs::path folder_;
  std::unique_ptr<Device> device_;
  Stream stream_;
  std::unique_ptr<Session> session_;
};

TEST_P(GoldenModel, GivesTheReferencesNumbers) {
  const ParityReport report = Parity::open(folder_.string()).run(*session_);
  EXPECT_LE(report.loss_error, kLossTolerance);
  EXPECT_LE(report.logits_error, kGradientTolerance);
  EXPECT_GT(report.gradients.size(), 30U);
  for (const TensorError& row : report.gradients) EXPECT_LE(row.error, kGradientTolerance) << row.name;
  EXPECT_TRUE(report.passed());
  if (std::getenv("TERRACE_GOLDEN_PRINT") == nullptr) return;
  std::printf("loss %.1e  logits %.1e  worst gradient %.1e (%s)\n", report.loss_error, report.logits_error,
              report.worst_gradient().error, report.worst_gradient().name.c_str());
}

TEST_P(GoldenModel, GivesTheSameBitsTwice) {
  const Parity parity = Parity::open(folder_.string());
  const ParityReport first = parity.run(*session_);
  const ParityReport second = parity.run(*session_);
  EXPECT_EQ(first.loss, second.loss);
  for (std::size_t i = 0; i < first.gradients.size(); ++i) {
    EXPECT_EQ(first.gradients[i].error, second.gradients[i].error) << first.gradients[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenModel,
                         ::testing::Values("hf_kimi_linear", "hf_deepseek_v32", "hf_qwen3_moe"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace terrace::trainer::test
