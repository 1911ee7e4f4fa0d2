// The oracles' own gradients against central differences of their forward functions.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/trainer/oracle.hpp"

namespace terrace::trainer {
namespace {

constexpr double kNumeric = 1e-6;

TEST(Oracle, KdaGradients) {
  for (const KdaGate gate : {KdaGate::kSoftplus, KdaGate::kLowerBound}) {
    KdaShape s{2, 5, 1, 2, 4, 3};
    s.gate = gate;
    const oracle::KdaValues in{.q = random_values(40, 1),
                               .k = random_values(40, 2),
                               .v = random_values(60, 3),
                               .gate = random_values(80, 4),
                               .beta = random_values(20, 5),
                               .a_log = random_values(2, 6, 0.3),
                               .dt_bias = random_values(8, 7),
                               .initial_state = random_values(48, 8)};
    const Values d_o = random_values(60, 9), d_final = random_values(48, 10);
    const oracle::KdaGradients got = oracle::kda_backward(s, in, d_o, d_final);
    const auto numeric = [&](Values oracle::KdaValues::*member) {
      return numeric_gradient(
          [&](const Values& at) {
            oracle::KdaValues moved = in;
            moved.*member = at;
            const oracle::KdaResult out = oracle::kda(s, moved);
            return inner(out.o, d_o) + inner(out.final_state, d_final);
          },
          in.*member);
    };
    using In = oracle::KdaValues;
    EXPECT_LE(relative_error(got.q, numeric(&In::q)), kNumeric);
    EXPECT_LE(relative_error(got.k, numeric(&In::k)), kNumeric);
    EXPECT_LE(relative_error(got.v, numeric(&In::v)), kNumeric);
    EXPECT_LE(relative_error(got.gate, numeric(&In::gate)), kNumeric);
    EXPECT_LE(relative_error(got.beta, numeric(&In::beta)), kNumeric);
    EXPECT_LE(relative_error(got.a_log, numeric(&In::a_log)), kNumeric);
    EXPECT_LE(relative_error(got.dt_bias, numeric(&In::dt_bias)), kNumeric);
    EXPECT_LE(relative_error(got.initial_state, numeric(&In::initial_state)), kNumeric);
  }
}

// Of some of the tokens, and of all of them, as in a warm-up.
class DsaOracle : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(TopK, DsaOracle, ::testing::Values(3, 7));

TEST_P(DsaOracle, Gradients) {
  const DsaShape s{2, 7, 2, 4, 3, 2, 4, GetParam()};
  const oracle::DsaValues in{.q = random_values(112, 1),
                             .k = random_values(56, 2),
                             .v = random_values(42, 3),
                             .gate = random_values(84, 4),
                             .sink = random_values(2, 5),
                             .index_q = random_values(112, 6),
                             .index_k = random_values(56, 7),
                             .index_w = random_values(28, 8)};
  const std::vector<std::int32_t> selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
  const Values d_y = random_values(84, 9);
  const double weight = 0.5;
  const oracle::DsaGradients got = oracle::dsa_backward(s, in, selected, d_y, weight);
  // The target of the index loss is detached: it is taken from the unmoved inputs.
  const auto numeric = [&](Values oracle::DsaValues::*member) {
    return numeric_gradient(
        [&](const Values& at) {
          oracle::DsaValues moved = in;
          moved.*member = at;
          return inner(oracle::dsa(s, moved, selected), d_y) +
                 weight * oracle::dsa_index_loss(s, moved, selected, in);
        },
        in.*member);
  };
  using In = oracle::DsaValues;
  EXPECT_LE(relative_error(got.q, numeric(&In::q)), kNumeric);
  EXPECT_LE(relative_error(got.k, numeric(&In::k)), kNumeric);
  EXPECT_LE(relative_error(got.v, numeric(&In::v)), kNumeric);
  EXPECT_LE(relative_error(got.gate, numeric(&In::gate)), kNumeric);
  EXPECT_LE(relative_error(got.sink, numeric(&In::sink)), kNumeric);
  EXPECT_LE(relative_error(got.index_q, numeric(&In::index_q)), kNumeric);
  EXPECT_LE(relative_error(got.index_k, numeric(&In::index_k)), kNumeric);
  EXPECT_LE(relative_error(got.index_w, numeric(&In::index_w)), kNumeric);
  EXPECT_DOUBLE_EQ(got.index_loss, oracle::dsa_index_loss(s, in, selected, in));
}

TEST(Oracle, RelativeErrorNeverPassesWhatIsNotANumber) {
  EXPECT_TRUE(std::isinf(relative_error({1, std::nan("")}, {1, 2})));
  EXPECT_TRUE(std::isinf(relative_error({1, 2}, {1, std::nan("")})));
  EXPECT_TRUE(std::isinf(relative_error({1}, {1, 2})));
  EXPECT_EQ(relative_error({0, 0}, {0, 0}), 0);
  EXPECT_EQ(relative_error({3, 4}, {0, 0}), 5);
}

}  // namespace
}  // namespace terrace::trainer
