// One mapping of host memory, on the wanted NUMA nodes, of the wanted pages, touched and pinned.
//
// Its base is a multiple of kPinStep, and a page behind it stays unmapped, so that two slabs never touch. A
// child of fork() does not have it, as it does not have memory of the driver's. Immutable once made, so that
// any thread may ask.
#pragma once

#include <memory>
#include <vector>

#include "allocator/huge_pages.hpp"
#include "allocator/parallel_pin.hpp"
#include "runtime/device.hpp"

namespace terrace {

struct SlabOptions {
  HugePages huge_pages = HugePages::kTransparent;
  // One: preferred; several: interleaved, page by page; none: wherever first touch puts it. A node that is
  // full lets the memory go elsewhere: slower, and nobody is killed for it.
  std::vector<int> numa_nodes{};
  int touching_threads = 0;  // as PinPlan::touching
  int pinning_threads = 2;   // as PinPlan::pinning
};

// Errors: kInvalidArgument; the text says which node does not exist, has no memory, or is closed to this
// process.
[[nodiscard]] Status check_numa_nodes(const std::vector<int>& nodes);

class PinnedSlab {
 public:
  // Precondition: size is a multiple of 4 KiB, more than zero. Errors: kOutOfMemory: no address space, no
  // pages, or the device refused; the text says which call, for how much, and which limit leaves least.
  // Nothing is left behind.
  [[nodiscard]] static Result<std::unique_ptr<PinnedSlab>> create(Device& device, Bytes size,
                                                                  const SlabOptions& options);
  ~PinnedSlab();
  PinnedSlab(const PinnedSlab&) = delete;
  PinnedSlab& operator=(const PinnedSlab&) = delete;

  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] Bytes size() const { return size_; }
  [[nodiscard]] Address end() const { return base_ + size_.count(); }
  // What it was mapped with: less than was asked for where explicit huge pages were refused. That transparent
  // ones were really given is the system's to know.
  [[nodiscard]] HugePages pages() const { return pages_; }

 private:
  PinnedSlab(Device& device, Address base, Bytes size, HugePages pages)
      : device_(device), base_(base), size_(size), pages_(pages) {}

  Device& device_;
  const Address base_;
  const Bytes size_;
  const HugePages pages_;
};

}  // namespace terrace
