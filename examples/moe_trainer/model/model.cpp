#include "examples/moe_trainer/model/model.hpp"

#include <numeric>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "runtime/metrics.hpp"

namespace terrace::trainer {

namespace {
constexpr double kEmbeddingDeviation = 0.5;

void check_muon(const Config& config, const Policy& policy) {
  if (config.train.optimizer != OptimizerKind::kMuon || policy.optimizer.tier != StateTier::kDdr) return;
  bad_input(
      "train.optimizer: \"muon\" works on whole matrices and keeps its momentum in HBM; use [optimizer] tier "
      "= "
      "\"hbm\", or \"adamw\"");
}

void check_gradients(const Policy& policy) {
  if (policy.optimizer.gradients != StateTier::kDdr || policy.optimizer.tier == StateTier::kDdr) return;
  bad_input(
      "optimizer.gradients: gradients leave HBM together with optimizer state; set [optimizer] tier = "
      "\"ddr\", "
      "or gradients = \"hbm\"");
}

}  // namespace

Model::Model(Session& session, const Config& config) : config_(config) {
  const auto group = [&](std::string name) -> ParameterGroup& {
    const Training base = config.lora.rank > 0 ? Training::kNo : Training::kYes;
    return *groups_.emplace_back(std::make_unique<ParameterGroup>(std::move(name), base));
  };
  const std::int64_t hidden = config.model.hidden;
  embedding_ = &group("embedding")
                    .declare({.name = "embedding",
                              .shape = {config.model.vocabulary, hidden},
                              .init = Init::normal(kEmbeddingDeviation),
                              .precision = Precision::kCompute});
  for (int layer = 0; layer < config.model.layers; ++layer) {
    ParameterGroup& parameters = group("layer." + std::to_string(layer));
    layers_.push_back(std::make_unique<Layer>(LayerScope{session, parameters, maps_, config, layer}));
  }
  ParameterGroup& last = group("head");
  norm_ = {.weight = &last.declare(vector_of("final_norm", {hidden}, 1)),
           .eps = static_cast<float>(config.model.norm_eps)};
  mix_ = ResidualMix::declare(last, config, "final_mix.");
  // Small logits: the first loss is that of a guess, the logarithm of the vocabulary's size.
  head_ = &last.declare({.name = "head",
                         .shape = {config.model.vocabulary, hidden},
                         .init = Init::normal(1.0 / static_cast<double>(hidden)),
                         .precision = Precision::kCompute});
  if (config.images.patch > 0) {
    patches_.emplace(*groups_.emplace_back(std::make_unique<ParameterGroup>("images")), maps_, config);
  }
  check_targets();
}

// A target that no matrix has is a slip of the pen.
void Model::check_targets() const {
  for (const std::string& target : config_.lora.targets) {
    bool found = false;
    for (const auto& group : groups_) {
      for (const Parameter& parameter : group->parameters()) {
        const std::string end = "." + target;
        found = found || (parameter.down != nullptr && parameter.name.size() > end.size() &&
                          parameter.name.compare(parameter.name.size() - end.size(), end.size(), end) == 0);
      }
    }
    if (!found) bad_input("lora.targets: no matrix of this model is named \"" + target + "\"");
  }
}

// By group; DDR for the layers whose experts stream.
std::vector<StateTier> Model::expert_tiers(const Policy& policy, const ParameterGroup::Allocation& how) {
  std::vector<Bytes> bytes;
  bool trained = false;
  for (const auto& group : groups_) {
    bytes.push_back(group->expert_bytes(how));
    trained = trained || group->trains_experts();
  }
  const Bytes all = std::accumulate(bytes.begin(), bytes.end(), 0_B);
  const Bytes resident = policy.experts.resident.resolve(all, all);
  // By layer some stay whole; else all stream, and what stays are copies of the hot ones.
  const bool by_layer = policy.experts.load == ExpertLoad::kLayer || resident >= all;
  std::vector<StateTier> tiers =
      by_layer ? ExpertStore::spread(bytes, resident) : std::vector<StateTier>(bytes.size(), StateTier::kDdr);
  bool streamed = false;
  for (std::size_t i = 0; i < tiers.size(); ++i) {
    if (bytes[i] == 0_B) tiers[i] = StateTier::kHbm;
    streamed = streamed || tiers[i] == StateTier::kDdr;
  }
  if (streamed && config_.moe.compute == ExpertCompute::kFp8) {
    bad_input(
        "experts.resident: moe.compute = \"fp8\" keeps 8-bit copies of all experts in HBM; use resident = "
        "\"100%\", or moe.compute = \"same\"");
  }
  if (streamed && trained && policy.optimizer.tier != StateTier::kDdr) {
    bad_input(
        "experts.resident: trained experts leave HBM together with their optimizer state; set [optimizer] "
        "tier = \"ddr\", or resident = \"100%\"");
  }
  return tiers;
}

// The embedding, the head and what makes tokens of patches are matrices whose rows are apart: AdamW's.
MatrixRule Model::rule_of(const ParameterGroup& group) const {
  const bool layer = &group != groups_.front().get() && &group != &of_head() &&
                     !(patches_ && &group == groups_.back().get());
  return layer && config_.train.optimizer == OptimizerKind::kMuon ? MatrixRule::kMuon : MatrixRule::kAdamW;
}

// By group, what would lie in DDR were there no file, but for its bounce buffers. The policy leaves room to
// cached outputs: a sixteenth where it does not say.
DdrDemand Model::ddr_demand(const Session& session, const std::vector<StateTier>& tiers,
                            const ParameterGroup::Allocation& how) const {
  const PoolUsage ddr = session.ddr_usage();
  const Bytes spare = session.policy().swapcore.ddr_budget.resolve(ddr.budget, ddr.budget / 16);
  DdrDemand demand{.budget = ddr.budget, .fixed = ddr.live + spare, .groups = {}};
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const ParameterGroup& group = *groups_[i];
    DdrDemand::Group& of = demand.groups.emplace_back();
    of.chunks = StateHome::chunk_bytes(group.state_plan(how));
    if (!of.chunks.empty()) demand.fixed += StateHome::kLeastInDdr;
    demand.fixed += group.gradient_home_bytes(how);
    if (tiers[i] == StateTier::kHbm) continue;
    if (group.trains_experts()) {
      demand.fixed += group.expert_block_bytes();
    } else {
      of.frozen = group.expert_block_bytes();
      of.experts = static_cast<std::int64_t>(group.expert_count());
    }
  }
  return demand;
}

