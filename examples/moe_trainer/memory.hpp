// Where the trainer's device memory comes from: one session, for tensors and for the operators' scratch.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "examples/moe_trainer/ops/ops.hpp"
#include "examples/moe_trainer/tensor.hpp"
#include "swapcore/session.hpp"

namespace terrace::trainer {

class Memory : public ScratchSource {
 public:
  explicit Memory(Session& session) : session_(session) {}

  // Uninitialised. Throws OutOfMemory.
  [[nodiscard]] BlockRef block(Bytes size, Pool pool);
  [[nodiscard]] Tensor tensor(std::int64_t rows, std::int64_t width, Pool pool = Pool::kActivation,
                              Dtype dtype = Dtype::kF32);
  [[nodiscard]] Tensor zeros(std::int64_t rows, std::int64_t width, Pool pool);
  [[nodiscard]] std::shared_ptr<const void> take(Bytes size, Address* address) override;
  // Pinned host memory, for what lives in DDR. Throws OutOfMemory.
  [[nodiscard]] BlockRef host_block(Bytes size, Pool pool);
  [[nodiscard]] Session& session() const { return session_; }

 private:
  Session& session_;
};

// Page-aligned host memory, pinned through the device for as long as it lives. The owner makes sure that no
// copy uses it any more before it goes.
class PinnedBuffer {
 public:
  PinnedBuffer(Device& device, Bytes size);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  [[nodiscard]] Address address() const { return address_; }
  [[nodiscard]] Bytes size() const { return size_; }
  template <typename T>
  [[nodiscard]] std::span<T> as() const {
    return {reinterpret_cast<T*>(address_), static_cast<std::size_t>(size_.count() / sizeof(T))};
  }

 private:
  Device& device_;
  Bytes size_;
  Address address_ = nullptr;
};

}  // namespace terrace::trainer
