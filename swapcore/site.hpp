// A site is a named operator whose output may be cached: `layer.7.moe.fc1`.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/units.hpp"

namespace terrace {

enum class SiteKind : std::uint8_t { kMatmul = 0, kGmm = 1, kAttention = 2, kScan = 3 };
inline constexpr int kSiteKindCount = 4;
[[nodiscard]] const char* name_of(SiteKind kind);  // "matmul", "gmm", "attention", "scan"

struct SiteId {
  std::uint32_t index = 0;
  auto operator<=>(const SiteId&) const = default;
};

struct SiteSpec {
  std::string name;  // unique in the session; dots separate, the layer is part of it
  SiteKind kind = SiteKind::kMatmul;
  int layer = 0;  // position in forward order, 0 first; backward runs the other way
  // Sites of one group (the same operator in layers of the same type) share one measured cost: "kda.q".
  std::string group;
};

// Which output: forward and recompute of the same micro-batch meet here.
struct SiteKey {
  SiteId site;
  std::uint32_t micro_batch = 0;
  auto operator<=>(const SiteKey&) const = default;
};

}  // namespace terrace
