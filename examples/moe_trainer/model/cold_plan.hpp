// What of a model goes to NVMe: what DDR has no room for beside all else that lives there. Pure.
//
// Frozen experts go first, of every layer that streams equally many: they are read alone, and by the router's
// word not all of them. Then chunks of optimizer state, spread evenly over the update, so that the link and
// the drive work side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/units.hpp"

namespace terrace::trainer {

struct DdrDemand {
  Bytes budget;
  Bytes fixed;  // of what stays, whatever is planned
  struct Group {
    Bytes frozen;  // of its frozen experts, where they stream, and how many those are
    std::int64_t experts = 0;
    std::vector<Bytes> chunks;  // of its state, where that streams
  };
  std::vector<Group> groups;
};

struct ColdPlan {
  struct Group {
    std::int64_t experts = 0;  // the last so many, and never all
    std::vector<bool> chunks;  // whether on NVMe
  };
  std::vector<Group> groups;
  Bytes experts, state;  // that go; zero: nothing does
};

[[nodiscard]] ColdPlan plan_cold(const DdrDemand& demand);

}  // namespace terrace::trainer
