// The emulated HBM itself: a file in memory whose pages are handed out by offset.
//
// Backing memory by a file lets the same bytes appear at any reserved address, which is what remapping needs.
// The capacity is a wall for the sum of sizes; holes between them never make a request fail, as a GPU's page
// tables would not. Offsets are reused lowest first, so the file stays about as long as the peak.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "runtime/result.hpp"

namespace terrace::emulated {

class PhysicalMemory {
 public:
  struct Range {
    std::uint64_t offset = 0;  // in the file
    Bytes size;
  };

  // Errors: kOutOfMemory where the system refuses the file.
  [[nodiscard]] static Result<std::unique_ptr<PhysicalMemory>> create(Bytes capacity);
  ~PhysicalMemory();
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  // Zeroed memory. Errors: kOutOfMemory.
  [[nodiscard]] Result<Range> allocate(Bytes size);
  // Gives the pages back to the system. Precondition: allocated, and mapped nowhere.
  void free(Range range);

  [[nodiscard]] int file() const { return file_; }
  [[nodiscard]] Bytes capacity() const { return capacity_; }
  [[nodiscard]] Bytes live() const;

 private:
  PhysicalMemory(int file, Bytes capacity);
  [[nodiscard]] Status grow_to(std::uint64_t length);  // mutex_ held

  const int file_;
  const Bytes capacity_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> holes_;  // offset to length, never touching each other
  std::uint64_t length_;                          // of the file
  Bytes live_;
};

}  // namespace terrace::emulated
