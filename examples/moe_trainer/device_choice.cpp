#include "examples/moe_trainer/device_choice.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer {

namespace {

// Scratch for the measurement: no session yet, and no budget to keep.
class HeapScratch : public ScratchSource {
 public:
  std::shared_ptr<const void> take(Bytes size, Address* address) override {
    constexpr std::size_t kAlignment = 512;
    void* memory = std::aligned_alloc(kAlignment, round_up(size, Bytes(kAlignment)).count());
    if (memory == nullptr) throw std::bad_alloc();
    *address = static_cast<Address>(memory);
    return {memory, [](const void* p) { std::free(const_cast<void*>(p)); }};
  }
};

double measured_gemm_flops(const Config& config) {
  const auto device = require(open_emulated_device({}));
  HeapScratch scratch;
  const auto ops = require(make_cpu_ops(*device, scratch));
  return ops->gemm_flops_per_second(config.tokens(), config.model.hidden);
}

EmulatedOptions emulated_options(const Settings& settings, const Config& config) {
  EmulatedOptions options;
  const Policy policy;
  // What the default policy leaves of the device must hold the job.
  const Bytes needed = estimated_need(config) + policy.hbm.reserve.bytes;
  options.capacity =
      settings.emulated_capacity.value_or(round_up(std::max(options.capacity, needed), options.granularity));
  const double rate =
      emulated_link_rate(measured_gemm_flops(config), static_cast<double>(config.model.hidden));
  options.h2d_bytes_per_second = rate;
  options.d2h_bytes_per_second = rate;
  return options;
}

}  // namespace

Bytes estimated_need(const Config& config) {
  const std::int64_t hidden = config.model.hidden;
  const std::int64_t kda = config.kda.heads * config.kda.head_width;
  const std::int64_t dsa = config.dsa.heads * (config.dsa.key_width + config.dsa.value_width) +
                           config.dsa.index_heads * config.dsa.index_width + config.dsa.top_k;
  const MlaConfig& mla = config.mla;
  const std::int64_t attention =
      mla.heads * (2 * mla.kv_rank + mla.nope_width + mla.rope_width + mla.value_width) +
      3 * config.gqa.heads * config.gqa.head_width;
  const std::int64_t inner = std::max({kda, dsa, attention});
  const MoeConfig& moe = config.moe;
  const bool latent_moe = config.model.kinds.empty();
  const std::int64_t latent = latent_moe ? moe.latent : hidden;
  const std::int64_t plain_width = std::max(moe.shared_width, config.model.dense_width);
  const std::int64_t weights_per_layer = hidden * (7 * inner + 3 * plain_width + 2 * latent + moe.experts) +
                                         3 * moe.experts * latent * moe.expert_width;
  const std::int64_t weights = config.model.layers * weights_per_layer + 2 * config.model.vocabulary * hidden;
  const std::int64_t kept_per_token = 5 * hidden + 11 * inner + 4 * latent + 4 * plain_width +
                                      moe.top_k * (3 * latent + 4 * moe.expert_width);
  const std::int64_t activations = config.tokens() * (config.model.layers + 2) * kept_per_token;
  constexpr std::int64_t kWeightCopies = 4;  // weight, gradient, two moments
  const auto floats = static_cast<std::uint64_t>(kWeightCopies * weights + 2 * activations);
  return Bytes(floats * sizeof(float)) + 512_MiB;
}

std::unique_ptr<Device> open_training_device(const Settings& settings, const Config& config) {
  const bool emulated = settings.device == "emulated" || (settings.device == "auto" && !cuda_available());
  if (!emulated) return require(open_device("cuda", {}));
  return require(open_emulated_device(emulated_options(settings, config)));
}

}  // namespace terrace::trainer
