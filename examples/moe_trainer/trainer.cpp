#include "examples/moe_trainer/trainer.hpp"

#include <sstream>
#include <utility>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {

// The first line in which two canonical texts differ, as "key = there (here: key = value)"; empty: none.
std::string first_difference(const std::string& there, const std::string& here) {
  std::istringstream left(there);
  std::istringstream right(here);
  std::string a;
  std::string b;
  while (true) {
    const bool more = static_cast<bool>(std::getline(left, a));
    if (more != static_cast<bool>(std::getline(right, b))) return "the list of keys";
    if (!more) return "";
    if (a != b) return a + " (here: " + b + ")";
  }
}

}  // namespace

Trainer::Trainer(Session& session, const Corpus& corpus, Options options)
    : session_(session),
      options_(std::move(options)),
      corpus_(corpus),
      sampler_(corpus, {.seed = options_.seed, .length = options_.config.train.length}),
      memory_(session),
      ops_(require(make_ops(session.device(), memory_))),
      model_(std::make_unique<Model>(session, options_.config)) {
  model_->allocate(session_, memory_, options_.seed);
  optimizer_.emplace(options_.config.train, memory_);
  tokens_ = memory_.tensor(2, config().tokens_per_step(), Pool::kWeights);
  loss_sum_ = memory_.tensor(1, 1, Pool::kWeights);
  host_tokens_.emplace(session_.device(), tokens_.bytes());
  host_loss_.emplace(session_.device(), loss_sum_.bytes());
}

// Copies in flight use the host buffers, and launches the operators' scratch.
Trainer::~Trainer() { (void)session_.device().synchronize(session_.compute()); }

void Trainer::upload_batch() {
  const auto length = static_cast<std::size_t>(config().train.length);
  const auto sequences = static_cast<std::size_t>(config().train.batch * config().train.micro_batches);
  const auto first = static_cast<std::uint64_t>(steps_done_) * sequences;
  const std::span<std::int32_t> ids = host_tokens_->as<std::int32_t>().first(length * sequences);
  const std::span<std::int32_t> labels =
      host_tokens_->as<std::int32_t>().subspan(length * sequences, length * sequences);
  for (std::size_t i = 0; i < sequences; ++i) {
    sampler_.draw(first + i, ids.subspan(i * length, length), labels.subspan(i * length, length));
  }
  require(session_.device().copy(session_.compute(), Direction::kH2D, tokens_.block->address,
                                 host_tokens_->address(), tokens_.bytes()));
}

MicroBatch Trainer::micro_batch(std::uint32_t index) const {
  const auto* ids = reinterpret_cast<const std::int32_t*>(tokens_.data) + index * config().tokens();
  return {.ids = ids, .labels = ids + config().tokens_per_step()};
}

float Trainer::step() {
  session_.begin_step();
  upload_batch();
  require(session_.device().fill(session_.compute(), loss_sum_.block->address, 0, loss_sum_.bytes()));
  for (const auto& group : model_->groups()) group->clear_gradients(session_);
  for (std::uint32_t i = 0; i < config().train.micro_batches; ++i) {
    const Pass pass{.session = session_,
                    .memory = memory_,
                    .ops = *ops_,
                    .stream = session_.compute(),
                    .recompute = config().train.recompute,
                    .phase = Phase::kForward,
                    .micro_batch = i};
    model_->train(pass, micro_batch(i), loss_sum_.data);
  }
  ++steps_done_;
  optimizer_->step(session_, *ops_, model_->groups(), steps_done_);
  model_->balance(*ops_, session_.compute());
  session_.end_step();
  return wait_for_loss();
}

float Trainer::wait_for_loss() {
  Device& device = session_.device();
  require(device.copy(session_.compute(), Direction::kD2H, host_loss_->address(), loss_sum_.block->address,
                      loss_sum_.bytes()));
  require(device.synchronize(session_.compute()));
  const double sum = host_loss_->as<float>().front();
  return static_cast<float>(sum / static_cast<double>(config().tokens_per_step()));
}

std::vector<CheckpointTensor> Trainer::checkpoint_tensors() const {
  std::vector<CheckpointTensor> tensors;
  for (const auto& group : model_->groups()) {
    for (const Parameter& parameter : group->parameters()) {
      tensors.push_back({parameter.name, parameter.shape, parameter.value});
      tensors.push_back({parameter.name + ".m", parameter.shape, parameter.m});
      tensors.push_back({parameter.name + ".v", parameter.shape, parameter.v});
    }
  }
  for (std::size_t i = 0; i < model_->layers().size(); ++i) {
    const Tensor& bias = model_->layers()[i]->moe().router_bias();
    tensors.push_back({"layer." + std::to_string(i) + ".moe.router_bias", {bias.width}, bias.data});
  }
  return tensors;
}

void Trainer::save(const std::string& path) const {
  const CheckpointInfo info{.steps_done = steps_done_,
                            .seed = options_.seed,
                            .config = canonical_text(config()),
                            .data_fingerprint = corpus_.fingerprint()};
  write_checkpoint(path, info, checkpoint_tensors(), session_);
}

void Trainer::resume(const std::string& path) {
  const CheckpointInfo info = read_checkpoint_info(path);
  const std::string difference = first_difference(info.config, canonical_text(config()));
  if (!difference.empty()) {
    bad_input(path + ": was trained with " + difference + "; use the same configuration");
  }
  if (info.seed != options_.seed) {
    bad_input(path + ": was trained with another seed; use --seed " + std::to_string(info.seed));
  }
  if (info.data_fingerprint != corpus_.fingerprint()) {
    bad_input(path + ": was trained on other text; name the same files, in the same order, with --data");
  }
  read_checkpoint(path, checkpoint_tensors(), session_);
  steps_done_ = info.steps_done;
}

}  // namespace terrace::trainer
