// Which tokens the sparse layers look at, while a micro-batch walks through the model. Of these layers one in
// dsa.select_every selects; those that follow it, up to the next one that does, reuse its choice.
#pragma once

#include <cstdint>
#include <map>

#include "examples/moe_trainer/config.hpp"
#include "examples/moe_trainer/memory.hpp"

namespace terrace::trainer {

// The layer that selects for a sparse layer, and the last one that reads that choice.
struct SharedChoice {
  int owner = 0, last = 0;
};
[[nodiscard]] SharedChoice shared_choice(const Config& config, int layer);

// What of a choice is on the device now, by the layer that made it: made in forward or brought back by the
// first that asks for it in backward, and let go by the last.
class Selections {
 public:
  struct Entry {
    BlockRef lists;    // (tokens, slots) of int32
    BlockRef key_map;  // as MapKeys makes it
  };
  [[nodiscard]] Entry& of(int owner) { return entries_[owner]; }

 private:
  std::map<int, Entry> entries_;
};

}  // namespace terrace::trainer
