// Sparse layers that share a choice of tokens, and indexers that warm up alone.
#include <algorithm>
#include <filesystem>
#include <map>

#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

using Bits = std::map<std::string, std::vector<float>>;

constexpr int kSteps = 4;

// Sparse layers 1, 3 and 5: with two to a choice, 1 selects for 3, and 5 for itself.
Rig::Options shared(std::int64_t select_every, Dtype compute = Dtype::kF32) {
  Rig::Options options;
  Config& config = options.config;
  config.model.layers = 6;
  config.train.length = 40;
  config.dsa.select_every = select_every;
  config.train.compute = compute;
  return options;
}
Rig::Options warming_up(std::int64_t steps, Dtype compute = Dtype::kF32) {
  Rig::Options options = shared(2, compute);
  options.config.dsa.warmup_steps = steps;
  return options;
}

bool of_indexer(const std::string& name) { return name.find(".index_") != std::string::npos; }

Bits values(Rig& rig) {
  Bits all;
  for (const NamedArray& array : rig.trainer().model().arrays()) {
    if (array.value == nullptr) continue;
    std::int64_t count = 1;
    for (const std::int64_t side : array.shape) count *= side;
    all[array.name] = rig.read(array.value, count);
  }
  return all;
}
Bits gradients(Rig& rig) {
  Bits all;
  for (const auto& group : rig.trainer().model().groups()) {
    for (const Parameter& p : group->parameters()) {
      if (p.gradient != nullptr) all[p.name] = rig.read(p.gradient, p.count());
    }
  }
  return all;
}

// The losses of steps 2, 3, ... of a run that is stopped in between.
std::vector<float> resumed(const Rig::Options& options, int first, int then) {
  const auto path = std::filesystem::path(::testing::TempDir()) / "selection.safetensors";
  {
    Rig rig(options);
    (void)rig.steps(first);
    rig.trainer().save(path.string());
  }
  Rig rig(options);
  rig.trainer().resume(path.string());
  std::filesystem::remove(path);
  return rig.steps(then);
}

TEST(SharedChoice, SaysWhoSelectsForWhom) {
  Config config = shared(2).config;
  const auto expect = [&](int layer, int owner, int last) {
    const SharedChoice choice = shared_choice(config, layer);
    EXPECT_EQ(choice.owner, owner) << layer;
    EXPECT_EQ(choice.last, last) << layer;
  };
  expect(1, 1, 3);
  expect(3, 1, 3);
  expect(5, 5, 5);
  config.dsa.select_every = 3;
  expect(1, 1, 5);
  expect(5, 1, 5);
  config.dsa.select_every = 1;
  expect(3, 3, 3);
}

TEST(SharedChoice, LayersThatReuseOneHaveNoIndexer) {
  Rig rig(shared(2));
  const Bits all = values(rig);
  for (const char* layer : {"layer.1.", "layer.5."})
    EXPECT_TRUE(all.contains(std::string(layer) + "dsa.index_q"));
  for (const auto& [name, unused] : all) {
    EXPECT_FALSE(name.rfind("layer.3.", 0) == 0 && of_indexer(name)) << name;
  }
  EXPECT_TRUE(all.contains("layer.3.dsa.q"));
}

// Where every token is chosen it makes no difference who chooses; where few are, it does.
TEST(SharedChoice, IsWhatTheOtherLayersLookAt) {
  for (const bool every_token : {true, false}) {
    Rig::Options apart = shared(1), together = shared(3);
    if (every_token) apart.config.dsa.top_k = together.config.dsa.top_k = apart.config.train.length;
    Rig one(apart), three(together);
    const float a = one.trainer().step(), b = three.trainer().step();
    EXPECT_EQ(a == b, every_token) << a << " and " << b;
  }
}

// It learns from its own layer's attention: what follows reads the same tokens and adds nothing.
TEST(SharedChoice, TeachesTheIndexerAsItsOwnLayerDoes) {
  Rig apart(shared(1)), together(shared(3));
  (void)apart.trainer().step();
  (void)together.trainer().step();
  const Bits a = gradients(apart), b = gradients(together);
  for (const char* name : {"index_q", "index_k", "index_w", "index_norm"}) {
    const std::string full = std::string("layer.1.dsa.") + name;
    EXPECT_EQ(a.at(full), b.at(full)) << full;
    EXPECT_TRUE(std::any_of(b.at(full).begin(), b.at(full).end(), [](float x) { return x != 0; })) << full;
  }
}

TEST(SharedChoice, GivesTheSameBitsHoweverActivationsAreKept) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig::Options options = shared(2, compute);
    Rig kept(options);
    options.config.train.recompute = Recompute::kFull;
    Rig recomputed(options);
    options.swapcore = SwapMode::kAuto;
    Rig cached(options);
    const auto losses = kept.steps(kSteps);
    EXPECT_EQ(recomputed.steps(kSteps), losses);
    EXPECT_EQ(cached.steps(kSteps), losses);
    EXPECT_EQ(values(recomputed), values(kept));
  }
}

TEST(SharedChoice, TakesAdaptersAndResumes) {
  Rig::Options options = shared(2);
  Rig whole(options);
  const auto losses = whole.steps(kSteps);
  EXPECT_EQ(resumed(options, 2, 2), std::vector<float>(losses.begin() + 2, losses.end()));
  options.config.lora = {.rank = 2, .targets = {"dsa.q", "dsa.index_q"}};
  Rig kept(options);
  options.config.train.recompute = Recompute::kFull;
  Rig recomputed(options);
  EXPECT_EQ(recomputed.steps(kSteps), kept.steps(kSteps));
}

