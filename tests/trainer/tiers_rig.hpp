// Trainers whose state and experts live in DDR, and what they come to.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {

inline constexpr int kSteps = 3;
inline constexpr Policy::Optimizer kStateInDdr{.tier = StateTier::kDdr};

inline constexpr Policy::Optimizer kGradientsInDdr{.tier = StateTier::kDdr, .gradients = StateTier::kDdr};

inline Policy::Experts streamed(double resident, int prefetch = 1, ExpertLoad load = ExpertLoad::kLayer) {
  return {.resident = Amount::of_share(resident), .prefetch = prefetch, .load = load};
}

// Five layers with experts that are most of the model.
inline Config deep_config(Dtype compute) {
  Config config = small_config();
  config.model.layers = 5;
  config.moe.experts = 8;
  config.moe.expert_width = 64;
  config.train.compute = compute;
  config.train.warmup_steps = 1;
  config.train.learning_rate = 1e-2;
  return config;
}

inline Rig::Options plain(Dtype compute) {
  Rig::Options options;
  options.config = deep_config(compute);
  options.capacity = 64_MiB;
  options.budget = 60_MiB;
  options.link_bytes_per_second = 1e9;
  return options;
}

inline Rig::Options adapters(Dtype compute, LoraBase base) {
  Rig::Options options = plain(compute);
  options.config.lora = {.rank = 2, .targets = {"kda.q", "moe.fc1_up", "moe.fc2"}, .base = base};
  return options;
}

struct Numbers {
  std::vector<float> losses;
  std::map<std::string, std::vector<float>> lasting;  // values and moments of what is trained
  bool operator==(const Numbers&) const = default;
};

inline Numbers numbers_of(Rig& rig, int steps) {
  Numbers all{.losses = rig.steps(steps), .lasting = {}};
  rig.trainer().settle();
  const auto read = [&](const Parameter& p, StateKind kind, const float* device) {
    const Parameter::Home& home = p.home;
    if (home.state != nullptr && (kind != StateKind::kValue || p.value_in_state())) {
      return home.state->read(kind, home.state_at, p.count());
    }
    const bool in_ddr = kind == StateKind::kValue && home.value != nullptr;
    return in_ddr ? std::vector<float>(home.value, home.value + p.count()) : rig.read(device, p.count());
  };
  for (const auto& group : rig.trainer().model().groups()) {
    for (const Parameter& p : group->parameters()) {
      if (!p.trained()) continue;
      all.lasting[p.name] = read(p, StateKind::kValue, p.value);
      all.lasting[p.name + ".m"] = read(p, StateKind::kM, p.m);
      all.lasting[p.name + ".v"] = read(p, StateKind::kV, p.v);
    }
  }
  return all;
}

inline Numbers numbers_of(const Rig::Options& options, int steps = kSteps) {
  Rig rig(options);
  return numbers_of(rig, steps);
}

}  // namespace terrace::trainer::test
