#include <cmath>
#include <limits>

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
    return s.sequences() * s.value_heads * s.key_width * s.value_width;
  }
  // What an operator of this type sees of them.
  static oracle::KdaValues as_stored(oracle::KdaValues in, Dtype dtype) {
    for (Values* each : {&in.q, &in.k, &in.v, &in.gate, &in.beta}) *each = rounded(std::move(*each), dtype);
    return in;
  }
  KdaInputs to_device(const oracle::KdaValues& in, Dtype dtype = Dtype::kF32) {
    return {.q = upload(in.q, dtype),
            .k = upload(in.k, dtype),
            .v = upload(in.v, dtype),
            .gate = upload(in.gate, dtype),
            .beta = upload(in.beta, dtype),
            .a_log = upload(in.a_log),
            .dt_bias = upload(in.dt_bias),
            .initial_state = in.initial_state.empty() ? nullptr : upload(in.initial_state)};
  }
  KdaBackward backward_op(const KdaShape& s, const KdaInputs& in, const Values& d_o, const Values& d_final) {
    const std::int64_t tokens = s.batch * s.length;
    const Dtype dtype = in.q.dtype();
    return {.shape = s,
            .in = in,
            .d_o = upload(d_o, dtype),
            .d_final_state = d_final.empty() ? nullptr : upload(d_final),
            .d_q = output(tokens * s.key_heads * s.key_width, dtype),
            .d_k = output(tokens * s.key_heads * s.key_width, dtype),
            .d_v = output(tokens * s.value_heads * s.value_width, dtype),
            .d_gate = output(tokens * s.value_heads * s.key_width, dtype),
            .d_beta = output(tokens * s.value_heads, dtype),
            .d_a_log = zeros(s.value_heads),
            .d_dt_bias = zeros(s.value_heads * s.key_width),
            .d_initial_state = output(state_count(s))};
  }
  // With starts in `raw` the shape is packed.
  void check(KdaShape s, const oracle::KdaValues& raw, const Values& d_final, Dtype dtype = Dtype::kF32) {
    SCOPED_TRACE(::testing::Message()
                 << name_of(dtype) << " B " << s.batch << " T " << s.length << " H " << s.key_heads << "/"
                 << s.value_heads << " K " << s.key_width << " V " << s.value_width);
    const oracle::KdaValues in = as_stored(raw, dtype);
    if (!in.starts.empty()) {
      s.packing = {static_cast<std::int64_t>(in.starts.size()) - 1, upload(in.starts)};
    }
    const KdaInputs on_device = to_device(in, dtype);
    const oracle::KdaResult want = oracle::kda(s, in);
    const Out o = output(static_cast<std::int64_t>(want.o.size()), dtype);
    float* final_state = output(state_count(s));
    ops().run(stream(), Kda{s, on_device, o, final_state});
    const double near = output_tolerance(dtype), gradient_near = gradient_tolerance(dtype);
    expect_near("o", o, want.o, near);
    expect_near("final_state", final_state, want.final_state, near);
    const Values d_o = rounded(random_values(static_cast<std::int64_t>(want.o.size()), 77), dtype);
    const oracle::KdaGradients gradient = oracle::kda_backward(s, in, d_o, d_final);
    const KdaBackward op = backward_op(s, on_device, d_o, d_final);
    ops().run(stream(), op);
    expect_near("d_q", op.d_q, gradient.q, gradient_near);
    expect_near("d_k", op.d_k, gradient.k, gradient_near);
    expect_near("d_v", op.d_v, gradient.v, gradient_near);
    expect_near("d_gate", op.d_gate, gradient.gate, gradient_near);
    expect_near("d_beta", op.d_beta, gradient.beta, gradient_near);
    expect_near("d_a_log", op.d_a_log, gradient.a_log, gradient_near);
    expect_near("d_dt_bias", op.d_dt_bias, gradient.dt_bias, gradient_near);
    expect_near("d_initial_state", op.d_initial_state, gradient.initial_state, gradient_near);
  }
  void check_packed(Dtype dtype) {
    for (const std::int64_t width : {32, 128}) {
      for (const KdaGate gate : {KdaGate::kLowerBound, KdaGate::kSoftplus}) {
        KdaShape s{1, 150, 1, 2, width, width};
        s.gate = gate;
        oracle::KdaValues in = inputs(s, 110);
        in.starts = {0, 0, 1, 17, 82, 82, 150, 150};  // lengths 0, 1, 16, 65, 0, 68, 0
        const std::int64_t states = 7 * s.value_heads * width * width;
        in.initial_state = random_values(states, 111);
        check(s, in, random_values(states, 112), dtype);
      }
    }
  }
  // Nearly equal keys, all but replacing what the state holds: L is close to all ones.
  static oracle::KdaValues collinear(const KdaShape& s, std::uint64_t seed) {
    oracle::KdaValues in = inputs(s, seed);
    const Values noise = random_values(s.length * s.key_width, seed + 1, 0.01);
    for (std::size_t i = 0; i < in.k.size(); ++i) {
      in.k[i] = in.k[i % static_cast<std::size_t>(s.key_width)] + noise[i];
      in.k[i] = static_cast<double>(static_cast<float>(in.k[i]));
    }
    for (double& beta : in.beta) beta = 6;
    for (double& z : in.gate) z -= 8;  // hardly any decay
    return in;
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
  const KdaShape narrow{1, 64, 1, 1, 32, 32}, wide{1, 130, 1, 1, 128, 128};
  check(narrow, collinear(narrow, 50), {});
  for (const Dtype dtype : kBothTypes) check(wide, collinear(wide, 52), {}, dtype);
}

