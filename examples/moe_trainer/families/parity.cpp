#include "examples/moe_trainer/families/parity.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/families/reference_choice.hpp"
#include "examples/moe_trainer/host_copy.hpp"

namespace terrace::trainer {

namespace {

constexpr const char* kGradient = "grad.";

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  if (got.size() != want.size()) return kWrong;
  double difference = 0;
  double size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    difference += d * d;
    size += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  const double error = difference == 0 ? 0 : std::sqrt(difference / size);
  return std::isfinite(error) ? error : kWrong;
}

std::vector<float> floats(const SafetensorsReader& file, const std::string& name) {
  auto values = file.read_f32(name);
  if (!values.ok()) bad_input(values.error().text);
  return std::move(*values);
}

// Tokens and labels on the device, and where the loss goes.
struct Batch {
  Tensor tokens;  // (2, tokens) of int32
  Tensor loss;
  [[nodiscard]] MicroBatch micro_batch(std::int64_t counted) const {
    const auto* ids = tokens.as<const std::int32_t>();
    return {.ids = ids, .labels = ids + tokens.width, .counted = counted};
  }
};

Batch upload_batch(Session& session, Memory& memory, const std::vector<std::int32_t>& ids,
                   const std::vector<std::int32_t>& labels) {
  Batch batch{.tokens = memory.tensor(2, static_cast<std::int64_t>(ids.size()), Pool::kWeights),
              .loss = memory.zeros(1, 1, Pool::kWeights)};
  std::vector<float> bits(ids.size() + labels.size());
  std::memcpy(bits.data(), ids.data(), ids.size() * sizeof(float));
  std::memcpy(bits.data() + ids.size(), labels.data(), labels.size() * sizeof(float));
  upload(session, bits, batch.tokens.f32());
  return batch;
}

}  // namespace

TensorError ParityReport::worst_gradient() const {
  const auto worst = std::max_element(gradients.begin(), gradients.end(),
                                      [](const auto& a, const auto& b) { return a.error < b.error; });
  return worst == gradients.end() ? TensorError{} : *worst;
}

bool ParityReport::passed() const {
  return loss_error <= kLossTolerance && logits_error <= kGradientTolerance && !gradients.empty() &&
         worst_gradient().error <= kGradientTolerance;
}

Parity::Parity(ModelFolder folder, SafetensorsReader reference)
    : folder_(std::move(folder)), reference_(std::move(reference)), config_(folder_.family().config) {
  const TensorInfo* ids = reference_.find("input_ids");
  if (ids == nullptr || ids->shape.size() != 2 || ids->shape[0] < 1 || ids->shape[1] < 2) {
    bad_input("reference.safetensors: input_ids must be of shape (batch, length), two tokens or longer");
  }
  config_.train.batch = ids->shape[0];
  config_.train.length = ids->shape[1];
  auto read = reference_.read_i32("input_ids");
  if (!read.ok()) bad_input(read.error().text);
  ids_ = std::move(*read);
  for (const std::int32_t id : ids_) {
    if (id < 0 || id >= config_.model.vocabulary) {
      bad_input("reference.safetensors: input_ids holds " + std::to_string(id) +
                ", which is outside the vocabulary");
    }
  }
}

Parity Parity::open(const std::string& folder) {
  ModelFolder model = ModelFolder::open(folder);
  auto reference = SafetensorsReader::open(folder + "/reference.safetensors");
  if (!reference.ok()) bad_input(reference.error().text);
  return {std::move(model), std::move(*reference)};
}

// Each token's is the next one; the last of a sequence has none.
std::vector<std::int32_t> Parity::labels() const {
  std::vector<std::int32_t> labels(ids_.size());
  const auto length = static_cast<std::size_t>(config_.train.length);
  for (std::size_t i = 0; i < ids_.size(); ++i) labels[i] = (i + 1) % length == 0 ? -100 : ids_[i + 1];
  return labels;
}

ParityReport Parity::run(Session& session) const {
  Memory memory(session);
  const auto ops = require(make_ops(session.device(), memory));
  Model model(session, config_);
  model.allocate(session, memory, *ops, 1);
  folder_.load(session, model, *ops);
  for (const auto& group : model.groups()) group->clear_gradients(session);
  const Batch batch = upload_batch(session, memory, ids_, labels());
  const std::int64_t counted = config_.train.batch * (config_.train.length - 1);
  const ReferenceChoice chooser(session, memory, *ops);
  const Pass pass{.session = session,
                  .memory = memory,
                  .ops = *ops,
                  .stream = session.compute(),
                  .compute = config_.train.compute,
                  .chooser = &chooser};
  if (model.expert_gradients() != nullptr) {
    bad_input("optimizer.gradients: they are compared in HBM; use gradients = \"hbm\"");
  }
  session.begin_step();
  model.train(pass, batch.micro_batch(counted), batch.loss.f32());
  session.end_step();

  ParityReport report;
  report.model_type =
      nlohmann::json::parse(folder_.family().config.model.source)["model_type"].get<std::string>();
  report.loss = static_cast<double>(download(session, batch.loss.f32(), 1)[0]) / static_cast<double>(counted);
  report.reference_loss = floats(reference_, "loss").at(0);
  const double off = std::abs(report.loss - report.reference_loss) / std::abs(report.reference_loss);
  report.loss_error = std::isfinite(off) ? off : std::numeric_limits<double>::infinity();
  const Tensor logits = model.logits(pass, batch.micro_batch(counted));
  report.logits_error =
      relative_error(download(session, logits.f32(), logits.count()), floats(reference_, "logits"));
  compare(session, model, report);
  return report;
}

void Parity::compare(Session& session, const Model& model, ParityReport& report) const {
  const auto arrays = arrays_by_name(model);
  for (const FamilyTensor& tensor : folder_.family().tensors) {
    const std::string name = kGradient + tensor.name;
    if (reference_.find(name) == nullptr) continue;
    const std::vector<float> got = joined_parts(tensor, arrays, [&](const NamedArray& array) {
      if (array.parameter == nullptr) bad_input("reference.safetensors: " + name + " has no gradient here");
      return download(session, array.parameter->gradient, array.parameter->count());
    });
    report.gradients.push_back({tensor.name, relative_error(got, floats(reference_, name))});
  }
  for (const TensorInfo& tensor : reference_.tensors()) {
    if (tensor.name.rfind(kGradient, 0) != 0) continue;
    const std::string name = tensor.name.substr(std::string(kGradient).size());
    const bool known = std::any_of(report.gradients.begin(), report.gradients.end(),
                                   [&](const TensorError& row) { return row.name == name; });
    if (!known) bad_input("reference.safetensors: " + tensor.name + " is of no tensor of this model");
  }
}

std::string json_text(const ParityReport& report, const std::string& device) {
  // JSON has no infinity.
  const auto number = [](double error) {
    return std::isfinite(error) ? nlohmann::json(error) : nlohmann::json(nullptr);
  };
  nlohmann::json gradients = nlohmann::json::object();
  for (const TensorError& row : report.gradients) gradients[row.name] = number(row.error);
  const TensorError worst = report.worst_gradient();
  const nlohmann::json json = {{"model_type", report.model_type},
                               {"device", device},
                               {"loss", number(report.loss)},
                               {"reference_loss", number(report.reference_loss)},
                               {"loss_error", number(report.loss_error)},
                               {"logits_error", number(report.logits_error)},
                               {"worst_gradient", worst.name},
                               {"worst_gradient_error", number(worst.error)},
                               {"gradients", std::move(gradients)},
                               {"passed", report.passed()}};
  return json.dump(2);
}

}  // namespace terrace::trainer
