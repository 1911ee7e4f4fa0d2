// One store to, or load from, the NVMe tier: what is to be done, and how it ended.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "allocator/tier.hpp"

namespace terrace {

// What a store has left in the file, and how to know it again. Written by the store, read by later loads.
struct StoredBytes {
  std::uint64_t generation = 0;          // which store of its tier; seeds the checksums
  std::vector<std::uint64_t> checksums;  // one a piece
};

class NvmeTransfer final : public TierTransfer {
 public:
  enum class Kind : std::uint8_t { kStore, kLoad };
  struct Request {
    Kind kind = Kind::kStore;
    std::uint64_t block = 0;
    Bytes size;
    std::uint64_t offset = 0;         // in the file
    const std::byte* from = nullptr;  // kStore
    Address to = nullptr;             // kLoad
    std::shared_ptr<StoredBytes> stored;
  };

  explicit NvmeTransfer(Request request) : request_(std::move(request)) {}
  [[nodiscard]] const Request& request() const { return request_; }
  void finish(Status how);  // once, by whoever moves the bytes

  [[nodiscard]] bool done() const override;
  [[nodiscard]] Status synchronize() override;
  // The host waits: what a stream could wait for comes into being only as the file answers.
  [[nodiscard]] Status wait_on(Stream) override { return synchronize(); }

 private:
  const Request request_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::optional<Status> how_;
};

}  // namespace terrace
