// Builds a family's list of tensors out of the parts that families share.
#pragma once

#include <string>
#include <vector>

#include "examples/moe_trainer/families/family.hpp"

namespace terrace::trainer {

class TensorList {
 public:
  explicit TensorList(const Config& config) : config_(config) {}

  // Embedding, final norm, head; each layer's two norms.
  void add_frame();
  // By the layer's kind.
  void add_ffn(std::int64_t layer);
  void add_mla(std::int64_t layer);
  void add_gqa(std::int64_t layer);
  void add_kda(std::int64_t layer);

  [[nodiscard]] std::vector<FamilyTensor> take() { return std::move(tensors_); }

 private:
  using Shape = std::vector<std::int64_t>;
  // The parameter itself, under the file's name.
  void add(const std::string& name, const Shape& shape, const std::string& parameter);
  void add_experts(std::int64_t layer);
  void add_glu(const std::string& prefix, const std::string& parameters, std::int64_t width);

  const Config& config_;
  std::vector<FamilyTensor> tensors_;
};

}  // namespace terrace::trainer
