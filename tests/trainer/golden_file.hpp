// One file of golden vectors: an operator's inputs, outputs and gradients, computed in float64, stored as
// fp32.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "examples/moe_trainer/safetensors.hpp"
#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {

// The files of TERRACE_GOLDEN_DIR, or of tests/golden where that is unset, sorted by name.
[[nodiscard]] std::vector<std::filesystem::path> golden_files();

class GoldenFile {
 public:
  explicit GoldenFile(const std::filesystem::path& path);

  [[nodiscard]] std::string word(const std::string& key) const;  // of the metadata; "" where absent
  [[nodiscard]] float number(const std::string& key) const;
  [[nodiscard]] std::int64_t whole(const std::string& key) const;
  [[nodiscard]] bool has(const std::string& name) const;
  [[nodiscard]] std::int64_t dim(const std::string& name, std::size_t index) const;
  [[nodiscard]] Values values(const std::string& name) const;
  [[nodiscard]] std::vector<std::int32_t> ints(const std::string& name) const;

 private:
  SafetensorsReader reader_;
};

// What `got` on the device is against the file's `name`; a NaN on either side is infinitely wrong.
void expect_golden(OpsBench& bench, const GoldenFile& file, const std::string& name, const float* got,
                   double tolerance);

// Composes the operators as a layer does, forward and backward, and compares all of it.
void check_latent_moe(OpsBench& bench, const GoldenFile& file);
void check_attn_res(OpsBench& bench, const GoldenFile& file);

inline constexpr double kGoldenOutput = 1e-5, kGoldenGradient = 1e-4;

}  // namespace terrace::trainer
