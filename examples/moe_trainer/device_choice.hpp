// The device a run trains on, and how large and how fast an emulated one pretends to be.
#pragma once

#include <memory>

#include "examples/moe_trainer/settings.hpp"
#include "runtime/device.hpp"

namespace terrace::trainer {

// An upper estimate of the device memory that training without any recomputation takes.
[[nodiscard]] Bytes estimated_need(const Config& config);
// Opens what the settings name. An emulated device's link is as slow, against this machine's GEMMs, as a real
// one's (emulated_link_rate). Throws Failure.
[[nodiscard]] std::unique_ptr<Device> open_training_device(const Settings& settings, const Config& config);

}  // namespace terrace::trainer
