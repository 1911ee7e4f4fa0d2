#include "examples/moe_trainer/memory.hpp"

#include <cstdlib>
#include <new>
#include <utility>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {
constexpr Bytes kPage = 4_KiB;
}

BlockRef Memory::block(Bytes size, Pool pool) { return require(session_.allocate(size, pool)); }

Tensor Memory::tensor(std::int64_t rows, std::int64_t width, Pool pool, Dtype dtype) {
  const Tensor shape{.block = nullptr, .at = nullptr, .rows = rows, .width = width, .dtype = dtype};
  return Tensor::over(block(shape.bytes(), pool), rows, width, dtype);
}

Tensor Memory::zeros(std::int64_t rows, std::int64_t width, Pool pool) {
  Tensor out = tensor(rows, width, pool);
  require(session_.device().fill(session_.compute(), out.block->address, 0, out.bytes()));
  return out;
}

std::shared_ptr<const void> Memory::take(Bytes size, Address* address) {
  BlockRef scratch = block(size, Pool::kScratch);
  *address = scratch->address;
  return scratch;
}

BlockRef Memory::host_block(Bytes size, Pool pool) { return require(session_.allocate_host(size, pool)); }

PinnedBuffer::PinnedBuffer(Device& device, Bytes size) : device_(device), size_(round_up(size, kPage)) {
  address_ = static_cast<Address>(std::aligned_alloc(kPage.count(), size_.count()));
  if (address_ == nullptr) throw std::bad_alloc();
  const Status pinned = device_.pin(address_, size_);
  if (pinned.ok()) return;
  std::free(address_);
  fail(pinned.error());
}

PinnedBuffer::~PinnedBuffer() {
  device_.unpin(address_, size_);
  std::free(address_);
}

}  // namespace terrace::trainer