// Of experts at least so many.
Bytes Model::file_bytes(const ColdPlan& cold, const ParameterGroup::Allocation& how) const {
  Bytes bytes = cold.experts;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    StateHome::Plan plan = groups_[i]->state_plan(how);
    plan.cold = cold.groups[i].chunks;
    bytes += StateHome::file_bytes(plan);
  }
  return bytes;
}

// A file that state does not fit into is known before anything is moved there.
ColdPlan Model::open_file(Session& session, const std::vector<StateTier>& tiers,
                          const ParameterGroup::Allocation& how) {
  ColdPlan cold{.groups = std::vector<ColdPlan::Group>(groups_.size()), .experts = {}, .state = {}};
  const Bytes budget = session.policy().nvme.budget;
  if (budget == 0_B) return cold;
  const auto plan_for = [&, demand = ddr_demand(session, tiers, how)](Bytes file) {
    DdrDemand with_buffers = demand;
    with_buffers.fixed += Session::nvme_bounce_bytes(file);
    return plan_cold(with_buffers);
  };
  cold = plan_for(budget);
  if (cold.state > 0_B && file_bytes(cold, how) > budget) {
    // A larger file has larger buffers, for which more goes there.
    Bytes enough = budget;
    for (Bytes wanted = file_bytes(cold, how); wanted > enough; wanted = file_bytes(plan_for(enough), how))
      enough = round_up(wanted, 1_MiB);
    fail(out_of_budget(
        enough, Pool::kOptimizer,
        "nvme.budget: " + format_bytes(cold.experts + cold.state) +
            " of experts and optimizer state that DDR has no room for do not fit into a file of " +
            format_bytes(budget) + "; use [nvme] budget = \"" + std::to_string(enough / 1_MiB) +
            "MiB\" or more, or a larger [ddr] budget"));
  }
  if (cold.experts + cold.state > 0_B) nvme_ = require(session.open_nvme());
  return cold;
}

