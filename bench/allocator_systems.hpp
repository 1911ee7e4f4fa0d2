// The allocators under test, ours and its peers, behind one table of calls
// (allocator/replay/allocator_plugin.h): whatever a call through the table costs, it costs all of them.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bench/peers/table.hpp"
#include "runtime/result.hpp"

namespace terrace::bench {

inline constexpr int kHostMemory = -1;  // as a device number: the emulated device, and the CPU's allocators

// One open allocator. It is closed with the object; the library it came from stays loaded to the end of the
// process, because threads may leave through destructors of that library.
class System {
 public:
  // Errors: kNotSupported, with the allocator's own reason.
  [[nodiscard]] static Result<System> open(const AllocatorPlugin& table, int device, Bytes budget);
  // The same from a plugin. Errors: also kIo and kInvalidArgument where the file is no such plugin.
  [[nodiscard]] static Result<System> load(const std::filesystem::path& file, int device, Bytes budget);

  [[nodiscard]] const char* name() const { return table_->name; }
  [[nodiscard]] const AllocatorPlugin& calls() const { return *table_; }
  [[nodiscard]] void* self() const { return self_.get(); }
  [[nodiscard]] Bytes reserved() const { return Bytes(table_->reserved(self_.get())); }

 private:
  System(const AllocatorPlugin& table, void* self) : table_(&table), self_(self, table.close) {}

  const AllocatorPlugin* table_;
  std::unique_ptr<void, void (*)(void*)> self_;
};

// HbmPool on the emulated device, or on GPU number `device`.
[[nodiscard]] const AllocatorPlugin& terrace_table();
// What a block costs with no pool at all: physical memory created, mapped, unmapped and destroyed each time.
[[nodiscard]] const AllocatorPlugin& emulated_table();

}  // namespace terrace::bench
