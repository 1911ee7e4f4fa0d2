#include "examples/moe_trainer/trainer.hpp"

#include <algorithm>
#include <sstream>
#include <utility>

#include "examples/moe_trainer/base.hpp"
#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/site_list.hpp"

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
      memory_(session),
      ops_(require(make_ops(session.device(), memory_))),
      model_(std::make_unique<Model>(session, options_.config)),
      stream_end_{session} {
  TERRACE_CHECK((options_.images != nullptr) == (config().images.patch > 0),
                "images are given as configured");
  check_rules(session_.policy(), session_.sites());
  model_->allocate(session_, memory_, *ops_, options_.seed);
  optimizer_.emplace(options_.config.train, memory_, model_->groups());
  model_->set_keeper(&*optimizer_);
  tokens_ = memory_.tensor(2, config().tokens_per_step(), Pool::kWeights);
  loss_sum_ = memory_.tensor(1, 1, Pool::kWeights);
  host_tokens_.emplace(session_.device(), tokens_.bytes());
  host_loss_.emplace(session_.device(), loss_sum_.bytes());
  if (options_.images != nullptr) {
    images_.emplace(session_, memory_, config(), *options_.images);
  } else {
    sampler_.emplace(corpus, Sampler::Options{.seed = options_.seed, .length = config().train.length});
  }
  model_->refresh_copies(*ops_, session_.compute());
  if (options_.model != nullptr) options_.model->load(session_, *model_, *ops_);
  if (options_.base.empty()) return;
  load_base(options_.base, config(), session_, *model_);
  model_->refresh_copies(*ops_, session_.compute());
  base_fingerprint_ = terrace::trainer::base_fingerprint(session_, *model_);
}

void Trainer::upload_batch() {
  const auto length = static_cast<std::size_t>(config().train.length);
  const auto sequences = static_cast<std::size_t>(config().train.batch * config().train.micro_batches);
  const auto first = static_cast<std::uint64_t>(steps_done_) * sequences;
  const std::span<std::int32_t> ids = host_tokens_->as<std::int32_t>().first(length * sequences);
  const std::span<std::int32_t> labels =
      host_tokens_->as<std::int32_t>().subspan(length * sequences, length * sequences);
  if (images_) {
    counted_ = images_->draw(first, {.ids = ids, .labels = labels});
  } else {
    for (std::size_t i = 0; i < sequences; ++i) {
      sampler_->draw(first + i, ids.subspan(i * length, length), labels.subspan(i * length, length));
    }
    counted_ = config().tokens_per_step();
  }
  require(session_.device().copy(session_.compute(), Direction::kH2D, tokens_.block->address,
                                 host_tokens_->address(), tokens_.bytes()));
}

MicroBatch Trainer::micro_batch(std::uint32_t index) const {
  const auto* ids = tokens_.as<const std::int32_t>() + index * config().tokens();
  return {.ids = ids,
          .labels = ids + config().tokens_per_step(),
          .counted = counted_,
          .images = images_ ? images_->micro_batch(index) : ImageBatch{}};
}

float Trainer::step() {
  try {
    return take_step();
  } catch (...) {
    session_.cancel_step();  // what it kept is given back
    throw;
  }
}

