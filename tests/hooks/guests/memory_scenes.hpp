// The scenes of memory_guest, in five files.
#pragma once

#include <functional>
#include <map>
#include <string_view>

#include "tests/hooks/guests/loopback_api.hpp"

namespace terrace::guest {

inline constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

void say(const char* what, long long value);

const std::map<std::string_view, std::function<void()>>& memory_scenes();
const std::map<std::string_view, std::function<void()>>& overflow_scenes();
const std::map<std::string_view, std::function<void()>>& pool_scenes();
const std::map<std::string_view, std::function<void()>>& stable_scenes();
const std::map<std::string_view, std::function<void()>>& driver_scenes();

}  // namespace terrace::guest
