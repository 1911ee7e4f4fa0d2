#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class LossOps : public OpsUnderTest {
 protected:
  struct Sizes {
    std::int64_t tokens, width, vocabulary;
  };
  struct Given {
    Values hidden, weight;
    std::vector<std::int32_t> labels;
  };
  static Given given(const Sizes& s, std::uint64_t seed) {
    Given in{random_values(s.tokens * s.width, seed + 1),
             random_values(s.vocabulary * s.width, seed + 2, 0.3),
             random_ints(s.tokens, seed + 3, static_cast<std::int32_t>(s.vocabulary))};
    for (std::size_t t = 0; t < in.labels.size(); t += 3) in.labels[t] = -100;
    return in;
  }
  LinearCrossEntropy op(const Sizes& s, const Given& in) {
    return {.tokens = s.tokens,
            .width = s.width,
            .vocabulary = s.vocabulary,
            .hidden = upload(in.hidden),
            .weight = upload(in.weight),
            .labels = upload(in.labels),
            .gradient_scale = 0.25F,
            .loss_sum = upload(Values{1.5}),
            .d_hidden = output(s.tokens * s.width),
            .d_weight = zeros(s.vocabulary * s.width)};
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(LossOps);

TEST_P(LossOps, LossAndGradients) {
  for (const Sizes& s : {Sizes{1, 3, 2}, Sizes{2, 8, 5}, Sizes{13, 9, 37}}) {
    SCOPED_TRACE(::testing::Message() << s.tokens << " x " << s.width << " x " << s.vocabulary);
    Given in = given(s, 10);
    in.labels.back() = 1;  // at least one counts
    const LinearCrossEntropy run = op(s, in);
    ops().run(stream(), run);
    expect_near("loss", run.loss_sum, {1.5 + oracle::cross_entropy(in.hidden, in.weight, in.labels)},
                kOutput);
    Values d_hidden = numeric_gradient(
        [&](const Values& at) { return oracle::cross_entropy(at, in.weight, in.labels) * 0.25; }, in.hidden);
    Values d_weight = numeric_gradient(
        [&](const Values& at) { return oracle::cross_entropy(in.hidden, at, in.labels) * 0.25; }, in.weight);
    expect_near("d_hidden", run.d_hidden, d_hidden, kGradient);
    expect_near("d_weight", run.d_weight, d_weight, kGradient);
    ops().run(stream(), run);
    for (double& value : d_weight) value *= 2;
    expect_near("d_weight added", run.d_weight, d_weight, kGradient);
    expect_near("d_hidden overwritten", run.d_hidden, d_hidden, kGradient);
  }
}

// softmax - one at the label, times the scale; through both matrices.
TEST_P(LossOps, AVocabularyInSlicesAndRowsInChunks) {
  for (const Sizes& s : {Sizes{270, 8, 5003}, Sizes{700, 8, 1900}}) {
    SCOPED_TRACE(::testing::Message() << s.tokens << " x " << s.vocabulary);
    const Given in = given(s, 20);
    const LinearCrossEntropy run = op(s, in);
    ops().run(stream(), run);
    expect_near("loss", run.loss_sum, {1.5 + oracle::cross_entropy(in.hidden, in.weight, in.labels)},
                kOutput);
    Values d_logits = oracle::matmul({s.tokens, s.vocabulary, s.width, Transpose::kNo, Transpose::kYes},
                                     in.hidden, in.weight);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      double* row = d_logits.data() + t * s.vocabulary;
      const std::int32_t label = in.labels[static_cast<std::size_t>(t)];
      double sum = 0;
      for (std::int64_t v = 0; v < s.vocabulary; ++v) sum += std::exp(row[v]);
      for (std::int64_t v = 0; v < s.vocabulary; ++v)
        row[v] = label == -100 ? 0 : 0.25 * std::exp(row[v]) / sum;
      if (label != -100) row[label] -= 0.25;
    }
    expect_near("d_hidden", run.d_hidden,
                oracle::matmul({s.tokens, s.width, s.vocabulary, Transpose::kNo, Transpose::kNo}, d_logits,
                               in.weight),
                kGradient);
    expect_near("d_weight", run.d_weight,
                oracle::matmul({s.vocabulary, s.width, s.tokens, Transpose::kYes, Transpose::kNo}, d_logits,
                               in.hidden),
                kGradient);
  }
}

TEST_P(LossOps, ForwardOnlyAndNothingToCount) {
  const Sizes s{6, 4, 9};
  Given in = given(s, 30);
  LinearCrossEntropy run = op(s, in);
  run.d_hidden = run.d_weight = nullptr;
  ops().run(stream(), run);
  expect_near("loss", run.loss_sum, {1.5 + oracle::cross_entropy(in.hidden, in.weight, in.labels)}, kOutput);
  std::fill(in.labels.begin(), in.labels.end(), -100);
  const LinearCrossEntropy none = op(s, in);
  ops().run(stream(), none);
  expect_near("loss", none.loss_sum, {1.5}, 0);
  for (const float value : bench().floats(none.d_hidden, s.tokens * s.width)) EXPECT_EQ(value, 0.0F);
}

TEST_P(LossOps, LargeLogitsStayFinite) {
  const Sizes s{4, 2, 3};
  Given in = given(s, 40);
  for (double& value : in.hidden) value *= 300;
  const LinearCrossEntropy run = op(s, in);
  ops().run(stream(), run);
  expect_near("loss", run.loss_sum, {1.5 + oracle::cross_entropy(in.hidden, in.weight, in.labels)}, kOutput);
  for (const float value : bench().floats(run.d_hidden, s.tokens * s.width))
    EXPECT_TRUE(std::isfinite(value));
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
