#include "examples/moe_trainer/evaluation.hpp"

#include <string>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

Evaluator::Evaluator(Session& session, Memory& memory, const Config& config, const Corpus& held_out)
    : session_(session),
      memory_(memory),
      config_(config),
      held_out_(held_out),
      batches_((kEvaluationSequences + config.train.batch - 1) / config.train.batch) {
  const auto needed = static_cast<std::uint64_t>(config.train.length) + 1;
  if (held_out.text().size() < needed) {
    bad_input("--evaluate: the text holds " + std::to_string(held_out.text().size()) +
              " bytes, a sequence needs " + std::to_string(needed) + "; give more, or lower train.length");
  }
  tokens_ = memory.tensor(2, config.tokens(), Pool::kWeights);
  loss_sum_ = memory.tensor(1, 1, Pool::kWeights);
  host_tokens_.emplace(session.device(), tokens_.bytes());
  host_loss_.emplace(session.device(), loss_sum_.bytes());
}

Evaluator::~Evaluator() { (void)session_.device().synchronize(session_.compute()); }

void Evaluator::upload_batch(std::int64_t index) {
  const std::int64_t length = config_.train.length;
  const auto places = static_cast<std::int64_t>(held_out_.text().size()) - length;  // where one can begin
  std::int32_t* ids = host_tokens_->as<std::int32_t>().data();
  std::int32_t* labels = ids + config_.tokens();
  for (std::int64_t i = 0; i < config_.train.batch; ++i) {
    const std::int64_t n = index * config_.train.batch + i;
    const char* text = held_out_.text().data() + n * places / sequences();
    for (std::int64_t t = 0; t < length; ++t) {
      *ids++ = static_cast<unsigned char>(text[t]);
      *labels++ = static_cast<unsigned char>(text[t + 1]);
    }
  }
  require(session_.device().copy(session_.compute(), Direction::kH2D, tokens_.block->address,
                                 host_tokens_->address(), tokens_.bytes()));
}

double Evaluator::loss(Model& model, Ops& ops) {
  Device& device = session_.device();
  const Pass pass{.session = session_,
                  .memory = memory_,
                  .ops = ops,
                  .stream = session_.compute(),
                  .recompute = Recompute::kNone,
                  .compute = config_.train.compute,
                  .phase = Phase::kEvaluate,
                  .micro_batch = 0};
  const auto* ids = tokens_.as<const std::int32_t>();
  const MicroBatch batch{.ids = ids, .labels = ids + config_.tokens(), .counted = config_.tokens()};
  const Session::Span span(session_, "evaluation");
  double sum = 0;
  for (std::int64_t i = 0; i < batches_; ++i) {
    upload_batch(i);
    require(device.fill(session_.compute(), loss_sum_.block->address, 0, loss_sum_.bytes()));
    model.evaluate(pass, batch, loss_sum_.f32());
    require(device.copy(session_.compute(), Direction::kD2H, host_loss_->address(), loss_sum_.block->address,
                        loss_sum_.bytes()));
    require(device.synchronize(session_.compute()));
    sum += static_cast<double>(host_loss_->as<float>().front());
  }
  return sum / static_cast<double>(batches_ * config_.tokens());
}

}  // namespace terrace::trainer