// 128 wide are the shapes of the chunked kernels: chunks of 64 rows.
TEST_P(KdaOps, Bf16OfEveryWidthAndLength) {
  constexpr KdaShape kBf16Shapes[] = {
      {1, 1, 1, 1, 128, 128},  {2, 63, 1, 1, 128, 128},  {1, 64, 2, 2, 128, 128},
      {2, 65, 1, 2, 128, 128}, {1, 200, 1, 1, 128, 128}, {1, 70, 2, 2, 64, 64},
      {1, 130, 1, 2, 32, 32},  {2, 65, 1, 1, 16, 16},    {1, 40, 1, 1, 128, 64}};
  for (KdaShape s : kBf16Shapes) {
    for (const KdaGate gate : {KdaGate::kLowerBound, KdaGate::kSoftplus}) {
      s.gate = gate;
      check(s, inputs(s, 80), {}, Dtype::kBf16);
    }
  }
}

TEST_P(KdaOps, ManyHeadsShareTheDeviceDifferently) {
  // Some and many states: the blocks that carry them take 64 or 128 value columns; elsewhere 32.
  for (const std::int64_t heads : {34, 67}) {
    KdaShape s{1, 9, 1, heads, 128, 128};
    check(s, inputs(s, 90), {}, Dtype::kBf16);
  }
}

TEST_P(KdaOps, Bf16StateInAndGradientOfStateOut) {
  KdaShape s{2, 130, 1, 2, 128, 128};
  oracle::KdaValues in = inputs(s, 100);
  in.initial_state = random_values(state_count(s), 101);
  check(s, in, random_values(state_count(s), 102), Dtype::kBf16);
}

TEST_P(KdaOps, PackedSequencesDoNotSeeOneAnother) { check_packed(Dtype::kF32); }
TEST_P(KdaOps, Bf16PackedSequencesDoNotSeeOneAnother) { check_packed(Dtype::kBf16); }

TEST_P(KdaOps, NoTokensLeaveTheState) {
  const KdaShape s{2, 0, 1, 1, 128, 128};
  oracle::KdaValues in = inputs(s, 120);
  in.initial_state = random_values(state_count(s), 121);
  check(s, in, random_values(state_count(s), 122), Dtype::kBf16);
}

// Between kernels rows travel as whole numbers, which cannot say NaN; their factors must.
TEST_P(KdaOps, Bf16NotANumberIsSeen) {
  const KdaShape s{1, 130, 1, 1, 128, 128};
  const oracle::KdaValues in = as_stored(inputs(s, 140), Dtype::kBf16);
  constexpr std::int64_t kRow = 70;
  Values d_o = rounded(random_values(s.length * s.value_width, 141), Dtype::kBf16);
  d_o[kRow * s.value_width + 5] = std::numeric_limits<double>::quiet_NaN();
  const KdaBackward op = backward_op(s, to_device(in, Dtype::kBf16), d_o, {});
  ops().run(stream(), op);
  const Values d_q = download(op.d_q, s.length * s.key_width);
  for (std::int64_t i = 0; i < s.key_width; ++i) EXPECT_TRUE(std::isnan(d_q[kRow * s.key_width + i]));
  EXPECT_FALSE(std::isnan(d_q[(kRow + 1) * s.key_width]));
}

TEST_P(KdaOps, ChunkedBitsRepeat) {
  const KdaShape s{2, 130, 1, 2, 128, 128};
  const KdaInputs in = to_device(as_stored(inputs(s, 130), Dtype::kBf16), Dtype::kBf16);
  const std::int64_t keys = s.batch * s.length * s.key_heads * s.key_width, values = 2 * keys;
  const Values d_o = random_values(values, 131);
  const Out o[2] = {output(values, Dtype::kBf16), output(values, Dtype::kBf16)};
  const KdaBackward op[2] = {backward_op(s, in, d_o, {}), backward_op(s, in, d_o, {})};
  for (int i = 0; i < 2; ++i) {
    ops().run(stream(), Kda{s, in, o[i]});
    ops().run(stream(), op[i]);
  }
  expect_same_bits("o", o[0], o[1], values);
  expect_same_bits("d_q", op[0].d_q, op[1].d_q, keys);
  expect_same_bits("d_k", op[0].d_k, op[1].d_k, keys);
  expect_same_bits("d_gate", op[0].d_gate, op[1].d_gate, values);
  expect_same_bits("d_a_log", op[0].d_a_log, op[1].d_a_log, s.value_heads);
  expect_same_bits("d_dt_bias", op[0].d_dt_bias, op[1].d_dt_bias, s.value_heads * s.key_width);
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
