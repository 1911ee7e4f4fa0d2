#include "tests/trainer/golden_file.hpp"

#include <cstdlib>

#include "tests/paths.hpp"

namespace terrace::trainer {

std::vector<std::filesystem::path> golden_files() {
  const char* set = std::getenv("TERRACE_GOLDEN_DIR");
  const std::filesystem::path folder =
      set != nullptr && *set != '\0' ? std::filesystem::path(set) : test::source_dir() / "tests" / "golden";
  std::vector<std::filesystem::path> files;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

GoldenFile::GoldenFile(const std::filesystem::path& path)
    : reader_([&] {
        Result<SafetensorsReader> opened = SafetensorsReader::open(path.string());
        if (!opened.ok()) throw std::runtime_error(opened.error().text);
        return std::move(opened).value();
      }()) {}

std::string GoldenFile::word(const std::string& key) const {
  const auto found = reader_.metadata().find(key);
  return found == reader_.metadata().end() ? "" : found->second;
}
float GoldenFile::number(const std::string& key) const { return std::stof(word(key)); }
std::int64_t GoldenFile::whole(const std::string& key) const { return std::stoll(word(key)); }
bool GoldenFile::has(const std::string& name) const { return reader_.find(name) != nullptr; }
std::int64_t GoldenFile::dim(const std::string& name, std::size_t index) const {
  const TensorInfo* info = reader_.find(name);
  if (info == nullptr) throw std::runtime_error("the file has no tensor " + name);
  return info->shape.at(index);
}
Values GoldenFile::values(const std::string& name) const {
  const Result<std::vector<float>> read = reader_.read_f32(name);
  if (!read.ok()) throw std::runtime_error(read.error().text);
  return {read.value().begin(), read.value().end()};
}
std::vector<std::int32_t> GoldenFile::ints(const std::string& name) const {
  Result<std::vector<std::int32_t>> read = reader_.read_i32(name);
  if (!read.ok()) throw std::runtime_error(read.error().text);
  return std::move(read).value();
}

void expect_golden(OpsBench& bench, const GoldenFile& file, const std::string& name, const float* got,
                   double tolerance) {
  const Values want = file.values(name);
  const double error = relative_error(bench.download(got, static_cast<std::int64_t>(want.size())), want);
  EXPECT_LE(error, tolerance) << name;
  ::testing::Test::RecordProperty(name, std::to_string(error));
  if (std::getenv("TERRACE_GOLDEN_PRINT") != nullptr) std::printf("%-20s %.2e\n", name.c_str(), error);
}

}  // namespace terrace::trainer
