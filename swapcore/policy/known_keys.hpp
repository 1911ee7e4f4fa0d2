// The table of what a policy file may say. The parser refuses what is not in it, docs/POLICY.md lists it, and
// a test holds the three together.
#pragma once

#include <span>
#include <string_view>

namespace terrace {

struct KnownKey {
  std::string_view section;   // "" at the top level, else "hbm", "swapcore.rule", ...
  std::string_view key;       // within the section
  std::string_view fallback;  // the default as it would be written; empty: the key is required
};

[[nodiscard]] std::span<const KnownKey> known_keys();

}  // namespace terrace
