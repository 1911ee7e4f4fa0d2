#include "examples/moe_trainer/families/model_folder.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/families/stored_names.hpp"
#include "examples/moe_trainer/host_copy.hpp"

namespace terrace::trainer {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kDescription = "config.json";
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

Json read_json(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) bad_input(path.string() + ": cannot be read: " + std::strerror(errno));
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) bad_input(path.string() + ": holds no JSON object");
  return json;
}

// The weight files of a folder: those that the index names, or the one.
std::set<std::string> weight_files(const fs::path& folder) {
  if (!fs::exists(folder / kIndex)) return {kWeights};
  std::set<std::string> names;
  const Json index = read_json(folder / kIndex);
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) {
    bad_input((folder / kIndex).string() + ": has no weight_map");
  }
  for (const auto& [tensor, file] : map->items()) {
    // A name, not a way out of the folder.
    if (!file.is_string() || fs::path(file.get<std::string>()).has_parent_path()) {
      bad_input((folder / kIndex).string() + ": " + tensor + " must lie in a file of the same folder");
    }
    names.insert(file.get<std::string>());
  }
  return names;
}

std::string text_of(const std::vector<std::int64_t>& shape) { return Json(shape).dump(); }

std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  if (tensor.type == DType::kF32) {
    require(file.read(tensor, Bytes(), std::as_writable_bytes(std::span(values))));
    return values;
  }
  std::vector<Bf16> halves(values.size());
  require(file.read(tensor, Bytes(), std::as_writable_bytes(std::span(halves))));
  std::transform(halves.begin(), halves.end(), values.begin(), [](Bf16 x) { return to_float(x); });
  return values;
}

void write_description(const fs::path& folder, const std::string& source) {
  const fs::path partial = folder / (std::string(kDescription) + ".partial");
  {
    std::ofstream file(partial, std::ios::binary);
    file << Json::parse(source).dump(2) << "\n";
    if (!file.flush()) {
      throw Failure(ExitCode::kFailed, partial.string() + ": could not be written: " + std::strerror(errno));
    }
  }
  std::error_code wrong;
  fs::rename(partial, folder / kDescription, wrong);
  if (wrong)
    throw Failure(ExitCode::kFailed, partial.string() + ": could not be renamed: " + wrong.message());
}

void written(const Status& status) {
  if (!status.ok()) throw Failure(ExitCode::kFailed, "the model was not saved: " + status.error().text);
}

}  // namespace

ModelFolder ModelFolder::open(const std::string& path) {
  ModelFolder folder;
  folder.path_ = path;
  const fs::path description = fs::path(path) / kDescription;
  folder.family_ = read_family(read_json(description), description.string());
  for (const std::string& name : weight_files(path)) {
    auto file = SafetensorsReader::open((fs::path(path) / name).string());
    if (!file.ok()) bad_input(file.error().text);
    folder.files_.push_back(std::move(*file));
  }
  folder.find_tensors();
  return folder;
}

std::optional<ModelFolder::Place> ModelFolder::find(const std::string& name) const {
  for (std::size_t i = 0; i < files_.size(); ++i) {
    if (const TensorInfo* info = files_[i].find(name)) return Place{i, name, info->type};
  }
  return std::nullopt;
}

// The tensor itself, or else the pieces in which released files hold it; none where one is missing.
std::vector<ModelFolder::Place> ModelFolder::places_of(const FamilyTensor& tensor) const {
  if (const auto place = find(tensor.name)) return {*place};
  std::vector<Place> places;
  for (const StoredPiece& piece : stored_pieces(tensor)) {
    auto place = find(piece.name);
    if (!place) place = find(other_name(piece.name));
    if (!place) return {};
    if (files_[place->file].find(place->name)->count() != piece.count) {
      bad_input(path_ + ": " + place->name + " has not the size that config.json asks for");
    }
    places.push_back(std::move(*place));
  }
  return places;
}

