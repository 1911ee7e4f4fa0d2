// Which pages pinned memory is made of: larger ones are touched and pinned several times faster.
#pragma once

#include <cstdint>

namespace terrace {

enum class HugePages : std::uint8_t {
  kOff,
  kTransparent,  // asked for; the system may give small pages
  kExplicit,     // 2 MiB pages that the administrator set aside (vm.nr_hugepages); else transparent ones
};

}  // namespace terrace
