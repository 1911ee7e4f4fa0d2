#include "examples/moe_trainer/checkpoint.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/memory.hpp"
#include "examples/moe_trainer/safetensors.hpp"

namespace terrace::trainer {

namespace {

constexpr const char* kFormat = "terrace-moe-trainer-1";
constexpr Bytes kStaging = 8_MiB;  // between the device and the file

std::optional<std::uint64_t> number_in(const Metadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::nullopt;
  const std::string& text = found->second;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

SafetensorsReader open_checkpoint(const std::string& path) {
  auto reader = SafetensorsReader::open(path);
  if (!reader.ok()) bad_input(reader.error().text);
  const auto format = reader->metadata().find("format");
  if (format == reader->metadata().end() || format->second != kFormat) {
    bad_input(path + ": not a checkpoint of moe_trainer; give one that --checkpoint wrote");
  }
  return std::move(*reader);
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

// The file's tensor of a name, which must be of that shape.
const TensorInfo& found(const SafetensorsReader& reader, const std::string& path, const std::string& name,
                        const std::vector<std::int64_t>& shape) {
  const TensorInfo* info = reader.find(name);
  if (info == nullptr) bad_input(path + ": holds no " + name + "; it is of another model");
  if (info->type != DType::kF32 || info->shape != shape) {
    bad_input(path + ": " + name + " has shape " + shape_text(info->shape) + ", this model wants " +
              shape_text(shape) + "; use the configuration it was trained with");
  }
  return *info;
}

// Walks a tensor in pieces of the staging buffer.
template <typename Piece>
void in_pieces(Bytes whole, const Piece& piece) {
  for (Bytes at; at < whole; at += kStaging) piece(at, std::min(kStaging, whole - at));
}

// Walks the numbers of one that lives outside of HBM by the chunks that they lie in there.
template <typename Piece>
void in_chunks(const CheckpointTensor& tensor, const Piece& piece) {
  const CheckpointTensor::Away& away = tensor.away;
  const std::int64_t end = away.first + static_cast<std::int64_t>(tensor.bytes().count() / sizeof(float));
  for (std::int64_t at = away.first; at < end;) {
    const std::int64_t next = std::min(end, away.state->next_chunk(at));
    piece(at, next - at);
    at = next;
  }
}

// Errors of a checkpoint's file keep their text; what was going on is said before.
void written(const Status& status) {
  if (!status.ok()) throw Failure(ExitCode::kFailed, "the checkpoint was not saved: " + status.error().text);
}

}  // namespace

Bytes CheckpointTensor::bytes() const {
  std::uint64_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::uint64_t>(extent);
  return Bytes(count * sizeof(float));
}

void write_checkpoint(const std::string& path, const CheckpointInfo& info,
                      const std::vector<CheckpointTensor>& tensors, Session& session) {
  const Metadata metadata = {{"format", kFormat},
                             {"steps_done", std::to_string(info.steps_done)},
                             {"seed", std::to_string(info.seed)},
                             {"config", info.config},
                             {"data_fingerprint", std::to_string(info.data_fingerprint)},
                             {"base_fingerprint", std::to_string(info.base_fingerprint)}};
  std::vector<TensorInfo> header;
  for (const CheckpointTensor& tensor : tensors) {
    header.push_back({.name = tensor.name, .type = DType::kF32, .shape = tensor.shape});
  }
  Device& device = session.device();
  const PinnedBuffer staging(device, kStaging);
  auto writer = SafetensorsWriter::create(path, metadata, header);
  if (!writer.ok()) written(writer.error());
  for (const CheckpointTensor& tensor : tensors) {
    if (tensor.away.state != nullptr) {
      in_chunks(tensor, [&](std::int64_t first, std::int64_t count) {
        const std::vector<float> numbers = tensor.away.state->read(tensor.away.kind, first, count);
        written(writer->append(std::as_bytes(std::span(numbers))));
      });
      continue;
    }
    const auto* from = reinterpret_cast<const std::byte*>(tensor.device);
    if (from == nullptr) {
      written(writer->append({reinterpret_cast<const std::byte*>(tensor.host), tensor.bytes().count()}));
      continue;
    }
    in_pieces(tensor.bytes(), [&](Bytes at, Bytes size) {
      require(device.copy(session.compute(), Direction::kD2H, staging.address(), from + at.count(), size));
      require(device.synchronize(session.compute()));
      written(writer->append(staging.as<const std::byte>().first(size.count())));
    });
  }
  written(writer->finish());
}

CheckpointInfo read_checkpoint_info(const std::string& path) {
  const SafetensorsReader reader = open_checkpoint(path);
  const Metadata& metadata = reader.metadata();
  const auto steps = number_in(metadata, "steps_done");
  const auto seed = number_in(metadata, "seed");
  const auto data = number_in(metadata, "data_fingerprint");
  const auto config = metadata.find("config");
  if (!steps || !seed || !data || config == metadata.end()) {
    bad_input(path + ": the checkpoint's header is damaged; give another one");
  }
  return {.steps_done = static_cast<std::int64_t>(*steps),
          .seed = *seed,
          .config = config->second,
          .data_fingerprint = *data,
          .base_fingerprint = number_in(metadata, "base_fingerprint").value_or(0)};
}

void read_checkpoint(const std::string& path, const std::vector<CheckpointTensor>& tensors,
                     Session& session) {
  const SafetensorsReader reader = open_checkpoint(path);
  Device& device = session.device();
  const PinnedBuffer staging(device, kStaging);
  for (const CheckpointTensor& tensor : tensors) {
    const TensorInfo& info = found(reader, path, tensor.name, tensor.shape);
    if (tensor.away.state != nullptr) {
      in_chunks(tensor, [&](std::int64_t first, std::int64_t count) {
        std::vector<float> numbers(static_cast<std::size_t>(count));
        const Bytes at(static_cast<std::uint64_t>(first - tensor.away.first) * sizeof(float));
        require(reader.read(info, at, std::as_writable_bytes(std::span(numbers))));
        tensor.away.state->write(tensor.away.kind, first, numbers);
      });
      continue;
    }
    auto* to = reinterpret_cast<Address>(tensor.device);
    if (to == nullptr) {
      require(reader.read(info, {}, {reinterpret_cast<std::byte*>(tensor.host), tensor.bytes().count()}));
      continue;
    }
    in_pieces(tensor.bytes(), [&](Bytes at, Bytes size) {
      require(reader.read(info, at, staging.as<std::byte>().first(size.count())));
      require(device.copy(session.compute(), Direction::kH2D, to + at.count(), staging.address(), size));
      require(device.synchronize(session.compute()));
    });
  }
}

void read_checkpoint_numbers(const std::string& path, const std::vector<CheckpointNumbers>& tensors) {
  const SafetensorsReader reader = open_checkpoint(path);
  std::vector<float> piece;
  for (const CheckpointNumbers& tensor : tensors) {
    const TensorInfo& info = found(reader, path, tensor.name, tensor.shape);
    const Bytes whole = CheckpointTensor{.name = {}, .shape = tensor.shape}.bytes();
    in_pieces(whole, [&](Bytes at, Bytes size) {
      piece.resize(size.count() / sizeof(float));
      require(reader.read(info, at, std::as_writable_bytes(std::span(piece))));
      tensor.take(static_cast<std::int64_t>(at.count() / sizeof(float)), piece);
    });
  }
}

}  // namespace terrace::trainer
