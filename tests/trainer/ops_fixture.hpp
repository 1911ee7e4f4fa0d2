// The operators under test on a real device, emulated or cuda: memory straight from the device seam, a
// stream, and the way there and back. One test body serves both kinds.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "examples/moe_trainer/ops/ops.hpp"
#include "tests/trainer/oracle.hpp"

namespace terrace::trainer {

inline constexpr Dtype kBothTypes[] = {Dtype::kF32, Dtype::kBf16};

// What an array of this type holds of them: an oracle gets these, so that it sees what the operator sees.
[[nodiscard]] inline Values rounded(Values values, Dtype dtype) {
  for (double& value : values) {
    const auto single = static_cast<float>(value);
    value = static_cast<double>(dtype == Dtype::kF32 ? single : to_float(to_bf16(single)));
  }
  return values;
}

// Memory in one mapping of its own, given back when it dies. The owner waits for the stream first.
class Mapping {
 public:
  Mapping(Device& device, Bytes size) : device_(device), size_(round_up(size, device.info().granularity)) {
    address_ = device.reserve(size_).value();
    physical_ = device.create_physical(size_).value();
    if (!device.map(address_, physical_, size_).ok()) throw std::runtime_error("map failed");
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    (void)device_.unmap(address_, size_).ok();
    device_.destroy_physical(physical_);
    device_.release(address_, size_);
  }
  [[nodiscard]] Address address() const { return address_; }
  [[nodiscard]] Bytes size() const { return size_; }

 private:
  Device& device_;
  Bytes size_;
  Address address_ = nullptr;
  Physical physical_;
};

// Keeps every mapping until the end and lends free ones again: all work is on one stream, so its order holds.
class DirectScratch final : public ScratchSource {
 public:
  explicit DirectScratch(Device& device) : device_(device) {}
  std::shared_ptr<const void> take(Bytes size, Address* address) override {
    for (const auto& mapping : mappings_) {
      if (mapping.use_count() > 1 || mapping->size() < size) continue;
      *address = mapping->address();
      return mapping;
    }
    mappings_.push_back(std::make_shared<Mapping>(device_, size));
    *address = mappings_.back()->address();
    return mappings_.back();
  }

 private:
  Device& device_;
  std::vector<std::shared_ptr<Mapping>> mappings_;
};

class OpsBench {
 public:
  // Precondition: the kind is available.
  explicit OpsBench(const std::string& kind) {
    EmulatedOptions options;
    options.capacity = Bytes(1ULL << 30);
    options.h2d_bytes_per_second = options.d2h_bytes_per_second = 1e12;
    device_ = open_device(kind, options).value();
    stream_ = device_->create_stream(StreamPriority::kNormal).value();
    scratch_ = std::make_unique<DirectScratch>(*device_);
    ops_ = make_ops(*device_, *scratch_).value();
  }
  ~OpsBench() {
    (void)device_->synchronize(stream_).ok();
    ops_.reset();
    arrays_.clear();
    scratch_.reset();
    device_->destroy_stream(stream_);
  }
  OpsBench(const OpsBench&) = delete;
  OpsBench& operator=(const OpsBench&) = delete;

  [[nodiscard]] Ops& ops() { return *ops_; }
  [[nodiscard]] Stream stream() const { return stream_; }
  [[nodiscard]] Device& device() { return *device_; }

  float* upload(const Values& values) { return put(std::vector<float>(values.begin(), values.end())); }
  std::int32_t* upload(const std::vector<std::int32_t>& values) { return put(values); }
  // Outputs start as NaN, so that what an operator leaves out is seen.
  float* output(std::int64_t count) {
    return put(std::vector<float>(static_cast<std::size_t>(count), std::nanf("")));
  }
  float* zeros(std::int64_t count) { return put(std::vector<float>(static_cast<std::size_t>(count), 0.0F)); }
  // The same of either type, rounded to it on the way in. What is uploaded may also be written, in place.
  Out upload(const Values& values, Dtype dtype) {
    if (dtype == Dtype::kF32) return upload(values);
    std::vector<Bf16> halves;
    halves.reserve(values.size());
    for (const double value : values) halves.push_back(to_bf16(static_cast<float>(value)));
    return put(halves);
  }
  Out output(std::int64_t count, Dtype dtype) {
    if (dtype == Dtype::kF32) return output(count);
    return put(std::vector<Bf16>(static_cast<std::size_t>(count), to_bf16(std::nanf(""))));
  }
  std::int32_t* int_output(std::int64_t count) {
    return put(std::vector<std::int32_t>(static_cast<std::size_t>(count), -7));
  }

