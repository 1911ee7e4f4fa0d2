// The multimodal path end to end: gradients, bits, resumption, and that what is seen is learned.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "tests/trainer/image_folder.hpp"
#include "tests/trainer/model_folders.hpp"
#include "tests/trainer/rig_checks.hpp"

namespace terrace::trainer::test {
namespace {

// Made images, one with its caption in a sequence.
Rig::Options made() {
  Rig::Options options;
  options.config.images = {.patch = 8, .size = 16};
  options.config.train.length = 64;
  return options;
}

double norm_of(const std::vector<float>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

const Parameter& parameter_of(Rig& rig, const std::string& name) {
  for (const auto& group : rig.trainer().model().groups()) {
    for (const Parameter& parameter : group->parameters()) {
      if (parameter.name == name) return parameter;
    }
  }
  throw std::invalid_argument(name);
}

constexpr const char* kOfImages[] = {"images.patch", "images.position", "images.norm"};

// One picture, so that every step sees the same; every choice forced, so that the loss is smooth.
Rig::Options smooth(const ImageFolder& folder, ResidualKind residual) {
  folder.write("one.ppm", ImageFolder::noise(16, 1));
  folder.write("one.txt", "abc");
  Rig::Options options;
  Config& config = options.config;
  config.model.residual = residual;
  config.images = {.patch = 8, .size = 16};
  config.moe.top_k = config.moe.experts;
  config.moe.balance_rate = 0;
  config.dsa.top_k = config.train.length;
  config.dsa.index_loss_weight = 0;
  config.train.learning_rate = 0;
  config.train.final_learning_rate = 0;
  options.images = folder.path();
  return options;
}

// The slope of the loss along the gradient is the gradient's norm.
void expect_slopes(Rig& rig) {
  for (const char* name : kOfImages) {
    const Parameter& parameter = parameter_of(rig, name);
    (void)rig.trainer().step();
    const std::vector<float> gradient = rig.read(parameter.gradient, parameter.count());
    const std::vector<float> start = rig.read(parameter.value, parameter.count());
    const double norm = norm_of(gradient);
    ASSERT_GT(norm, 0.0) << name;
    const auto loss_at = [&](double distance) {
      std::vector<float> moved = start;
      for (std::size_t i = 0; i < moved.size(); ++i) {
        moved[i] += static_cast<float>(distance * gradient[i] / norm);
      }
      rig.write(parameter.value, moved);
      return static_cast<double>(rig.trainer().step());
    };
    const double reach = std::clamp(6e-4 / norm, 0.003, 0.03);
    const double near = loss_at(reach) - loss_at(-reach);
    const double far = loss_at(2 * reach) - loss_at(-2 * reach);
    rig.write(parameter.value, start);
    EXPECT_NEAR((8 * near - far) / (12 * reach), norm, 0.01 * norm + 1.5e-6 / reach) << name;
  }
}

TEST(Images, GradientsAgreeWithFiniteDifferences) {
  const ImageFolder folder("images-gradient");
  for (const ResidualKind residual : {ResidualKind::kPlain, ResidualKind::kAttnRes}) {
    Rig rig(smooth(folder, residual));
    expect_slopes(rig);
  }
}

TEST(Images, GiveTheSameBitsHoweverActivationsAreKept) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = made();
    options.config.train.compute = compute;
    (void)expect_same_bits_however_kept(options, 4);
  }
}

TEST(Images, InBf16FollowTheFp32Run) {
  Rig::Options options = made();
  Rig full(options);
  options.config.train.compute = Dtype::kBf16;
  Rig half(options);
  auto want = full.steps(1);
  auto got = half.steps(1);
  for (const char* name : kOfImages) {
    const Parameter& exact = parameter_of(full, name);
    const auto a = full.read(exact.gradient, exact.count());
    auto b = half.read(parameter_of(half, name).gradient, exact.count());
    for (std::size_t i = 0; i < b.size(); ++i) b[i] -= a[i];
    EXPECT_LT(norm_of(b), 0.1 * norm_of(a)) << name;
  }
  for (const float loss : full.steps(5)) want.push_back(loss);
  for (const float loss : half.steps(5)) got.push_back(loss);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 0.02F * want[i]) << i;
}

