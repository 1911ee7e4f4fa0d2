// A block: what every pool hands out.
#pragma once

#include "runtime/device.hpp"

namespace terrace {

// A contiguous range with one owner and one size.
struct Block {
  Address address = nullptr;
  Bytes size;  // as asked for; the range behind it is rounded up by its pool
  Pool pool = Pool::kScratch;
};

}  // namespace terrace
