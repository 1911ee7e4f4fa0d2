#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class KdaOps : public OpsUnderTest {
 protected:
  static oracle::KdaValues inputs(const KdaShape& s, std::uint64_t seed) {
    const std::int64_t tokens = s.batch * s.length;
    return {.q = random_values(tokens * s.key_heads * s.key_width, seed + 1),
            .k = random_values(tokens * s.key_heads * s.key_width, seed + 2),
            .v = random_values(tokens * s.value_heads * s.value_width, seed + 3),
            .gate = random_values(tokens * s.value_heads * s.key_width, seed + 4),
            .beta = random_values(tokens * s.value_heads, seed + 5),
            .a_log = random_values(s.value_heads, seed + 6, 0.3),
            .dt_bias = random_values(s.value_heads * s.key_width, seed + 7),
            .initial_state = {}};
  }
  static std::int64_t state_count(const KdaShape& s) {
    return s.batch * s.value_heads * s.key_width * s.value_width;
  }
  KdaInputs to_device(const oracle::KdaValues& in) {
    return {.q = upload(in.q),
            .k = upload(in.k),
            .v = upload(in.v),
            .gate = upload(in.gate),
            .beta = upload(in.beta),
            .a_log = upload(in.a_log),
            .dt_bias = upload(in.dt_bias),
            .initial_state = in.initial_state.empty() ? nullptr : upload(in.initial_state)};
  }
  KdaBackward backward_op(const KdaShape& s, const KdaInputs& in, const Values& d_o, const Values& d_final) {
    const std::int64_t tokens = s.batch * s.length;
    return {.shape = s,
            .in = in,
            .d_o = upload(d_o),
            .d_final_state = d_final.empty() ? nullptr : upload(d_final),
            .d_q = output(tokens * s.key_heads * s.key_width),
            .d_k = output(tokens * s.key_heads * s.key_width),
            .d_v = output(tokens * s.value_heads * s.value_width),
            .d_gate = output(tokens * s.value_heads * s.key_width),
            .d_beta = output(tokens * s.value_heads),
            .d_a_log = zeros(s.value_heads),
            .d_dt_bias = zeros(s.value_heads * s.key_width),
            .d_initial_state = output(state_count(s))};
  }
  void check(const KdaShape& s, const oracle::KdaValues& in, const Values& d_final) {
    SCOPED_TRACE(::testing::Message() << "B " << s.batch << " T " << s.length << " H " << s.key_heads << "/"
                                      << s.value_heads << " K " << s.key_width << " V " << s.value_width);
    const KdaInputs on_device = to_device(in);
    const oracle::KdaResult want = oracle::kda(s, in);
    float* o = output(static_cast<std::int64_t>(want.o.size()));
    float* final_state = output(state_count(s));
    ops().run(stream(), Kda{s, on_device, o, final_state});
    expect_near("o", o, want.o, kOutput);
    expect_near("final_state", final_state, want.final_state, kOutput);
    const Values d_o = random_values(static_cast<std::int64_t>(want.o.size()), 77);
    const oracle::KdaGradients gradient = oracle::kda_backward(s, in, d_o, d_final);
    const KdaBackward op = backward_op(s, on_device, d_o, d_final);
    ops().run(stream(), op);
    expect_near("d_q", op.d_q, gradient.q, kGradient);
    expect_near("d_k", op.d_k, gradient.k, kGradient);
    expect_near("d_v", op.d_v, gradient.v, kGradient);
    expect_near("d_gate", op.d_gate, gradient.gate, kGradient);
    expect_near("d_beta", op.d_beta, gradient.beta, kGradient);
    expect_near("d_a_log", op.d_a_log, gradient.a_log, kGradient);
    expect_near("d_dt_bias", op.d_dt_bias, gradient.dt_bias, kGradient);
    expect_near("d_initial_state", op.d_initial_state, gradient.initial_state, kGradient);
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(KdaOps);

// B T H HV K V: one step, under and over one chunk, lengths no chunk divides, grouped heads.
constexpr KdaShape kShapes[] = {{1, 1, 1, 1, 16, 16},   {2, 3, 1, 2, 16, 16},  {1, 16, 1, 1, 32, 16},
                                {1, 17, 2, 4, 16, 32},  {3, 33, 2, 2, 32, 32}, {1, 70, 1, 3, 64, 64},
                                {1, 50, 1, 1, 128, 128}};

TEST_P(KdaOps, LowerBoundGate) {
  for (const KdaShape& s : kShapes) check(s, inputs(s, 10), {});
}

TEST_P(KdaOps, SoftplusGate) {
  for (KdaShape s : kShapes) {
    s.gate = KdaGate::kSoftplus;
    check(s, inputs(s, 20), {});
  }
}

TEST_P(KdaOps, StateInAndGradientOfStateOut) {
  for (const KdaGate gate : {KdaGate::kLowerBound, KdaGate::kSoftplus}) {
    KdaShape s{2, 37, 2, 4, 32, 16};
    s.gate = gate;
    s.scale = 0.3F;
    oracle::KdaValues in = inputs(s, 30);
    in.initial_state = random_values(state_count(s), 31);
    check(s, in, random_values(state_count(s), 32));
  }
}

TEST_P(KdaOps, StrongDecaysAndNoDecay) {
  for (const double shift : {-30.0, 30.0}) {
    for (const KdaGate gate : {KdaGate::kLowerBound, KdaGate::kSoftplus}) {
      KdaShape s{1, 40, 1, 1, 16, 16};
      s.gate = gate;
      oracle::KdaValues in = inputs(s, 40);
      for (double& z : in.gate) z += shift;
      const KdaInputs on_device = to_device(in);
      const oracle::KdaResult want = oracle::kda(s, in);
      float* o = output(static_cast<std::int64_t>(want.o.size()));
      ops().run(stream(), Kda{s, on_device, o});
      expect_near("o", o, want.o, kOutput);
      const Values d_o = random_values(static_cast<std::int64_t>(want.o.size()), 41);
      const oracle::KdaGradients gradient = oracle::kda_backward(s, in, d_o, {});
      const KdaBackward op = backward_op(s, on_device, d_o, {});
      ops().run(stream(), op);
      expect_near("d_q", op.d_q, gradient.q, kGradient);
      expect_near("d_v", op.d_v, gradient.v, kGradient);
    }
  }
}

TEST_P(KdaOps, NearlyEqualKeysWithBetaNearOne) {
  const KdaShape s{1, 64, 1, 1, 32, 32};
  oracle::KdaValues in = inputs(s, 50);
  const Values noise = random_values(s.length * s.key_width, 51, 0.01);
  for (std::size_t i = 0; i < in.k.size(); ++i) {
    in.k[i] = in.k[i % static_cast<std::size_t>(s.key_width)] + noise[i];
    in.k[i] = static_cast<double>(static_cast<float>(in.k[i]));
  }
  for (double& beta : in.beta) beta = 6;
  for (double& z : in.gate) z -= 8;  // hardly any decay
  check(s, in, {});
}

TEST_P(KdaOps, SharedGradientsAddAndBitsRepeat) {
  const KdaShape s{2, 45, 2, 4, 32, 32};
  const KdaInputs in = to_device(inputs(s, 60));
  const Values d_o = random_values(s.batch * s.length * s.value_heads * s.value_width, 61);
  const KdaBackward first = backward_op(s, in, d_o, {}), second = backward_op(s, in, d_o, {});
  ops().run(stream(), first);
  ops().run(stream(), second);
  const std::int64_t keys = s.batch * s.length * s.key_heads * s.key_width;
  EXPECT_TRUE(same_bits(bench().floats(first.d_q, keys), bench().floats(second.d_q, keys)));
  EXPECT_TRUE(same_bits(bench().floats(first.d_k, keys), bench().floats(second.d_k, keys)));
  EXPECT_TRUE(same_bits(bench().floats(first.d_a_log, 4), bench().floats(second.d_a_log, 4)));
  Values twice = bench().download(first.d_a_log, s.value_heads);
  for (double& value : twice) value *= 2;
  ops().run(stream(), first);
  expect_near("d_a_log twice", first.d_a_log, twice, 1e-6);
}

}  // namespace
}  // namespace terrace::trainer
