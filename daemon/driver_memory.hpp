// What the driver says is free on a device, whoever holds the rest: a child of an ended client, say, that the
// daemon knows nothing of. NVML, opened at run time: the daemon makes no context on any device.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "runtime/units.hpp"

namespace terrace {

// By the device's PCI address; nothing: it cannot be asked. Quick, and any thread may call.
using DriverMemory = std::function<std::optional<Bytes>(const std::string& device)>;

// Empty where there is no NVML on this machine.
[[nodiscard]] DriverMemory nvml_memory();

}  // namespace terrace
