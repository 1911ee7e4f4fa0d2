// Routing in all its forms, the balance of the experts' load, and rows under a capacity and with replicas.
#include <limits>
#include <numeric>

#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class RoutingOps : public OpsUnderTest {};
TERRACE_TEST_ON_EVERY_DEVICE(RoutingOps);

using Ints = std::vector<std::int32_t>;

constexpr RouterScore kScores[] = {RouterScore::kSigmoid, RouterScore::kSoftmax};
constexpr Renormalise kRenormalise[] = {Renormalise::kYes, Renormalise::kNo};

// tokens, experts, top_k, groups, top_groups, scaling
constexpr RouterShape kShapes[] = {
    {1, 4, 2, 1, 1, 1.0F},   {13, 24, 6, 1, 1, 2.5F}, {9, 16, 4, 4, 2, 2.5F},    {7, 8, 3, 8, 3, 1.0F},
    {5, 40, 40, 1, 1, 1.5F}, {11, 12, 6, 3, 3, 1.0F}, {2, 100, 16, 10, 3, 1.0F}, {3, 128, 5, 8, 4, 2.5F},
    {5, 256, 8, 8, 4, 2.5F}, {2, 512, 7, 2, 1, 1.0F}, {2, 896, 16, 1, 1, 2.5F},  {1, 256, 32, 32, 5, 1.0F}};

TEST_P(RoutingOps, EveryScoreAndSum) {
  for (RouterShape s : kShapes) {
    for (const RouterScore score : kScores) {
      for (const Renormalise renormalise : kRenormalise) {
        SCOPED_TRACE(::testing::Message()
                     << s.experts << " experts, top " << s.top_k << ", score " << static_cast<int>(score)
                     << ", renormalise " << static_cast<int>(renormalise));
        s.score = score;
        s.renormalise = renormalise;
        const Values logits = random_values(s.tokens * s.experts, 11, 2.0);
        const Values bias = random_values(s.experts, 12, 0.02);
        const oracle::Routed want = oracle::route(s, logits, bias);
        std::int32_t* expert = bench().int_output(s.tokens * s.top_k);
        float *weight = output(s.tokens * s.top_k), *d_logits = output(s.tokens * s.experts);
        ops().run(stream(), Router{s, upload(logits), upload(bias), expert, weight});
        EXPECT_EQ(bench().ints(expert, s.tokens * s.top_k), want.expert);
        expect_near("weight", weight, want.weight, kOutput);
        const Values d_weight = random_values(s.tokens * s.top_k, 13);
        ops().run(stream(),
                  RouterBackward{s, upload(logits), upload(want.expert), upload(d_weight), d_logits});
        const Values gradient = numeric_gradient(
            [&](const Values& at) { return inner(d_weight, oracle::routed_weights(s, at, want.expert)); },
            logits);
        expect_near("d_logits", d_logits, gradient, kGradient);
      }
    }
  }
}

// All scores alike, or all but two: the lower group and the lower expert, and of many experts as of few.
TEST_P(RoutingOps, TiesGoToTheLowerOfManyExperts) {
  for (const std::int64_t groups : {1, 8}) {
    RouterShape s{2, 256, 6, groups, std::max<std::int64_t>(groups / 2, 1), 1.0F};
    Values logits(512, 0.5);
    logits[256 + 131] = logits[256 + 77] = 2;
    for (const RouterScore score : kScores) {
      SCOPED_TRACE(::testing::Message() << groups << " groups, score " << static_cast<int>(score));
      s.score = score;
      std::int32_t* expert = bench().int_output(12);
      float* weight = output(12);
      ops().run(stream(), Router{s, upload(logits), nullptr, expert, weight});
      EXPECT_EQ(bench().ints(expert, 12), (Ints{0, 1, 2, 3, 4, 5, 77, 131, 0, 1, 2, 3}));
    }
  }
}

TEST_P(RoutingOps, WithoutABiasAndWithoutTokens) {
  const RouterShape s{6, 9, 3, 1, 1, 1.0F};
  const Values logits = random_values(s.tokens * s.experts, 3);
  const oracle::Routed want = oracle::route(s, logits, Values(9, 0.0));
  std::int32_t* expert = bench().int_output(18);
  float* weight = output(18);
  ops().run(stream(), Router{s, upload(logits), nullptr, expert, weight});
  EXPECT_EQ(bench().ints(expert, 18), want.expert);
  expect_near("weight", weight, want.weight, kOutput);
  const RouterShape none{0, 9, 3, 1, 1, 1.0F};
  ops().run(stream(), Router{none, nullptr, nullptr, nullptr, nullptr});
  ops().run(stream(), RouterBackward{none, nullptr, nullptr, nullptr, nullptr});
}

