// What `terrace run` puts into a command's environment for the preload library and for PyTorch
// (hooks/intercept/hook_settings.hpp reads it).
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "swapcore/policy/policy.hpp"

namespace terrace {

using Environment = std::vector<std::pair<std::string, std::string>>;

// native: PyTorch's own allocator stays, and its segments are charged. terrace: PyTorch's cudaMallocAsync
// backend is selected, and a pool in the process serves it.
enum class GuestAllocator : std::uint8_t { kNative, kTerrace };

// Errors: kInvalidArgument: not "native", "terrace" or empty, which is native.
[[nodiscard]] Result<GuestAllocator> guest_allocator_named(std::string_view name);

// PYTORCH_ALLOC_CONF as the user set it, with the backend that --allocator terrace needs added. Errors:
// kInvalidArgument where it names another backend.
[[nodiscard]] Result<std::string> with_async_backend(std::string_view variable, std::string_view set);

// All of it. Errors: those above, and those of reading the machine's memory limits.
[[nodiscard]] Result<Environment> hook_environment(const Policy& policy, GuestAllocator allocator);

}  // namespace terrace
