// Makes host memory present and pins it: many threads touch, a few pin, at the same time.
//
// First touch clears pages and is bound by how many processors clear them; pinning walks them and is bound by
// the driver. One after the other they halve each other, so the range is cut into pieces: as soon as a piece
// is touched it is pinned, while the touching goes on. The threads live for one call.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator/usable_cpus.hpp"
#include "runtime/device.hpp"

namespace terrace {

enum class FirstTouch : std::uint8_t {
  kWrite,     // one write a page, and one a huge page where the system gives those
  kPopulate,  // asks the kernel, which can refuse: for pages set aside, that may be gone. Slower beside
              // pinning
};

struct PinPlan {
  UsableCpus cpus;  // the threads run there
  FirstTouch first_touch = FirstTouch::kWrite;
  int touching = 0;  // threads; 0: as many as `cpus` can run, at most kMostTouching
  int pinning = 2;   // of these, how many may be inside Device::pin at once, at least 1
};
inline constexpr int kMostTouching = 32;

// The piece that a range of that size is pinned in: a multiple of kPinStep, larger for larger ranges, so that
// even terabytes are a few thousand registrations.
[[nodiscard]] Bytes pin_piece(Bytes size);

// On success every page of [base, base + size) is present and writable, and the range is pinned as pieces of
// pin_piece(size), the last one shorter. On error nothing of it is pinned, what was touched stays present,
// and the text says which call failed. Preconditions: mapped writable; base a multiple of kPinStep, size of 4
// KiB. Errors: kOutOfMemory (no pages), what Device::pin says.
[[nodiscard]] Status touch_and_pin(Device& device, Address base, Bytes size, const PinPlan& plan);
// Undoes a touch_and_pin of the same base and size.
void unpin_pieces(Device& device, Address base, Bytes size);

}  // namespace terrace
