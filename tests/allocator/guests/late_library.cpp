// A shared library that carries small blocks, for programs that open it late. Built as a user's library would
// be: no version script hides anything, so what it exports is what the private jemalloc lets out.
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "allocator/small_blocks.hpp"

#define LATE_API extern "C" __attribute__((visibility("default")))

namespace {

using terrace::Address;
using terrace::Bytes;

class Mapped final : public terrace::SmallBlockSource {
 public:
  terrace::Result<Address> take(Bytes size) override {
    void* memory = mmap(nullptr, size.count(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return terrace::Error{terrace::Errc::kOutOfMemory, "mmap", size, {}};
    taken += size.count();
    return static_cast<Address>(memory);
  }
  void give(Address address, Bytes size) override {
    munmap(address, size.count());
    taken -= size.count();
  }
  std::atomic<std::uint64_t> taken{0};
};

Mapped source;
std::unique_ptr<terrace::SmallBlocks> small;

}  // namespace

LATE_API int late_open() {
  auto created = terrace::SmallBlocks::create(source, {});
  if (!created) return -1;
  small = std::move(created).value();
  return 0;
}

LATE_API void* late_allocate(std::size_t size) {
  auto block = small->allocate(Bytes(size));
  return block ? *block : nullptr;
}

LATE_API void late_free(void* block) { small->free(static_cast<Address>(block)); }

LATE_API std::uint64_t late_live() { return small->usage().live.count(); }

// Bytes that the source did not get back.
LATE_API std::uint64_t late_close() {
  small.reset();
  return source.taken;
}