  std::vector<float> floats(const float* at, std::int64_t count) { return get<float>(at, count); }
  std::vector<std::int32_t> ints(const std::int32_t* at, std::int64_t count) {
    return get<std::int32_t>(at, count);
  }
  Values download(In array, std::int64_t count) {
    if (array.dtype() == Dtype::kF32) {
      const std::vector<float> got = floats(array.as<float>(), count);
      return {got.begin(), got.end()};
    }
    Values values;
    for (const Bf16 number : get<Bf16>(array.as<Bf16>(), count)) {
      values.push_back(static_cast<double>(to_float(number)));
    }
    return values;
  }
  // As stored, to compare two runs bit by bit.
  std::vector<std::byte> bits(In array, std::int64_t count) {
    return get<std::byte>(array.as<std::byte>(), count * bytes_of(array.dtype()));
  }

 private:
  template <typename T>
  T* put(const std::vector<T>& values) {
    const Bytes size(std::max<std::size_t>(1, values.size()) * sizeof(T));
    arrays_.push_back(std::make_unique<Mapping>(*device_, size));
    const Address at = arrays_.back()->address();
    if (!values.empty()) {
      const auto* from = reinterpret_cast<const std::byte*>(values.data());
      if (!device_->copy(stream_, Direction::kH2D, at, from, Bytes(values.size() * sizeof(T))).ok() ||
          !device_->synchronize(stream_).ok()) {
        throw std::runtime_error("upload failed");
      }
    }
    return reinterpret_cast<T*>(at);
  }
  template <typename T>
  std::vector<T> get(const T* at, std::int64_t count) {
    std::vector<T> values(static_cast<std::size_t>(count));
    if (count == 0) return values;
    auto* to = reinterpret_cast<std::byte*>(values.data());
    const Bytes size(values.size() * sizeof(T));
    if (!device_->copy(stream_, Direction::kD2H, to, reinterpret_cast<const std::byte*>(at), size).ok() ||
        !device_->synchronize(stream_).ok()) {
      throw std::runtime_error("download failed");
    }
    return values;
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  std::unique_ptr<DirectScratch> scratch_;
  std::unique_ptr<Ops> ops_;
  std::vector<std::unique_ptr<Mapping>> arrays_;
};

// The operators of the kind in the test's parameter; skips where this machine has none.
class OpsUnderTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "cuda" && !cuda_available())
      GTEST_SKIP() << "no CUDA device on this machine";
    bench_ = std::make_unique<OpsBench>(GetParam());
  }
  [[nodiscard]] OpsBench& bench() { return *bench_; }
  [[nodiscard]] Ops& ops() { return bench_->ops(); }
  [[nodiscard]] Stream stream() const { return bench_->stream(); }
  float* upload(const Values& values) { return bench_->upload(values); }
  std::int32_t* upload(const std::vector<std::int32_t>& values) { return bench_->upload(values); }
  float* output(std::int64_t count) { return bench_->output(count); }
  float* zeros(std::int64_t count) { return bench_->zeros(count); }
  Out upload(const Values& values, Dtype dtype) { return bench_->upload(values, dtype); }
  Out output(std::int64_t count, Dtype dtype) { return bench_->output(count, dtype); }
  Values download(In array, std::int64_t count) { return bench_->download(array, count); }

  // Tolerances of fp32 kernels.
  static constexpr double kOutput = 1e-5, kGradient = 1e-4;
  static constexpr double output_tolerance(Dtype dtype) { return dtype == Dtype::kF32 ? kOutput : 1e-2; }
  static constexpr double gradient_tolerance(Dtype dtype) { return dtype == Dtype::kF32 ? kGradient : 2e-2; }
  void expect_near(const char* what, In got, const Values& want, double tolerance) {
    const Values values = bench_->download(got, static_cast<std::int64_t>(want.size()));
    EXPECT_LE(relative_error(values, want), tolerance) << what;
  }
  // Two results of `count` numbers each, stored alike.
  void expect_same_bits(const char* what, In a, In b, std::int64_t count) {
    EXPECT_TRUE(bench_->bits(a, count) == bench_->bits(b, count)) << what;
  }
  // The same bits: of floats, so NaN equals itself and zeros differ by sign.
  static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

 private:
  std::unique_ptr<OpsBench> bench_;
};

#define TERRACE_TEST_ON_EVERY_DEVICE(Suite)                                 \
  INSTANTIATE_TEST_SUITE_P(emulated, Suite, ::testing::Values("emulated")); \
  INSTANTIATE_TEST_SUITE_P(cuda, Suite, ::testing::Values("cuda"))

}  // namespace terrace::trainer
