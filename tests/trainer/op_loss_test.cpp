#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <ostream>

#include "examples/moe_trainer/ops/cuda/loss_plan.hpp"
#include "tests/trainer/ops_fixture.hpp"
#ifdef TERRACE_HAVE_CUDA
#include "examples/moe_trainer/ops/cuda/loss.hpp"
#endif

namespace terrace::trainer {
namespace {

constexpr std::int32_t kIgnored = -100;
constexpr double kScale = 0.25, kLossBefore = 1.5;

struct Sizes {
  std::int64_t tokens, width, vocabulary;
};
std::ostream& operator<<(std::ostream& out, const Sizes& s) {
  return out << s.tokens << " x " << s.width << " x " << s.vocabulary;
}

struct Given {
  Values hidden, weight;
  std::vector<std::int32_t> labels;
};
struct Expected {
  double loss = 0;
  Values d_hidden, d_weight;
};

// softmax - one at the label, times the scale; through both matrices.
Expected expected(const Sizes& s, const Given& in) {
  const auto index = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  Expected out{kLossBefore, Values(in.hidden.size()), Values(in.weight.size())};
  Values logits(index(s.vocabulary));
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const std::int32_t label = in.labels[index(t)];
    if (label == kIgnored) continue;
    const double* h = in.hidden.data() + t * s.width;
    for (std::int64_t v = 0; v < s.vocabulary; ++v) {
      const double* w = in.weight.data() + v * s.width;
      logits[index(v)] = std::inner_product(h, h + s.width, w, 0.0);
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - top);
    out.loss += std::log(sum) + top - logits[index(label)];
    double* d_h = out.d_hidden.data() + t * s.width;
    for (std::int64_t v = 0; v < s.vocabulary; ++v) {
      const double below = logits[index(v)] - top - std::log(sum);
      const double d = kScale * (v == label ? std::expm1(below) : std::exp(below));
      const double* w = in.weight.data() + v * s.width;
      double* d_w = out.d_weight.data() + v * s.width;
      for (std::int64_t i = 0; i < s.width; ++i) {
        d_h[i] += d * w[i];
        d_w[i] += d * h[i];
      }
    }
  }
  return out;
}

class LossOps : public OpsUnderTest {
 protected:
  // One token in three is ignored; the last never.
  static Given given(const Sizes& s, std::uint64_t seed, Dtype dtype) {
    Given in{rounded(random_values(s.tokens * s.width, seed + 1), dtype),
             rounded(random_values(s.vocabulary * s.width, seed + 2, 0.3), dtype),
             random_ints(s.tokens, seed + 3, static_cast<std::int32_t>(s.vocabulary))};
    for (std::size_t t = 0; t + 1 < in.labels.size(); t += 3) in.labels[t] = kIgnored;
    return in;
  }
  LinearCrossEntropy op(const Sizes& s, const Given& in, Dtype dtype) {
    return {.tokens = s.tokens,
            .width = s.width,
            .vocabulary = s.vocabulary,
            .hidden = upload(in.hidden, dtype),
            .weight = upload(in.weight, dtype),
            .labels = upload(in.labels),
            .gradient_scale = static_cast<float>(kScale),
            .loss_sum = upload(Values{kLossBefore}),
            .d_hidden = output(s.tokens * s.width, dtype),
            .d_weight = zeros(s.vocabulary * s.width)};
  }
  void expect_result(const LinearCrossEntropy& run, const Expected& want) {
    const Dtype dtype = run.hidden.dtype();
    expect_near("loss", run.loss_sum, {want.loss}, output_tolerance(dtype));
    expect_near("d_hidden", run.d_hidden, want.d_hidden, gradient_tolerance(dtype));
    expect_near("d_weight", run.d_weight, want.d_weight, gradient_tolerance(dtype));
  }
  // d_hidden is overwritten, d_weight and the loss are added to, always with the same bits.
  void expect_result_twice(const Sizes& s, const Given& in, Dtype dtype) {
    Expected want = expected(s, in);
    const LinearCrossEntropy run = op(s, in, dtype), again = op(s, in, dtype);
    ops().run(stream(), run);
    expect_result(run, want);
    ops().run(stream(), again);
    expect_same_bits("loss", run.loss_sum, again.loss_sum, 1);
    expect_same_bits("d_hidden", run.d_hidden, again.d_hidden, s.tokens * s.width);
    expect_same_bits("d_weight", run.d_weight, again.d_weight, s.vocabulary * s.width);
    ops().run(stream(), run);
    expect_same_bits("d_hidden overwritten", run.d_hidden, again.d_hidden, s.tokens * s.width);
    want.loss += want.loss - kLossBefore;
    for (double& value : want.d_weight) value *= 2;
    expect_result(run, want);
  }
  // On CUDA within less scratch, so that small shapes are cut too.
  void run_within(std::int64_t limit_bytes, const LinearCrossEntropy& run) {
#ifdef TERRACE_HAVE_CUDA
    if (std::string(GetParam()) == "cuda") {
      DirectScratch scratch(bench().device());
      cuda::BlasHandles blas;
      {
        cuda::OpCall call({.device = &bench().device(),
                           .stream = stream(),
                           .scratch = &scratch,
                           .blas = &blas,
                           .op = "LinearCrossEntropy"});
        cuda::launch_loss(call, run, limit_bytes);
      }
      ASSERT_TRUE(bench().device().synchronize(stream()).ok());
      return;
    }
#endif
    (void)limit_bytes;
    ops().run(stream(), run);
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(LossOps);

TEST_P(LossOps, TheGradientsAreThoseOfTheLoss) {
  for (const Sizes& s : {Sizes{1, 3, 2}, Sizes{2, 8, 5}, Sizes{13, 9, 37}}) {
    SCOPED_TRACE(::testing::Message() << s);
    const Given in = given(s, 10, Dtype::kF32);
    const LinearCrossEntropy run = op(s, in, Dtype::kF32);
    ops().run(stream(), run);
    const auto loss_of = [&](const Values& hidden, const Values& weight) {
      return oracle::cross_entropy(hidden, weight, in.labels) * kScale;
    };
    expect_result(
        run,
        {.loss = kLossBefore + oracle::cross_entropy(in.hidden, in.weight, in.labels),
         .d_hidden = numeric_gradient([&](const Values& at) { return loss_of(at, in.weight); }, in.hidden),
         .d_weight = numeric_gradient([&](const Values& at) { return loss_of(in.hidden, at); }, in.weight)});
  }
}

// Vocabularies and numbers of tokens that no tile divides, and one width that no tile takes.
TEST_P(LossOps, EveryShapeAndType) {
  for (const Sizes& s :
       {Sizes{1, 8, 1}, Sizes{1, 128, 257}, Sizes{61, 48, 1}, Sizes{61, 8, 1003}, Sizes{130, 128, 257},
        Sizes{130, 9, 300}, Sizes{300, 48, 2051}, Sizes{128, 328, 512}, Sizes{2200, 8, 300}}) {
    for (const Dtype dtype : kBothTypes) {
      SCOPED_TRACE(::testing::Message() << s << " " << name_of(dtype));
      const Given in = given(s, 20, dtype);
      expect_result_twice(s, in, dtype);
    }
  }
}

// More tiles than an H200 has processors: a block makes several, and its loads run ahead across them.
TEST_P(LossOps, MoreTilesThanProcessors) {
  const Sizes s{520, 200, 7000};
  Given in = given(s, 25, Dtype::kBf16);
  for (std::size_t t = 0; t < in.labels.size(); ++t) {
    if (t % 8 != 0) in.labels[t] = kIgnored;  // so that the oracle has less to do
  }
  in.labels[0] = 1;
  expect_result_twice(s, in, Dtype::kBf16);
}

// Where a chunk of tokens, or a slice of the vocabulary, is not the whole. The CPU has its own limit.
struct Cut {
  Sizes sizes;
  std::int64_t limit_bytes;
  // Who is cut by this limit, and into what.
  cuda::LossPath path;
  Dtype dtype;
  std::int64_t rows, slice;
};
constexpr Cut kCuts[] = {
    {{700, 8, 1900}, 2'700'000, cuda::LossPath::kTiles, Dtype::kBf16, 384, 1900},
    {{270, 16, 5003}, 2'400'000, cuda::LossPath::kTiles, Dtype::kBf16, 270, 2560},
    {{700, 8, 1900}, 4'500'000, cuda::LossPath::kLibrary, Dtype::kF32, 384, 1900},
    {{270, 16, 5003}, 4'800'000, cuda::LossPath::kLibrary, Dtype::kF32, 270, 2560},
    {{700, 9, 1900}, 7'500'000, cuda::LossPath::kLibrary, Dtype::kBf16, 384, 1900},
    {{270, 9, 5003}, 7'500'000, cuda::LossPath::kLibrary, Dtype::kBf16, 270, 2560},
};
TEST_P(LossOps, RowsInChunksAndAVocabularyInSlices) {
  for (const Cut& cut : kCuts) {
    SCOPED_TRACE(::testing::Message()
                 << cut.sizes << " " << name_of(cut.dtype) << " within " << cut.limit_bytes);
    const Given in = given(cut.sizes, 30, cut.dtype);
    const LinearCrossEntropy run = op(cut.sizes, in, cut.dtype);
    run_within(cut.limit_bytes, run);
    expect_result(run, expected(cut.sizes, in));
  }
}

TEST_P(LossOps, ForwardOnlyAndOneGradientAlone) {
  const Sizes s{70, 40, 519};
  for (const Dtype dtype : kBothTypes) {
    SCOPED_TRACE(name_of(dtype));
    const Given in = given(s, 40, dtype);
    const Expected want = expected(s, in);
    LinearCrossEntropy forward = op(s, in, dtype);
    forward.d_hidden = forward.d_weight = nullptr;
    ops().run(stream(), forward);
    expect_near("loss", forward.loss_sum, {want.loss}, output_tolerance(dtype));
    LinearCrossEntropy hidden = op(s, in, dtype);
    hidden.d_weight = nullptr;
    ops().run(stream(), hidden);
    expect_near("d_hidden", hidden.d_hidden, want.d_hidden, gradient_tolerance(dtype));
    LinearCrossEntropy weight = op(s, in, dtype);
    weight.d_hidden = nullptr;
    ops().run(stream(), weight);
    expect_near("d_weight", weight.d_weight, want.d_weight, gradient_tolerance(dtype));
  }
}

TEST_P(LossOps, NothingToCount) {
  const Sizes s{6, 8, 9};
  for (const Dtype dtype : kBothTypes) {
    Given in = given(s, 50, dtype);
    std::fill(in.labels.begin(), in.labels.end(), kIgnored);
    const LinearCrossEntropy run = op(s, in, dtype);
    ops().run(stream(), run);
    expect_near("loss", run.loss_sum, {kLossBefore}, 0);
    expect_near("d_hidden", run.d_hidden, Values(in.hidden.size()), 0);
    expect_near("d_weight", run.d_weight, Values(in.weight.size()), 0);
  }
  LinearCrossEntropy none = op(s, given(s, 51, Dtype::kF32), Dtype::kF32);
  none.tokens = 0;
  ops().run(stream(), none);
  expect_near("loss of no tokens", none.loss_sum, {kLossBefore}, 0);
}

TEST_P(LossOps, WrongArgumentsAreRefused) {
  const Sizes s{6, 8, 9};
  const Given in = given(s, 55, Dtype::kBf16);
  LinearCrossEntropy run = op(s, in, Dtype::kBf16);
  run.vocabulary = 0;
  EXPECT_THROW(ops().run(stream(), run), std::runtime_error);
  if (std::string(GetParam()) != "cuda") return;
  run = op(s, in, Dtype::kBf16);
  run.weight = upload(in.weight);
  EXPECT_THROW(ops().run(stream(), run), std::runtime_error);
}

// Logits around 60 in steps far below bf16's there (1/4): rounded to bf16, the probabilities would be off by
// a tenth.
TEST_P(LossOps, LargeLogitsKeepTheirDifferences) {
  const Sizes s{61, 48, 700};
  for (const Dtype dtype : kBothTypes) {
    SCOPED_TRACE(name_of(dtype));
    Given in = given(s, 60, dtype);
    const Values base = random_values(s.width, 61);
    const double pull = 60 / inner(base, base);
    for (std::size_t i = 0; i < in.hidden.size(); ++i)
      in.hidden[i] = 0.02 * in.hidden[i] + pull * base[i % base.size()];
    for (std::size_t i = 0; i < in.weight.size(); ++i) in.weight[i] += base[i % base.size()];
    in.hidden = rounded(in.hidden, dtype);
    in.weight = rounded(in.weight, dtype);
    const LinearCrossEntropy run = op(s, in, dtype);
    ops().run(stream(), run);
    expect_result(run, expected(s, in));
  }
}

// p - 1 at the label when p is nearly 1: its relative error must not be p's divided by the difference.
TEST_P(LossOps, TokensNearlyCertain) {
  const Sizes s{40, 32, 300};
  for (const Dtype dtype : kBothTypes) {
    SCOPED_TRACE(name_of(dtype));
    Given in = given(s, 70, dtype);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      const std::int32_t label = static_cast<std::int32_t>(7 * t);
      in.labels[static_cast<std::size_t>(t)] = label;
      const double* w = in.weight.data() + label * s.width;
      const double size = std::inner_product(w, w + s.width, w, 0.0);
      for (std::int64_t i = 0; i < s.width; ++i)
        in.hidden[static_cast<std::size_t>(t * s.width + i)] = 14 * w[i] / size;
    }
    in.hidden = rounded(in.hidden, dtype);
    const LinearCrossEntropy run = op(s, in, dtype);
    ops().run(stream(), run);
    expect_result(run, expected(s, in));
  }
}

TEST_P(LossOps, ALabelOutsideTheVocabulary) {
  const Sizes s{20, 16, 40};
  for (const Dtype dtype : kBothTypes) {
    for (const std::int32_t label :
         {40, -1, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
      SCOPED_TRACE(::testing::Message() << label << " " << name_of(dtype));
      Given in = given(s, 80, dtype);
      in.labels[7] = label;
      const LinearCrossEntropy run = op(s, in, dtype);
      if (std::string(GetParam()) == "cuda") {
        ops().run(stream(), run);
        EXPECT_TRUE(std::isnan(download(run.loss_sum, 1)[0]));
        continue;
      }
      GTEST_FLAG_SET(death_test_style, "threadsafe");
      EXPECT_DEATH(
          {
            ops().run(stream(), run);
            (void)bench().device().synchronize(stream()).ok();
          },
          "labels lie inside the vocabulary or are -100");
    }
  }
}

void expect_sound(const cuda::LossShape& shape) {
  const Sizes sizes{shape.tokens, shape.width, shape.vocabulary};
  SCOPED_TRACE(::testing::Message() << sizes << " " << name_of(shape.dtype) << " path "
                                    << static_cast<int>(shape.path) << " pass "
                                    << static_cast<int>(shape.pass));
  const cuda::LossPlan plan = cuda::plan_loss(shape);
  EXPECT_LE(plan.bytes, kLossScratchBytes);
  EXPECT_GE(plan.rows, 1);
  EXPECT_LE(plan.rows, shape.tokens);
  EXPECT_GE(plan.slice, 1);
  EXPECT_LE(plan.slice, plan.pitch);
  EXPECT_TRUE(plan.slice == shape.vocabulary || plan.slice % cuda::kLossTileWords == 0);
  const std::int64_t part = shape.path == cuda::LossPath::kTiles ? cuda::kLossTileWords : plan.slice;
  EXPECT_EQ(plan.parts, cuda::loss_plan::divide_up(shape.vocabulary, part));
}

TEST(LossPlan, StaysWithinItsLimitAndCoversEverything) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const std::int64_t tokens : {1, 130, 16384, 1 << 20}) {
    for (const std::int64_t width : {8, 4096, 1 << 20}) {
      for (const std::int64_t vocabulary :
           {std::int64_t{1}, std::int64_t{257}, std::int64_t{163840}, kMost}) {
        for (const cuda::LossPass pass : {cuda::LossPass::kForward, cuda::LossPass::kForwardBackward}) {
          expect_sound({tokens, width, vocabulary, Dtype::kBf16, cuda::LossPath::kTiles, pass});
          expect_sound({tokens, width, vocabulary, Dtype::kBf16, cuda::LossPath::kLibrary, pass});
          expect_sound({tokens, width, vocabulary, Dtype::kF32, cuda::LossPath::kLibrary, pass});
        }
      }
    }
  }
}

TEST(LossPlan, ALimitCutsChunksOrSlices) {
  for (const Cut& cut : kCuts) {
    const cuda::LossPlan plan = cuda::plan_loss({cut.sizes.tokens, cut.sizes.width, cut.sizes.vocabulary,
                                                 cut.dtype, cut.path, cuda::LossPass::kForwardBackward},
                                                cut.limit_bytes);
    SCOPED_TRACE(::testing::Message() << cut.sizes << " within " << cut.limit_bytes);
    EXPECT_EQ(plan.rows, cut.rows);
    EXPECT_EQ(plan.slice, cut.slice);
    EXPECT_LE(plan.bytes, cut.limit_bytes);
  }
}

// The shapes that bench_kernels times.
TEST(LossPlan, LogitsAreKeptUntilChunksGetTooFewRows) {
  const auto plan = [](const Sizes& s) {
    return cuda::plan_loss({s.tokens, s.width, s.vocabulary, Dtype::kBf16, cuda::LossPath::kTiles,
                            cuda::LossPass::kForwardBackward});
  };
  EXPECT_EQ(plan({16384, 4096, 163840}).rows, 1920);
  EXPECT_EQ(plan({16384, 4096, 163840}).slice, 163840);
  EXPECT_EQ(plan({4096, 4096, 1 << 20}).rows, 4096);
  EXPECT_EQ(plan({4096, 4096, 1 << 20}).slice, 1 << 16);
}

TEST_P(LossOps, Embedding) {
  const std::int64_t tokens = 50, width = 37, vocabulary = 11;
  const Values table = random_values(vocabulary * width, 1), d_out = random_values(tokens * width, 2);
  const std::vector<std::int32_t> ids = random_ints(tokens, 3, 11);
  Values out, d_table = random_values(vocabulary * width, 4);
  float* got_d_table = upload(d_table);
  for (std::size_t t = 0; t < ids.size(); ++t) {
    for (std::int64_t i = 0; i < width; ++i) {
      const auto at = static_cast<std::size_t>(ids[t] * width + i);
      out.push_back(table[at]);
      d_table[at] += d_out[t * static_cast<std::size_t>(width) + static_cast<std::size_t>(i)];
    }
  }
  float* got = output(tokens * width);
  ops().run(stream(),
            terrace::trainer::Embedding{tokens, width, vocabulary, upload(ids), upload(table), got});
  ops().run(stream(), EmbeddingBackward{tokens, width, vocabulary, upload(ids), upload(d_out), got_d_table});
  expect_near("out", got, out, 0);
  expect_near("d_table", got_d_table, d_table, kGradient);
}

}  // namespace
}  // namespace terrace::trainer