void Model::allocate(Session& session, Memory& memory, Ops& ops, std::uint64_t seed) {
  const Policy& policy = session.policy();
  check_gradients(policy);
  check_muon(config_, policy);
  ParameterGroup::Allocation how{
      .seed = seed,
      .compute = config_.train.compute,
      .frozen = config_.lora.base == LoraBase::kInt8 ? FrozenForm::kBlocks : FrozenForm::kCompute,
      .state = policy.optimizer.tier == StateTier::kDdr ? StateTier::kDdr : StateTier::kHbm,
      .gradients = policy.optimizer.gradients};
  const std::vector<StateTier> tiers = expert_tiers(policy, how);
  std::vector<std::int64_t> numbers;
  for (const auto& group : groups_) numbers.push_back(group->state_plan(how).numbers);
  how.state_chunk = StateHome::chunk_of(numbers);
  const ColdPlan cold = open_file(session, tiers, how);
  how.cold = nvme_.get();
  std::vector<ParameterGroup*> streamed;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (tiers[i] == StateTier::kDdr) streamed.push_back(groups_[i].get());
  }
  if (!streamed.empty()) how.expert_pool = Pool::kExpert;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    how.experts = tiers[i];
    how.matrices = rule_of(*groups_[i]);
    how.cold_experts = cold.groups[i].experts;
    how.cold_state = cold.groups[i].chunks;
    groups_[i]->allocate(memory, ops, session.compute(), how);
  }
  for (const Pool pool : {Pool::kExpert, Pool::kOptimizer}) {
    if (nvme_ != nullptr) metrics().set<Metric::kTierBytes>(TierId::kNvme, pool, nvme_bytes(pool));
  }
  open_stores(memory, std::move(streamed));
  maps_.allocate(session, memory);
  for (const auto& layer : layers_) layer->allocate(memory);
}

void Model::open_stores(Memory& memory, std::vector<ParameterGroup*> streamed) {
  const Policy& policy = memory.session().policy();
  std::vector<ParameterGroup*> with_gradients;
  for (const auto& group : groups_) {
    if (group->expert_gradient_home() != nullptr) with_gradients.push_back(group.get());
  }
  if (!with_gradients.empty()) {
    gradients_ = std::make_unique<ExpertGradients>(memory.session(), std::move(with_gradients));
  }
  if (streamed.empty()) return;
  Bytes all;
  for (const ParameterGroup* group : streamed) all += group->expert_block_bytes();
  const bool by_layer = policy.experts.load == ExpertLoad::kLayer;  // then layers stay, and are counted
  experts_ = std::make_unique<ExpertStore>(
      memory, std::move(streamed),
      ExpertStore::Options{.prefetch = policy.experts.prefetch,
                           .load = policy.experts.load,
                           .resident = by_layer ? 0_B : policy.experts.resident.resolve(all, all),
                           .micro_batches = config_.train.micro_batches,
                           // Forward, the same again where layers are recomputed, and twice that.
                           .forward_share = config_.train.recompute == Recompute::kFull ? 1.0 / 4 : 1.0 / 3,
                           .cold = nvme_.get()});
}

void Model::refresh_copies(Ops& ops, Stream stream) const {
  for (const auto& group : groups_) group->refresh_copies(ops, stream);
  if (experts_ != nullptr) experts_->renew();
}

Tensor Model::embed(const Pass& pass, const MicroBatch& batch) const {
  use(*groups_.front());
  if (patches_) use(*groups_.back());
  Tensor x = pass.tensor(config_.tokens(), config_.model.hidden);
  pass.ops.run(pass.stream, Embedding{.tokens = x.rows,
                                      .width = x.width,
                                      .vocabulary = config_.model.vocabulary,
                                      .ids = batch.ids,
                                      .table = embedding_->operand(),
                                      .out = x});
  if (batch.images.rows > 0) patches_->forward(pass, batch.images, x);
  return x;
}

ResidualStream Model::run_layers(const Pass& pass, const MicroBatch& batch,
                                 std::vector<Layer::Saved>& saved) const {
  ResidualStream stream;
  stream.sum = embed(pass, batch);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    pass.session.enter_forward(static_cast<int>(i), pass.micro_batch);
    use(of_layer(i));
    layers_[i]->forward(pass, stream, saved[i]);
  }
  return stream;
}

// The loss and its gradient in one go; returns the gradients of the stream, which goes.
ResidualStream Model::head(const Pass& pass, const MicroBatch& batch, ResidualStream stream,
                           float* loss_sum) const {
  use(of_head());
  Tensor x = mix_ ? mix_->forward(pass, stream.parts, stream.sum) : stream.sum;
  Tensor normed = norm_.forward(pass, x);
  const Tensor d_normed = pass.tensor(x.rows, x.width);
  pass.ops.run(pass.stream, LinearCrossEntropy{.tokens = x.rows,
                                               .width = x.width,
                                               .vocabulary = config_.model.vocabulary,
                                               .hidden = normed,
                                               .weight = head_->operand(),
                                               .labels = batch.labels,
                                               .gradient_scale = 1.0F / static_cast<float>(batch.counted),
                                               .loss_sum = loss_sum,
                                               .d_hidden = d_normed,
                                               .d_weight = head_->gradient});
  drop(normed);
  ResidualStream d;
  d.parts.resize(stream.parts.size());
  const Tensor d_x = pass.tensor(x.rows, x.width);
  norm_.backward(pass, x, d_normed, d_x);
  if (mix_) {
    mix_->backward(pass, stream.parts, stream.sum, d_x, d);
  } else {
    d.sum = d_x;
  }
  return d;
}