TEST(Images, ResumeWithTheSameLosses) {
  const std::string path = expect_resumes(made(), "images");
  const auto refusal = [&](const Rig::Options& options) {
    return failure_of([&] { Rig(options).trainer().resume(path); });
  };
  Rig::Options other = made();
  other.config.images.content = ImageContent::kBlank;
  EXPECT_NE(refusal(other).find("images.content = pixels"), std::string::npos) << refusal(other);
  const ImageFolder folder("images-resume");
  folder.write("one.ppm", ImageFolder::noise(16, 1));
  folder.write("one.txt", "abc");
  other = made();
  other.images = folder.path();
  EXPECT_NE(refusal(other).find("other images"), std::string::npos) << refusal(other);
  std::filesystem::remove(path);
}

// A frozen model learns to read images through its embedder, which alone moves.
TEST(Images, TrainTheEmbedderOfAFrozenModel) {
  Rig::Options options = made();
  options.config.lora = {.rank = 2, .targets = {"kda.q"}};
  Rig rig(options);
  const Parameter& patch = parameter_of(rig, "images.patch");
  const Parameter& head = parameter_of(rig, "head");
  const auto patch_before = rig.read(patch.value, patch.count());
  const auto head_before = rig.read(head.value, head.count());
  (void)rig.steps(2);
  EXPECT_NE(rig.read(patch.value, patch.count()), patch_before);
  EXPECT_EQ(rig.read(head.value, head.count()), head_before);
}

TEST(Images, ArePartOfAPublicModelToo) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "images-kimi";
  std::filesystem::remove_all(folder);
  make_model_folder(folder, small_description("kimi_linear"));
  Rig::Options options = made();
  options.model = folder.string();
  {
    Rig rig(options);
    const auto losses = rig.steps(4);
    EXPECT_LT(losses.back(), losses.front());
    const Parameter& patch = parameter_of(rig, "images.patch");
    EXPECT_GT(norm_of(rig.read(patch.gradient, patch.count())), 0.0);
  }
  std::filesystem::remove_all(folder);
}

// The mean loss of the last ten of many steps. Every step has new images: nothing is learned by heart.
double loss_in_the_end(ImageContent content) {
  Rig::Options options = made();
  Config& config = options.config;
  config.model.hidden = 64;
  config.moe = {.latent = 32, .experts = 4, .top_k = 2, .expert_width = 48, .shared_width = 64};
  config.kda = {.heads = 2, .head_width = 32, .gate_rank = 16};
  config.dsa = {
      .heads = 2, .key_width = 32, .value_width = 32, .index_heads = 2, .index_width = 16, .top_k = 64};
  config.images.content = content;
  config.train.batch = 16;
  config.train.length = 48;
  config.train.micro_batches = 1;
  config.train.warmup_steps = 20;
  config.train.learning_rate = 1e-2;
  config.train.schedule_steps = 200;
  Rig rig(options);
  const auto losses = rig.steps(200);
  return std::accumulate(losses.end() - 10, losses.end(), 0.0) / 10;
}

TEST(Images, TellWhatTheirCaptionsAloneCannot) {
  const double seen = loss_in_the_end(ImageContent::kPixels);
  const double blank = loss_in_the_end(ImageContent::kBlank);
  // No guess at the caption is better than its entropy: two sizes, six colours, three shapes, four quarters.
  constexpr double kMeanCaption = 39.5;  // bytes
  const double guess = std::log(2.0 * 6 * 3 * 4) / kMeanCaption;
  EXPECT_NEAR(blank, guess, 0.07 * guess);
  EXPECT_LT(seen, 0.85 * guess);
  EXPECT_LT(seen, 0.85 * blank);
}

}  // namespace
}  // namespace terrace::trainer::test
