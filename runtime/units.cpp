#include "runtime/units.hpp"

#include <array>
#include <cstdio>

namespace terrace {

std::string format_bytes(Bytes size) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (size < 1_KiB) return std::to_string(size.count()) + " B";
  double scaled = static_cast<double>(size.count()) / 1024.0;
  std::size_t unit = 0;
  // 1023.95 would print as "1024.0": the next unit says it better.
  while (scaled >= 1023.95 && unit + 1 < kUnits.size()) {
    scaled /= 1024.0;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %s", scaled, kUnits[unit]);
  return text.data();
}

const char* name_of(TierId tier) {
  switch (tier) {
    case TierId::kHbm:
      return "hbm";
    case TierId::kPeer:
      return "peer";
    case TierId::kDdr:
      return "ddr";
    case TierId::kNvme:
      return "nvme";
  }
  return "unknown";
}

const char* name_of(Pool pool) {
  switch (pool) {
    case Pool::kWeights:
      return "weights";
    case Pool::kOptimizer:
      return "optimizer";
    case Pool::kGradient:
      return "gradient";
    case Pool::kActivation:
      return "activation";
    case Pool::kExpert:
      return "expert";
    case Pool::kComm:
      return "comm";
    case Pool::kScratch:
      return "scratch";
  }
  return "unknown";
}

}  // namespace terrace
