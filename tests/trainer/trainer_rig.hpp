// A small trainer on an emulated device of its own, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/random.hpp"
#include "examples/moe_trainer/trainer.hpp"
#include "runtime/device.hpp"
#include "swapcore/session.hpp"
#include "tests/paths.hpp"

namespace terrace::trainer::test {

// Text with some order in it, `size` bytes long.
inline std::string sample_text(std::size_t size) {
  constexpr std::string_view kWords[] = {"the ", "river ", "runs ",  "down ",    "to ",    "a ",
                                         "sea ", "and ",   "then, ", "slowly, ", "home.\n"};
  const CounterRandom random({.seed = 7, .stream = "text"});
  std::string text;
  for (std::uint64_t i = 0; text.size() < size; ++i) text += kWords[random.bits(i) % std::size(kWords)];
  text.resize(size);
  return text;
}

// Two layers, one of each kind; a step takes milliseconds.
inline Config small_config() {
  Config config;
  config.model = {.layers = 2, .hidden = 32, .dsa_every = 2};
  config.kda = {.heads = 2, .head_width = 16, .conv_taps = 4, .gate_rank = 8};
  config.dsa = {
      .heads = 2, .key_width = 16, .value_width = 16, .index_heads = 2, .index_width = 8, .top_k = 8};
  config.moe = {.latent = 16, .experts = 4, .top_k = 2, .expert_width = 24, .shared_width = 32};
  config.train.batch = 2;
  config.train.length = 20;
  config.train.micro_batches = 2;
  config.train.warmup_steps = 2;
  return config;
}

inline Config tiny_config() {
  return load_config((terrace::test::source_dir() / "examples/moe_trainer/configs/tiny.toml").string());
}

class Rig {
 public:
  struct Options {
    Config config = small_config();
    std::uint64_t seed = 1;
    std::string text = sample_text(4000);
    std::string model = {};   // folder of a public model; then only config.train and .images count
    std::string images = {};  // folder of images; empty: made ones, where config.images asks for any
    std::string base = {};    // checkpoint under adapters
    Bytes capacity = 512_MiB;
    Bytes budget = 256_MiB;
    SwapMode swapcore = SwapMode::kOff;
    std::vector<Rule> rules = {};
    SpillFormat spill_format = SpillFormat::kExact;
    Policy::Checkpoint checkpoint = {};
    Policy::Experts experts = {};
    Policy::Optimizer optimizer = {};
    Amount ddr = {};
    Policy::Nvme nvme = {};
    double link_bytes_per_second = 200e6;
  };
  explicit Rig(const Options& options) : corpus_(Corpus::from_text(options.text, "sample")) {
    device_ = require(open_emulated_device({.capacity = options.capacity,
                                            .h2d_bytes_per_second = options.link_bytes_per_second,
                                            .d2h_bytes_per_second = options.link_bytes_per_second}));
    free_at_start_ = require(device_->memory()).free;
    stream_ = require(device_->create_stream(StreamPriority::kNormal));
    Session::Options session;
    session.policy.hbm.budget = Amount::of(options.budget);
    session.policy.swapcore.mode = options.swapcore;
    session.policy.swapcore.rules = options.rules;
    session.policy.swapcore.spill_format = options.spill_format;
    session.policy.checkpoint = options.checkpoint;
    session.policy.experts = options.experts;
    session.policy.optimizer = options.optimizer;
    session.policy.ddr.budget = options.ddr;
    session.policy.nvme = options.nvme;
    session.join_daemon = false;
    session.compute = stream_;
    try {
      session_ = require(Session::open(*device_, session));
      Config config = options.config;
      if (!options.model.empty()) {
        folder_ = ModelFolder::open(options.model);
        config = folder_->family().config;
        config.train = options.config.train;
        config.images = options.config.images;
      }
      if (config.images.patch > 0) images_ = open_images(options.images, config, options.seed);
      trainer_ = std::make_unique<Trainer>(*session_, corpus_,
                                           Trainer::Options{.config = config,
                                                            .seed = options.seed,
                                                            .model = folder_ ? &*folder_ : nullptr,
                                                            .base = options.base,
                                                            .images = images_.get()});
    } catch (...) {
      close();
      throw;
    }
  }
  ~Rig() { close(); }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  [[nodiscard]] Trainer& trainer() { return *trainer_; }
  [[nodiscard]] Session& session() { return *session_; }
  [[nodiscard]] std::vector<float> steps(int count) {
    std::vector<float> losses;
    for (int i = 0; i < count; ++i) losses.push_back(trainer_->step());
    return losses;
  }
  [[nodiscard]] std::vector<float> read(const float* device, std::int64_t count) const {
    std::vector<float> host(static_cast<std::size_t>(count));
    require(device_->copy(stream_, Direction::kD2H, reinterpret_cast<Address>(host.data()),
                          reinterpret_cast<const std::byte*>(device), Bytes(host.size() * sizeof(float))));
    require(device_->synchronize(stream_));
    return host;
  }
  void write(float* device, const std::vector<float>& host) {
    require(device_->copy(stream_, Direction::kH2D, reinterpret_cast<Address>(device),
                          reinterpret_cast<const std::byte*>(host.data()),
                          Bytes(host.size() * sizeof(float))));
    require(device_->synchronize(stream_));
  }

 private:
  // Whatever happened, everything is given back.
  void close() {
    trainer_.reset();
    session_.reset();
    device_->destroy_stream(stream_);
    const auto left = device_->memory();
    EXPECT_TRUE(left.ok());
    if (left.ok()) {
      EXPECT_EQ(left->free, free_at_start_) << "device memory leaked";
    }
  }

  Corpus corpus_;
  std::unique_ptr<Device> device_;
  Stream stream_;
  Bytes free_at_start_;
  std::optional<ModelFolder> folder_;
  std::unique_ptr<ImageSource> images_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Trainer> trainer_;
};

// The text of the failure that `run` ends with; a test failure where it doesn't.
template <typename Run>
std::string failure_of(Run&& run) {
  try {
    run();
  } catch (const Failure& failure) {
    EXPECT_EQ(std::string(failure.what()).find('\n'), std::string::npos) << "more than one line";
    return failure.what();
  }
  ADD_FAILURE() << "nothing failed";
  return "";
}

}  // namespace terrace::trainer::test