void Model::train(const Pass& given, const MicroBatch& batch, float* loss_sum) {
  Selections selections;
  const Pass pass = given.with(selections);
  std::vector<Layer::Saved> saved(layers_.size());
  ResidualStream stream = run_layers(pass, batch, saved);
  pass.session.enter_head(pass.micro_batch);
  ResidualStream d = head(pass, batch, std::exchange(stream, {}), loss_sum);
  done_with(of_head());
  for (std::size_t i = layers_.size(); i-- > 0;) {
    pass.session.enter_backward(static_cast<int>(i), pass.micro_batch);
    if (pass.recompute == Recompute::kFull) layers_[i]->recompute(pass, saved[i]);
    layers_[i]->backward(pass.in(Phase::kBackward), std::move(saved[i]), d);
    done_with(of_layer(i));
  }
  if (batch.images.rows > 0) patches_->backward(pass.in(Phase::kBackward), batch.images, d.sum);
  if (patches_) done_with(*groups_.back());
  if (embedding_->gradient != nullptr) {
    pass.ops.run(pass.stream, EmbeddingBackward{.tokens = d.sum.rows,
                                                .width = d.sum.width,
                                                .vocabulary = config_.model.vocabulary,
                                                .ids = batch.ids,
                                                .d_out = d.sum,
                                                .d_table = embedding_->gradient});
  }
  done_with(*groups_.front());
}

void Model::warm_up(const Pass& pass, const MicroBatch& batch, float* loss_sum) {
  forward_alone(pass.in(Phase::kWarmUp), batch, loss_sum);
}

void Model::evaluate(const Pass& pass, const MicroBatch& batch, float* loss_sum) {
  forward_alone(pass.in(Phase::kEvaluate), batch, loss_sum);
}

// Nothing is kept for a backward pass: outside of the session's steps there is none to come.
void Model::forward_alone(const Pass& given, const MicroBatch& batch, float* loss_sum) {
  Selections selections;
  Pass pass = given.with(selections);
  pass.recompute = Recompute::kNone;
  ResidualStream stream;
  stream.sum = embed(pass, batch);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    use(of_layer(i));
    Layer::Saved saved;
    layers_[i]->forward(pass, stream, saved);
  }
  use(of_head());
  const Tensor x = mix_ ? mix_->forward(pass, stream.parts, stream.sum) : stream.sum;
  pass.ops.run(pass.stream, LinearCrossEntropy{.tokens = x.rows,
                                               .width = x.width,
                                               .vocabulary = config_.model.vocabulary,
                                               .hidden = norm_.forward(pass, x),
                                               .weight = head_->operand(),
                                               .labels = batch.labels,
                                               .gradient_scale = 0,
                                               .loss_sum = loss_sum,
                                               .d_hidden = nullptr,
                                               .d_weight = nullptr});
}

Tensor Model::logits(const Pass& given, const MicroBatch& batch) {
  Selections selections;
  const Pass pass = given.with(selections);
  std::vector<Layer::Saved> saved(layers_.size());
  const ResidualStream stream = run_layers(pass, batch, saved);
  use(of_head());
  const Tensor x = mix_ ? mix_->forward(pass, stream.parts, stream.sum) : stream.sum;
  Tensor out = pass.floats(x.rows, config_.model.vocabulary);
  linear(pass, norm_.forward(pass, x), *head_, out);
  return out;
}

void Model::balance(Ops& ops, Stream stream) const {
  for (const auto& layer : layers_) layer->ffn().balance(ops, stream);
}

std::vector<NamedArray> Model::arrays() const {
  std::vector<NamedArray> all;
  for (const auto& group : groups_) {
    for (const Parameter& parameter : group->parameters()) {
      all.push_back({parameter.name, parameter.shape, parameter.value, &parameter});
    }
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Tensor* bias = layers_[i]->ffn().router_bias();
    if (bias == nullptr) continue;
    all.push_back({"layer." + std::to_string(i) + ".moe.router_bias", {bias->width}, bias->f32(), nullptr});
  }
  return all;
}

std::int64_t Model::parameter_count() const {
  std::int64_t count = 0;
  for (const auto& group : groups_) {
    for (const Parameter& parameter : group->parameters()) count += parameter.count();
  }
  return count;
}

}  // namespace terrace::trainer
