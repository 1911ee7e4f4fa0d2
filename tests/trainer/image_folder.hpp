// A folder of images that a test writes, gone with its end.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer::test {

class ImageFolder {
 public:
  explicit ImageFolder(const std::string& name) : path_(std::filesystem::path(::testing::TempDir()) / name) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~ImageFolder() { std::filesystem::remove_all(path_); }
  ImageFolder(const ImageFolder&) = delete;
  ImageFolder& operator=(const ImageFolder&) = delete;

  [[nodiscard]] std::string path() const { return path_.string(); }
  void write(const std::string& name, const std::string& contents) const {
    std::ofstream(path_ / name, std::ios::binary) << contents;
  }
  // A square picture of noise, which `seed` decides.
  [[nodiscard]] static std::string noise(std::int64_t side, std::uint64_t seed) {
    const CounterRandom random({.seed = seed, .stream = "noise"});
    std::string ppm = "P6\n# noise\n" + std::to_string(side) + " " + std::to_string(side) + "\n255\n";
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(3 * side * side); ++i) {
      ppm.push_back(static_cast<char>(random.bits(i) & 0xFFU));
    }
    return ppm;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace terrace::trainer::test