TEST(WarmUp, MovesTheIndexersAlone) {
  for (const Dtype compute : {Dtype::kF32, Dtype::kBf16}) {
    Rig rig(warming_up(3, compute));
    const Bits before = values(rig);
    (void)rig.steps(3);
    const Bits warm = values(rig);
    for (const auto& [name, bits] : before) {
      if (name.find("index_bias") != std::string::npos) continue;  // shifts no softmax by much
      EXPECT_EQ(warm.at(name) == bits, !of_indexer(name)) << name;
    }
    (void)rig.steps(1);
    const Bits after = values(rig);
    for (const char* name : {"layer.1.dsa.q", "layer.0.kda.q", "head", "layer.1.dsa.index_q"}) {
      EXPECT_NE(after.at(name), warm.at(name)) << name;
    }
  }
}

// The first step: attention over all tokens, and the indexer's gradient is that of its loss on all of them.
TEST(WarmUp, LooksAtAllTokensAndTeachesAllOfThem) {
  Rig::Options dense = shared(2);
  dense.config.dsa.top_k = dense.config.train.length;
  Rig without(dense), with(warming_up(1));
  EXPECT_EQ(with.trainer().step(), without.trainer().step());
  const Bits want = gradients(without), got = gradients(with);
  int taught = 0;
  for (const auto& [name, bits] : got) {
    if (of_indexer(name)) {
      EXPECT_EQ(bits, want.at(name)) << name;
      ++taught;
    } else {
      EXPECT_TRUE(std::all_of(bits.begin(), bits.end(), [](float x) { return x == 0; })) << name;
    }
  }
  EXPECT_EQ(taught, 2 * 5);
}

// Where all tokens are chosen the indexers decide nothing: the model's steps, its schedule and its moments
// are those of a run without a warm-up.
TEST(WarmUp, LeavesTheRestAsIfItHadNotBeen) {
  Rig::Options options = warming_up(2);
  options.text = sample_text(static_cast<std::size_t>(options.config.train.length) + 1);  // one sequence
  options.config.dsa.top_k = options.config.train.length;
  options.config.train.clip_norm = 0;  // the norm is that of the indexers' gradients too
  Rig warm(options);
  options.config.dsa.warmup_steps = 0;
  Rig plain(options);
  (void)warm.steps(2);
  EXPECT_EQ(warm.steps(3), plain.steps(3));
}

TEST(WarmUp, ResumesInTheMiddleAndAfter) {
  const Rig::Options options = warming_up(2, Dtype::kBf16);
  Rig whole(options);
  const auto losses = whole.steps(5);
  EXPECT_EQ(resumed(options, 1, 4), std::vector<float>(losses.begin() + 1, losses.end()));
  EXPECT_EQ(resumed(options, 3, 2), std::vector<float>(losses.begin() + 3, losses.end()));
}

TEST(WarmUp, GivesTheSameBitsHoweverActivationsAreKept) {
  Rig::Options options = warming_up(2);
  options.config.moe.balance = Balance::kQuantile;
  Rig kept(options);
  options.config.train.recompute = Recompute::kFull;
  options.swapcore = SwapMode::kAuto;
  Rig cached(options);
  const auto losses = kept.steps(6);
  EXPECT_EQ(cached.steps(6), losses);
  EXPECT_GT(cached.session().counters().hits, 0U);  // the plan is that of steps that keep something
}

TEST(WarmUp, LeavesTheRoutersAlone) {
  for (const Balance balance : {Balance::kSign, Balance::kQuantile}) {
    Rig::Options options = warming_up(2);
    options.config.moe.balance = balance;
    Rig rig(options);
    const Bits before = values(rig);
    (void)rig.steps(2);
    EXPECT_EQ(values(rig).at("layer.0.moe.router_bias"), before.at("layer.0.moe.router_bias"));
    (void)rig.steps(1);
    EXPECT_NE(values(rig).at("layer.0.moe.router_bias"), before.at("layer.0.moe.router_bias"));
  }
}

TEST(WarmUp, MovesTheIndexersAdaptersAlone) {
  Rig::Options options = warming_up(2);
  options.config.lora = {.rank = 2, .targets = {"dsa.q", "dsa.index_q"}};
  Rig rig(options);
  const Bits before = values(rig);
  (void)rig.steps(2);
  for (const auto& [name, bits] : values(rig)) {
    EXPECT_EQ(bits != before.at(name), name.find("dsa.index_q.up") != std::string::npos ||
                                           name.find("dsa.index_q.down") != std::string::npos)
        << name;
  }
}

TEST(WarmUp, KeepsNoActivations) {
  const auto peak = [](Rig::Options options) {
    options.config.train.length = 200;
    Rig rig(options);
    (void)rig.steps(2);
    return rig.session().hbm_usage().live_peak;
  };
  EXPECT_LT(peak(warming_up(2)), peak(shared(2)));
}

TEST(WarmUp, SaysWhatItNeeds) {
  const auto failure = [](const std::string& text) {
    return failure_of([&] { (void)parse_config(text, "x.toml"); });
  };
  EXPECT_NE(failure("[dsa]\nwarmup_steps = 2\nindex_loss_weight = 0\n").find("x.toml:2:16: dsa.warmup_steps"),
            std::string::npos);
  EXPECT_NE(failure("[model]\ndsa_every = 9\n[dsa]\nwarmup_steps = 2\n").find("no layer is sparse"),
            std::string::npos);
  const std::string lora = "[dsa]\nwarmup_steps = 2\n[lora]\nrank = 2\ntargets = [\"dsa.q\"]\n";
  EXPECT_NE(failure(lora).find("\"dsa.index_q\""), std::string::npos);
  EXPECT_NE(failure("[dsa]\nselect_every = 0\n").find("1 or more"), std::string::npos);
}

}  // namespace
}  // namespace terrace::trainer::test
