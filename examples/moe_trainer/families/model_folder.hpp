// A folder that holds a public model: config.json and its weights, in one safetensors file or in several with
// an index. Written back, it is read by the library that it came from.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "examples/moe_trainer/families/family.hpp"
#include "examples/moe_trainer/model/model.hpp"
#include "examples/moe_trainer/safetensors.hpp"

namespace terrace::trainer {

class ModelFolder {
 public:
  // Throws Failure (kBadInput): a file that is missing or damaged, a family that is not known, a tensor that
  // is missing or of another shape or type than the description says. Tensors that the description does not
  // ask for are left alone.
  [[nodiscard]] static ModelFolder open(const std::string& path);

  [[nodiscard]] const Family& family() const { return family_; }
  // Sets the model's weights, which were allocated by this family's configuration. Throws Failure.
  void load(Session& session, const Model& model, Ops& ops) const;
  // Writes the model as a folder like this one: each tensor under its name here, in its type here. The files
  // are written beside their names and renamed. Throws Failure.
  void save(const std::string& path, Session& session, const Model& model) const;

 private:
  // A tensor of a file.
  struct Place {
    std::size_t file = 0;
    std::string name;
    DType type = DType::kF32;
  };
  ModelFolder() = default;
  void find_tensors();
  [[nodiscard]] std::optional<Place> find(const std::string& name) const;
  [[nodiscard]] std::vector<Place> places_of(const FamilyTensor& tensor) const;
  [[nodiscard]] std::vector<float> read(const FamilyTensor& tensor) const;
  [[nodiscard]] DType type_of(const FamilyTensor& tensor) const {
    return places_.at(tensor.name).front().type;
  }

  std::string path_;
  Family family_;
  std::vector<SafetensorsReader> files_;
  std::map<std::string, std::vector<Place>> places_;  // of the family's tensors
};

// What a part is in the file's tensor: `width` numbers a row.
struct PartExtent {
  std::int64_t rows, width;
};
[[nodiscard]] PartExtent extent_of(const NamedArray& array);
// A model's arrays by name.
[[nodiscard]] std::map<std::string, NamedArray> arrays_by_name(const Model& model);

// The tensor's numbers, each part's taken from what `values(array)` gives for it.
template <typename Values>
[[nodiscard]] std::vector<float> joined_parts(const FamilyTensor& tensor,
                                              const std::map<std::string, NamedArray>& arrays,
                                              const Values& values) {
  std::int64_t count = 1;
  for (const std::int64_t extent : tensor.shape) count *= extent;
  std::vector<float> all(static_cast<std::size_t>(count));
  for (const TensorPart& part : tensor.parts) {
    const NamedArray& array = arrays.at(part.parameter);
    const std::vector<float> own = values(array);
    const auto [rows, width] = extent_of(array);
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto from = own.begin() + row * width;
      std::copy(from, from + width, all.begin() + part.rows.place(row) * width);
    }
  }
  return all;
}

}  // namespace terrace::trainer