TEST_P(RoutingOps, ANaNIsChosenLastAndSeen) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const RouterShape s{2, 4, 3, 1, 1, 1.0F, RouterScore::kSigmoid, Renormalise::kNo};
  std::int32_t* expert = bench().int_output(6);
  float* weight = output(6);
  const Values logits{nan, 1, 2, 3, nan, nan, -1, 5};
  ops().run(stream(), Router{s, upload(logits), nullptr, expert, weight});
  EXPECT_EQ(bench().ints(expert, 6), (Ints{3, 2, 1, 3, 2, 0}));
  EXPECT_TRUE(std::isnan(bench().download(weight, 6)[5]));
}

TEST_P(RoutingOps, ScoresOfZeroWeighNothing) {
  const RouterShape s{1, 4, 2, 1, 1, 1.0F};
  const Values logits(4, -200.0);
  std::int32_t* expert = bench().int_output(2);
  float *weight = output(2), *d_logits = output(4);
  ops().run(stream(), Router{s, upload(logits), nullptr, expert, weight});
  ops().run(stream(), RouterBackward{s, upload(logits), expert, upload(Values{1, 2}), d_logits});
  EXPECT_EQ(bench().download(weight, 2), (Values{0, 0}));
  EXPECT_EQ(bench().download(d_logits, 4), Values(4, 0.0));
}

struct Sequences {
  std::int64_t tokens, length;  // no length: packed
  Ints starts;
};

TEST_P(RoutingOps, SequenceLoss) {
  const std::vector<Sequences> cases = {
      {1, 1, {0, 1}}, {12, 4, {0, 4, 8, 12}}, {12, 12, {0, 12}}, {15, 0, {0, 1, 8, 8, 15}}, {4, 0, {0, 4}}};
  for (const auto& [tokens, length, starts] : cases) {
    for (const RouterScore score : kScores) {
      for (const std::int64_t experts : {5, 40}) {
        SCOPED_TRACE(::testing::Message() << tokens << " tokens of " << length << ", score "
                                          << static_cast<int>(score) << ", " << experts << " experts");
        const std::int64_t top_k = 3, count = tokens * experts;
        const Values logits = random_values(count, 21, 2.0), before = random_values(count, 22);
        Ints expert = random_ints(tokens * top_k, 23, static_cast<std::int32_t>(experts));
        expert.back() = -1;
        SequenceLoss op{tokens, experts, top_k, length, {}, 0.5F, score, upload(logits), upload(expert)};
        if (length == 0) {
          op.packing = {static_cast<std::int64_t>(starts.size()) - 1, upload(starts)};
        }
        op.loss = upload(Values{3});
        op.d_logits = upload(before);
        ops().run(stream(), op);
        const auto loss_at = [&](const Values& at) { return oracle::sequence_loss(op, starts, at, expert); };
        expect_near("loss", op.loss, {3 + loss_at(logits)}, kOutput);
        Values gradient = numeric_gradient(loss_at, logits);
        for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] += before[i];
        expect_near("d_logits", op.d_logits, gradient, kOutput);

        SequenceLoss again = op, alone = op;
        again.loss = upload(Values{3});
        again.d_logits = upload(before);
        ops().run(stream(), again);
        expect_same_bits("loss", op.loss, again.loss, 1);
        expect_same_bits("d_logits", op.d_logits, again.d_logits, count);
        alone.d_logits = nullptr;
        alone.loss = zeros(1);
        ops().run(stream(), alone);
        expect_near("loss alone", alone.loss, {loss_at(logits)}, kOutput);
      }
    }
  }
}

TEST_P(RoutingOps, QuantileBiasGivesEveryExpertItsShare) {
  for (const RouterScore score : kScores) {
    for (const std::int64_t tokens : {1, 7, 300}) {
      for (const std::int64_t experts : {3, 20}) {
        SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << experts << " experts");
        QuantileBias op{tokens, experts, experts == 3 ? 1 : 4, score, nullptr, nullptr};
        Values logits = random_values(tokens * experts, 31);
        for (std::int64_t i = 0; i < tokens; ++i) logits[static_cast<std::size_t>(i * experts)] += 3;
        const Values bias = random_values(experts, 32, 0.1);
        op.logits = upload(logits);
        op.bias = upload(bias);
        ops().run(stream(), op);
        expect_near("bias", op.bias, oracle::quantile_bias(op, logits, bias), kOutput);
      }
    }
  }
  float* bias = upload(Values{1, 2, 3});
  ops().run(stream(), QuantileBias{0, 3, 1, RouterScore::kSigmoid, nullptr, bias});
  EXPECT_EQ(bench().download(bias, 3), (Values{1, 2, 3}));
}

