// Whole arrays between device and host, through pinned memory. Waits: for what is done once, not in a
// step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "swapcore/session.hpp"

namespace terrace::trainer {

// Both throw Failure. The compute stream's earlier work is done when they return.
void upload(Session& session, std::span<const float> from, float* device);
void upload(Session& session, std::span<const std::byte> from, Address device);
[[nodiscard]] std::vector<float> download(Session& session, const float* device, std::int64_t count);
[[nodiscard]] std::vector<std::byte> download_bytes(Session& session, const std::byte* device,
                                                    std::size_t size);

}  // namespace terrace::trainer
