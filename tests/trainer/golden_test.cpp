// Every golden file of an operator we have, against the operator: outputs and gradients within the tolerances
// of fp32. The device is TERRACE_TEST_DEVICE: emulated (the default) or cuda.
#include <cctype>
#include <cstdlib>

#include "tests/trainer/golden_file.hpp"

namespace terrace::trainer {
namespace {

const char* device_kind() {
  const char* set = std::getenv("TERRACE_TEST_DEVICE");
  return set != nullptr && *set != '\0' ? set : "emulated";
}

void check_conv(OpsBench& bench, const GoldenFile& file) {
  const std::int64_t B = file.dim("x", 0), T = file.dim("x", 1), C = file.dim("x", 2),
                     taps = file.dim("weight", 1);
  const float* x = bench.upload(file.values("x"));
  const float* w = bench.upload(file.values("weight"));
  float* y = bench.output(B * T * C);
  float* d_x = bench.output(B * T * C);
  float* d_w = bench.zeros(C * taps);
  bench.ops().run(bench.stream(), CausalConv{B, T, C, taps, x, w, y});
  bench.ops().run(bench.stream(),
                  CausalConvBackward{B, T, C, taps, x, w, bench.upload(file.values("d_out")), d_x, d_w});
  expect_golden(bench, file, "out", y, kGoldenOutput);
  expect_golden(bench, file, "d_x", d_x, kGoldenGradient);
  expect_golden(bench, file, "d_weight", d_w, kGoldenGradient);
}

void check_kda(OpsBench& bench, const GoldenFile& file) {
  const KdaShape shape{.batch = file.dim("q", 0),
                       .length = file.dim("q", 1),
                       .key_heads = file.dim("q", 2),
                       .value_heads = file.dim("v", 2),
                       .key_width = file.dim("q", 3),
                       .value_width = file.dim("v", 3),
                       .gate = file.word("gate") == "softplus" ? KdaGate::kSoftplus : KdaGate::kLowerBound,
                       .lower_bound = file.number("lower_bound"),
                       .l2_eps = file.number("l2_eps"),
                       .scale = file.number("scale")};
  const auto given = [&](const char* name) -> float* {
    return file.has(name) ? bench.upload(file.values(name)) : nullptr;
  };
  const KdaInputs in{.q = given("q"),
                     .k = given("k"),
                     .v = given("v"),
                     .gate = given("gate_in"),
                     .beta = given("beta_in"),
                     .a_log = given("a_log"),
                     .dt_bias = given("dt_bias"),
                     .initial_state = given("initial_state")};
  const auto space = [&](const char* name) {
    return bench.zeros(static_cast<std::int64_t>(file.values(name).size()));
  };
  float* o = space("out");
  float* final_state = space("final_state");
  bench.ops().run(bench.stream(), Kda{shape, in, o, final_state});
  const bool initial = file.has("d_initial_state");
  const KdaBackward backward{.shape = shape,
                             .in = in,
                             .d_o = given("d_out"),
                             .d_final_state = given("d_final_state"),
                             .d_q = space("d_q"),
                             .d_k = space("d_k"),
                             .d_v = space("d_v"),
                             .d_gate = space("d_gate_in"),
                             .d_beta = space("d_beta_in"),
                             .d_a_log = space("d_a_log"),
                             .d_dt_bias = space("d_dt_bias"),
                             .d_initial_state = initial ? space("d_initial_state") : nullptr};
  bench.ops().run(bench.stream(), backward);
  expect_golden(bench, file, "out", o, kGoldenOutput);
  expect_golden(bench, file, "final_state", final_state, kGoldenOutput);
  expect_golden(bench, file, "d_q", backward.d_q, kGoldenGradient);
  expect_golden(bench, file, "d_k", backward.d_k, kGoldenGradient);
  expect_golden(bench, file, "d_v", backward.d_v, kGoldenGradient);
  expect_golden(bench, file, "d_gate_in", backward.d_gate, kGoldenGradient);
  expect_golden(bench, file, "d_beta_in", backward.d_beta, kGoldenGradient);
  expect_golden(bench, file, "d_a_log", backward.d_a_log, kGoldenGradient);
  expect_golden(bench, file, "d_dt_bias", backward.d_dt_bias, kGoldenGradient);
  if (initial) expect_golden(bench, file, "d_initial_state", backward.d_initial_state, kGoldenGradient);
}

// The file's (T, T) mask as lists of positions.
std::vector<std::int32_t> lists_of(const std::vector<std::int32_t>& mask, const DsaShape& shape) {
  std::vector<std::int32_t> lists;
  for (std::int64_t t = 0; t < shape.length; ++t) {
    for (std::int64_t s = 0; s < shape.length; ++s) {
      if (mask[static_cast<std::size_t>(t * shape.length + s)] != 0)
        lists.push_back(static_cast<std::int32_t>(s));
    }
    lists.resize(static_cast<std::size_t>((t + 1) * shape.slots()), -1);
  }
  return lists;
}

// Scores of the past agree; the selection may differ from the file's only where the scores tie.
void check_selection(OpsBench& bench, const GoldenFile& file, const DsaShape& shape, const DsaInputs& in,
                     const std::vector<std::int32_t>& want) {
  std::int32_t* selected = bench.int_output(shape.length * shape.slots());
  float* scores = bench.output(shape.length * shape.length);
  bench.ops().run(bench.stream(), DsaSelect{shape, in, selected, scores});
  const Values got_scores = bench.download(scores, shape.length * shape.length);
  const Values want_scores = file.values("index_scores");
  const std::vector<std::int32_t> got = bench.ints(selected, shape.length * shape.slots());
  Values got_past, want_past, got_chosen, want_chosen;
  for (std::int64_t t = 0; t < shape.length; ++t) {
    const auto score = [&](std::int32_t position) {
      return want_scores[static_cast<std::size_t>(t * shape.length + position)];
    };
    for (std::int32_t s = 0; s <= t; ++s) {
      got_past.push_back(got_scores[static_cast<std::size_t>(t * shape.length + s)]);
      want_past.push_back(score(s));
    }
    Values got_row, want_row;
    for (std::int64_t j = t * shape.slots(); j < (t + 1) * shape.slots(); ++j) {
      const std::int32_t a = got[static_cast<std::size_t>(j)], b = want[static_cast<std::size_t>(j)];
      ASSERT_EQ(a < 0, b < 0) << "token " << t;
      if (a < 0) continue;
      ASSERT_LE(a, t);
      got_row.push_back(score(a));
      want_row.push_back(score(b));
    }
    std::sort(got_row.begin(), got_row.end());
    std::sort(want_row.begin(), want_row.end());
    got_chosen.insert(got_chosen.end(), got_row.begin(), got_row.end());
    want_chosen.insert(want_chosen.end(), want_row.begin(), want_row.end());
  }
  EXPECT_LE(relative_error(got_past, want_past), kGoldenOutput) << "index_scores";
  EXPECT_LE(relative_error(got_chosen, want_chosen), 1e-6) << "selected";
}

void check_dsa(OpsBench& bench, const GoldenFile& file) {
  const DsaShape shape{.batch = 1,
                       .length = file.dim("q", 0),
                       .heads = file.dim("q", 1),
                       .key_width = file.dim("q", 2),
                       .value_width = file.dim("v", 1),
                       .index_heads = file.dim("qi", 1),
                       .index_width = file.dim("qi", 2),
                       .top_k = file.whole("topk"),
                       .scale = file.number("scale")};
  const bool sink = file.word("sink") == "True";
  const DsaInputs in{.q = bench.upload(file.values("q")),
                     .k = bench.upload(file.values("k")),
                     .v = bench.upload(file.values("v")),
                     .gate = bench.upload(file.values("gate_in")),
                     .sink = sink ? bench.upload(file.values("sink")) : nullptr,
                     .index_q = bench.upload(file.values("qi")),
                     .index_k = bench.upload(file.values("ki")),
                     .index_w = bench.upload(file.values("wi"))};
  const std::vector<std::int32_t> lists = lists_of(file.ints("selected"), shape);
  check_selection(bench, file, shape, in, lists);
  const std::int32_t* selected = bench.upload(lists);
  const auto space = [&](const char* name) {
    return bench.output(static_cast<std::int64_t>(file.values(name).size()));
  };
  float* y = space("out");
  bench.ops().run(bench.stream(), Dsa{shape, in, selected, y});
  const DsaBackward backward{.shape = shape,
                             .in = in,
                             .selected = selected,
                             .d_y = bench.upload(file.values("d_out")),
                             .d_q = space("d_q"),
                             .d_k = space("d_k"),
                             .d_v = space("d_v"),
                             .d_gate = space("d_gate_in"),
                             .d_sink = sink ? bench.zeros(shape.heads) : nullptr,
                             .index_loss_weight = 1,
                             .d_index_q = space("d_qi"),
                             .d_index_k = space("d_ki"),
                             .d_index_w = space("d_wi"),
                             .index_loss = bench.output(1)};
  bench.ops().run(bench.stream(), backward);
  expect_golden(bench, file, "out", y, kGoldenOutput);
  expect_golden(bench, file, "indexer_loss", backward.index_loss, kGoldenOutput);
  expect_golden(bench, file, "d_q", backward.d_q, kGoldenGradient);
  expect_golden(bench, file, "d_k", backward.d_k, kGoldenGradient);
  expect_golden(bench, file, "d_v", backward.d_v, kGoldenGradient);
  expect_golden(bench, file, "d_gate_in", backward.d_gate, kGoldenGradient);
  if (sink) expect_golden(bench, file, "d_sink", backward.d_sink, kGoldenGradient);
  expect_golden(bench, file, "d_qi", backward.d_index_q, kGoldenGradient);
  expect_golden(bench, file, "d_ki", backward.d_index_k, kGoldenGradient);
  expect_golden(bench, file, "d_wi", backward.d_index_w, kGoldenGradient);
}

void check_cross_entropy(OpsBench& bench, const GoldenFile& file) {
  const std::int64_t T = file.dim("hidden", 0), D = file.dim("hidden", 1), V = file.dim("weight", 0);
  const std::vector<std::int32_t> labels = file.ints("labels");
  const auto counted = static_cast<float>(T - std::count(labels.begin(), labels.end(), -100));
  float* loss = bench.zeros(1);
  float* d_hidden = bench.output(T * D);
  float* d_weight = bench.zeros(V * D);
  bench.ops().run(bench.stream(), LinearCrossEntropy{.tokens = T,
                                                     .width = D,
                                                     .vocabulary = V,
                                                     .hidden = bench.upload(file.values("hidden")),
                                                     .weight = bench.upload(file.values("weight")),
                                                     .labels = bench.upload(labels),
                                                     .gradient_scale = 1.0F / counted,
                                                     .loss_sum = loss,
                                                     .d_hidden = d_hidden,
                                                     .d_weight = d_weight});
  const double mean = bench.download(loss, 1)[0] / static_cast<double>(counted);
  EXPECT_LE(relative_error({mean}, file.values("loss")), kGoldenOutput) << "loss";
  expect_golden(bench, file, "d_hidden", d_hidden, kGoldenGradient);
  expect_golden(bench, file, "d_weight", d_weight, kGoldenGradient);
}

struct Checker {
  const char* op;
  void (*check)(OpsBench&, const GoldenFile&);
};
constexpr Checker kCheckers[] = {{"attnres", check_attn_res},
                                 {"causal_conv1d_silu", check_conv},
                                 {"kda", check_kda},
                                 {"dsa", check_dsa},
                                 {"latent_moe", check_latent_moe},
                                 {"linear_cross_entropy", check_cross_entropy}};

class Golden : public ::testing::TestWithParam<std::filesystem::path> {
 protected:
  void SetUp() override {
    if (std::string(device_kind()) == "cuda" && !cuda_available()) {
      GTEST_SKIP() << "no CUDA device on this machine";
    }
  }
};

TEST_P(Golden, OutputsAndGradients) {
  const GoldenFile file(GetParam());
  for (const Checker& checker : kCheckers) {
    if (file.word("op") != checker.op) continue;
    OpsBench bench(device_kind());
    checker.check(bench, file);
    return;
  }
  GTEST_SKIP() << "not covered: no operator here is named \"" << file.word("op") << "\"";
}

std::string name_of_file(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  std::string name = info.param.stem().string();
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}
INSTANTIATE_TEST_SUITE_P(Files, Golden, ::testing::ValuesIn(golden_files()), name_of_file);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Golden);

TEST(GoldenFolder, HasFiles) {
  EXPECT_FALSE(golden_files().empty()) << "TERRACE_GOLDEN_DIR names a folder without .safetensors files";
}

}  // namespace
}  // namespace terrace::trainer