void ModelFolder::find_tensors() {
  for (const FamilyTensor& tensor : family_.tensors) {
    const auto wrong = [&](const std::string& what) { bad_input(path_ + ": " + tensor.name + " " + what); };
    std::vector<Place> places = places_of(tensor);
    if (places.empty()) wrong("is in none of its files");
    for (const Place& place : places) {
      const TensorInfo& info = *files_[place.file].find(place.name);
      if (place.name == tensor.name && info.shape != tensor.shape) {
        wrong("has shape " + text_of(info.shape) + ", config.json asks for " + text_of(tensor.shape));
      }
      if (info.type != DType::kF32 && info.type != DType::kBf16) {
        wrong(std::string("is ") + name_of(info.type) + "; weights must be F32 or BF16");
      }
    }
    places_[tensor.name] = std::move(places);
  }
}

std::vector<float> ModelFolder::read(const FamilyTensor& tensor) const {
  const std::vector<Place>& places = places_.at(tensor.name);
  std::vector<float> all;
  for (const Place& place : places) {
    const SafetensorsReader& file = files_[place.file];
    std::vector<float> part = read_floats(file, *file.find(place.name));
    if (places.size() == 1) return part;
    all.insert(all.end(), part.begin(), part.end());  // pieces follow one another
  }
  return all;
}

PartExtent extent_of(const NamedArray& array) {
  std::int64_t count = 1;
  for (const std::int64_t extent : array.shape) count *= extent;
  const std::int64_t width = array.shape.size() > 1 ? array.shape.back() : count;
  return {.rows = count / width, .width = width};
}

std::map<std::string, NamedArray> arrays_by_name(const Model& model) {
  std::map<std::string, NamedArray> arrays;
  for (NamedArray& array : model.arrays()) {
    std::string name = array.name;
    arrays.emplace(std::move(name), std::move(array));
  }
  return arrays;
}

void ModelFolder::load(Session& session, const Model& model, Ops& ops) const {
  const auto arrays = arrays_by_name(model);
  for (const FamilyTensor& tensor : family_.tensors) {
    const std::vector<float> all = read(tensor);
    for (const TensorPart& part : tensor.parts) {
      const NamedArray& array = arrays.at(part.parameter);
      const auto [rows, width] = extent_of(array);
      std::vector<float> own(static_cast<std::size_t>(rows * width));
      for (std::int64_t row = 0; row < rows; ++row) {
        const auto from = all.begin() + part.rows.place(row) * width;
        std::copy(from, from + width, own.begin() + row * width);
      }
      if (array.parameter != nullptr) {
        set_values(session, *array.parameter, 0, own);
      } else {
        upload(session, own, array.value);
      }
    }
  }
  model.refresh_copies(ops, session.compute());
}

void ModelFolder::save(const std::string& path, Session& session, const Model& model) const {
  std::error_code wrong;
  fs::create_directories(path, wrong);
  if (wrong) throw Failure(ExitCode::kFailed, path + ": could not be made: " + wrong.message());
  std::vector<TensorInfo> header;
  for (const FamilyTensor& tensor : family_.tensors) {
    header.push_back({.name = tensor.name, .type = type_of(tensor), .shape = tensor.shape});
  }
  // The library asks for this word.
  auto writer = SafetensorsWriter::create((fs::path(path) / kWeights).string(), {{"format", "pt"}}, header);
  if (!writer.ok()) written(writer.error());
  const auto arrays = arrays_by_name(model);
  for (const FamilyTensor& tensor : family_.tensors) {
    const std::vector<float> values = joined_parts(tensor, arrays, [&](const NamedArray& array) {
      const auto [rows, width] = extent_of(array);
      const Parameter* const p = array.parameter;
      if (p != nullptr && (p->home.value != nullptr || p->value_in_state())) {
        const std::vector<std::byte> bytes = home_numbers(*p);
        std::vector<float> values(static_cast<std::size_t>(rows * width));
        std::memcpy(values.data(), bytes.data(), bytes.size());
        return values;
      }
      return download(session, array.value, rows * width);
    });
    if (type_of(tensor) == DType::kF32) {
      written(writer->append(std::as_bytes(std::span(values))));
      continue;
    }
    std::vector<Bf16> halves(values.size());
    std::transform(values.begin(), values.end(), halves.begin(), [](float x) { return to_bf16(x); });
    written(writer->append(std::as_bytes(std::span(halves))));
  }
  written(writer->finish());
  write_description(path, family_.config.model.source);
  fs::remove(fs::path(path) / kIndex, wrong);  // of a model that was there before, in several files
}

}  // namespace terrace::trainer