TEST_P(RoutingOps, BalanceByCounts) {
  float* bias = zeros(3);
  ops().run(stream(), BalanceBias{3, 0.5F, nullptr, bias, upload(Ints{1, 2, 3})});
  EXPECT_EQ(bench().download(bias, 3), (Values{0.5, 0, -0.5}));
}

struct Rows {
  const char* what;
  std::int64_t tokens, experts, top_k, capacity, most_replicas;
};
// Expert e has 1 + e % most_replicas places, and the places are not in the experts' order.
struct Replicas {
  Ints starts, places;
};
Replicas replicas_of(const Rows& rows) {
  Replicas replicas{{0}, {}};
  for (std::int64_t e = 0; e < rows.experts; ++e) {
    replicas.starts.push_back(replicas.starts.back() + 1 + static_cast<std::int32_t>(e % rows.most_replicas));
  }
  replicas.places.resize(static_cast<std::size_t>(replicas.starts.back()));
  std::iota(replicas.places.rbegin(), replicas.places.rend(), 0);
  return replicas;
}

TEST_P(RoutingOps, PermutesUnderACapacityAndWithReplicas) {
  const std::vector<Rows> cases = {{"exact", 40, 7, 3, 0, 0},
                                   {"one slot", 1, 5, 1, 0, 0},
                                   {"no slots", 0, 5, 2, 3, 2},
                                   {"one expert", 700, 1, 2, 100, 3},
                                   {"many blocks", 3000, 37, 4, 0, 0},
                                   {"many experts", 800, 896, 16, 0, 0},
                                   {"capacity", 700, 11, 3, 150, 0},
                                   {"capacity one", 90, 11, 3, 1, 0},
                                   {"capacity for all", 90, 11, 3, 270, 0},
                                   {"replicas", 700, 11, 3, 0, 4},
                                   {"both", 1500, 64, 4, 90, 3}};
  for (const Rows& rows : cases) {
    SCOPED_TRACE(rows.what);
    const std::int64_t slots = rows.tokens * rows.top_k;
    Ints expert = random_ints(slots, 41, static_cast<std::int32_t>(rows.experts));
    // Some experts are hot, one is nobody's, some slots are no expert's, and many weights are equal.
    for (std::size_t i = 0; i < expert.size(); i += 3) expert[i] /= 2;
    for (std::int32_t& e : expert) e = rows.experts > 5 && e == 4 ? 5 : e;
    for (std::size_t i = 7; i < expert.size(); i += 50) expert[i] = -1;
    Values weight = random_values(slots, 42);
    for (double& value : weight) value = std::round(value * 4) / 4;
    Permute op{rows.tokens,
               rows.experts,
               rows.top_k,
               upload(expert),
               nullptr,
               bench().int_output(slots),
               bench().int_output(slots)};
    op.capacity = rows.capacity;
    if (rows.capacity > 0) op.weight = upload(weight);
    Replicas replicas;
    if (rows.most_replicas > 0) {
      replicas = replicas_of(rows);
      op.places = static_cast<std::int64_t>(replicas.places.size());
      op.replica_starts = upload(replicas.starts);
      op.replicas = upload(replicas.places);
    }
    const std::int64_t places = op.places > 0 ? op.places : op.experts;
    op.offsets = bench().int_output(places + 1);
    op.counts = bench().int_output(op.experts);
    ops().run(stream(), op);
    const oracle::Permuted want = oracle::permute(op, expert, weight, replicas.starts, replicas.places);
    EXPECT_EQ(bench().ints(op.offsets, places + 1), want.offsets);
    EXPECT_EQ(bench().ints(op.row, slots), want.row);
    EXPECT_EQ(bench().ints(op.source, slots), want.source);
    EXPECT_EQ(bench().ints(op.counts, op.experts), want.counts);
  }
}

TEST_P(RoutingOps, WhatMakesNoSenseIsRefused) {
  std::int32_t* ints = bench().int_output(64);
  float* x = zeros(64);
  Permute unweighted{4, 2, 2, ints, ints, ints, ints};
  unweighted.capacity = 3;
  EXPECT_THROW(ops().run(stream(), unweighted), std::runtime_error);
  EXPECT_THROW(ops().run(stream(), Permute{4, Permute::kMostExperts + 1, 2, ints, ints, ints, ints}),
               std::runtime_error);
  EXPECT_THROW(ops().run(stream(), QuantileBias{2, 3, 3, RouterScore::kSigmoid, x, x}), std::runtime_error);
  EXPECT_THROW(ops().run(stream(), SequenceLoss{5, 3, 1, 2, {}, 1.0F, RouterScore::kSigmoid, x, ints, x, x}),
               std::runtime_error);
  EXPECT_THROW(ops().run(stream(), Router{{2, 6, 0, 1, 1, 1.0F}, x, x, ints, x}), std::runtime_error);
}

}  // namespace
}  // namespace terrace::trainer
