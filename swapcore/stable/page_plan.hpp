// Which blocks of stable addresses should travel now: a pure function of where they are and when each is used
// next.
//
// What should be in HBM is what stays there between its uses, and then what is used soonest, as far as there
// is room. Of that, what is in DDR comes back, what is used soonest first, as far ahead as is asked for. For
// its room goes what should not be there, that used last first: farthest ahead by the schedule, or least
// recently where the next use is not known. So plan after plan ends.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/device.hpp"
#include "runtime/units.hpp"

namespace terrace {

struct PagedBlock {
  Address at = nullptr;
  Bytes size;
  bool in_hbm = true;
  bool movable = true;              // not pinned, and not on its way
  bool stays = false;               // until its next use
  std::optional<std::size_t> next;  // uses from now; nothing: not known
  std::uint64_t last_use = 0;       // larger: more recently
};

struct PagePlan {
  std::vector<Address> to_ddr;
  std::vector<Address> to_hbm;
  std::vector<std::size_t> behind;  // by block of to_hbm: so many of to_ddr are to be ordered before it
};

struct PageNeeds {
  Bytes room;              // of HBM, free now or about to be
  std::size_t uses_ahead;  // what is used within so many uses comes back
  Bytes bytes_ahead;       // and of that at most so much
};
[[nodiscard]] PagePlan plan_pages(std::span<const PagedBlock> blocks, const PageNeeds& needs);

// Blocks to send away so that `size` is free, what should not be in HBM first, and of equals the one used
// last; none of `spared`. Empty where that is not possible. Those in HBM that can move, and only as many as
// it takes.
[[nodiscard]] std::vector<Address> make_room(std::span<const PagedBlock> blocks, Bytes room, Bytes size,
                                             std::span<const Address> spared);

}  // namespace terrace