float Trainer::take_step() {
  const bool warm_up = steps_done_ < config().dsa.warmup_steps;
  ExpertStore* const experts = warm_up ? nullptr : model_->expert_store();
  if (!warm_up) session_.begin_step();  // else there is nothing to keep, and nothing to learn for a plan
  if (experts != nullptr) experts->begin_step();
  upload_batch();
  require(session_.device().fill(session_.compute(), loss_sum_.block->address, 0, loss_sum_.bytes()));
  optimizer_->clear_gradients();
  const std::int64_t step = steps_done_ + 1;
  const StepsMade made{.model = std::max<std::int64_t>(0, step - config().dsa.warmup_steps),
                       .indexers = step};
  for (std::uint32_t i = 0; i < config().train.micro_batches; ++i) {
    const Pass pass{.session = session_,
                    .memory = memory_,
                    .ops = *ops_,
                    .stream = session_.compute(),
                    .recompute = config().train.recompute,
                    .compute = config().train.compute,
                    .phase = Phase::kForward,
                    .micro_batch = i};
    if (warm_up) {
      model_->warm_up(pass, micro_batch(i), loss_sum_.f32());
    } else {
      if (i + 1 == config().train.micro_batches) optimizer_->last_walk();
      model_->train(pass, micro_batch(i), loss_sum_.f32());
    }
  }
  session_.enter_update();
  steps_done_ = step;
  optimizer_->step(*ops_, made);
  if (warm_up) return wait_for_loss();
  model_->balance(*ops_, session_.compute());
  session_.end_step();
  const float loss = wait_for_loss();
  if (experts != nullptr) experts->end_step();
  return loss;
}

float Trainer::wait_for_loss() {
  Device& device = session_.device();
  require(device.copy(session_.compute(), Direction::kD2H, host_loss_->address(), loss_sum_.block->address,
                      loss_sum_.bytes()));
  require(device.synchronize(session_.compute()));
  const double sum = host_loss_->as<float>().front();
  return static_cast<float>(sum / static_cast<double>(counted_));
}

std::uint64_t Trainer::data_fingerprint() const {
  return options_.images != nullptr ? options_.images->fingerprint() : corpus_.fingerprint();
}

std::vector<CheckpointTensor> Trainer::checkpoint_tensors() const {
  std::vector<CheckpointTensor> tensors;
  for (const NamedArray& array : model_->arrays()) {
    const Parameter* parameter = array.parameter;
    if (parameter == nullptr) {
      tensors.push_back({array.name, array.shape, array.value});
      continue;
    }
    if (!parameter->trained()) continue;  // it is still what the seed, or the model's folder, made it
    const Parameter::Home& home = parameter->home;
    const auto away = [&home](StateKind kind) {
      return CheckpointTensor::Away{.state = home.state, .kind = kind, .first = home.state_at};
    };
    CheckpointTensor value{array.name, array.shape, parameter->value, home.value};
    if (parameter->value_in_state()) value.away = away(StateKind::kValue);
    tensors.push_back(std::move(value));
    tensors.push_back({array.name + ".m", array.shape, parameter->m, nullptr, away(StateKind::kM)});
    if (parameter->v == nullptr && home.state == nullptr) continue;  // Muon's
    tensors.push_back({array.name + ".v", array.shape, parameter->v, nullptr, away(StateKind::kV)});
  }
  return tensors;
}

void Trainer::settle() {
  optimizer_->settle();
  optimizer_->drain();
  if (model_->expert_store() != nullptr) model_->expert_store()->drain();
  require(session_.device().synchronize(session_.compute()));
}

void Trainer::save(const std::string& path) {
  settle();
  const CheckpointInfo info{.steps_done = steps_done_,
                            .seed = options_.seed,
                            .config = canonical_text(config()),
                            .data_fingerprint = data_fingerprint(),
                            .base_fingerprint = base_fingerprint_};
  write_checkpoint(path, info, checkpoint_tensors(), session_);
}

void Trainer::export_model(const std::string& path) {
  settle();
  TERRACE_CHECK(options_.model != nullptr, "only a public model is exported");
  options_.model->save(path, session_, *model_);
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
  if (info.data_fingerprint != data_fingerprint()) {
    bad_input(path + (images_ ? ": was trained on other images; name the same folder with --images, or none"
                              : ": was trained on other text; name the same files, in the same order, with "
                                "--data"));
  }
  if (info.base_fingerprint != base_fingerprint_) {
    bad_input(path + (info.base_fingerprint != 0
                          ? ": its adapters are of another base; name that one with --base"
                          : ": its adapters were put on no --base; leave it out"));
  }
  settle();
  read_checkpoint(path, checkpoint_tensors(), session_);
  model_->refresh_copies(*ops_, session_.compute());
  steps_done_ = info.steps_done;
}

}  // namespace terrace::trainer
