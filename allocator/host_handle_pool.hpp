// Physical handles of host memory, pinned on a NUMA node, that the stable-address form maps where a spilled
// block was: the pointer stays, and host and device both reach the bytes.
//
// Making a handle pins it at a few GB/s, so freed handles are kept for the next block of their size. Handles
// are charged to the lease that pinned slabs are charged to. Thread-safe; handles are made without the lock.
//
// Machines differ in what they serve: some announce host-NUMA memory and refuse every node, or all but one.
// So each node is tried when the pool is made, and only those that worked are asked.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "allocator/host_lease.hpp"
#include "runtime/device.hpp"

namespace terrace {

class HostHandlePool {
 public:
  struct Options {
    std::shared_ptr<HostLease> lease;
    std::vector<int> nodes{0};  // those to try; memory is taken from those that work in turn
    Bytes chunk = 32_MiB;       // handles are multiples of it; rounded up to the device's granularity
  };
  struct Handle {
    Physical physical;
    Bytes size;
    int node = 0;
  };
  struct Usage {
    Bytes held;  // charged to the lease: in use, and kept for reuse
    Bytes live;  // handed out
  };

  // Tries each node: a handle is made and mapped, the host writes it, the device writes it, the host reads
  // that. Errors: kNotSupported (the device has no such memory, or no node works; the text says why),
  // kOutOfBudget (the lease has no room for a handle of the least size to try with), device errors. Nothing
  // is left behind.
  [[nodiscard]] static Result<std::unique_ptr<HostHandlePool>> create(Device& device, Options options);
  ~HostHandlePool();  // every handle given back before
  HostHandlePool(const HostHandlePool&) = delete;
  HostHandlePool& operator=(const HostHandlePool&) = delete;

  // A handle of `size`, rounded up to chunks, to be mapped as Device::map asks. Errors: kInvalidArgument
  // (size zero), kOutOfBudget (handles kept for other sizes are given up first), kOutOfMemory (every node
  // refused).
  [[nodiscard]] Result<Handle> take(Bytes size);
  // Unmapped before. Errors: kInvalidArgument (not handed out, or given back already); nothing changed.
  [[nodiscard]] Status give_back(const Handle& handle);

  // Destroys the handles kept for reuse: every one, or until the lease's budget is kept. Returns their bytes.
  enum class Until : std::uint8_t { kNothingIsKept, kBudgetIsKept };
  Bytes trim(Until until);

  [[nodiscard]] const std::vector<int>& nodes() const { return nodes_; }  // those that work; never empty
  [[nodiscard]] Bytes chunk() const { return chunk_; }
  [[nodiscard]] Usage usage() const;

 private:
  HostHandlePool(Device& device, Options options);
  [[nodiscard]] Status probe_nodes();
  [[nodiscard]] Result<Handle> create_on_a_node(Bytes size);
  [[nodiscard]] std::vector<Handle> detach_kept(Bytes enough);  // mutex_ held; the largest first
  Bytes destroy(const std::vector<Handle>& handles);
  [[nodiscard]] bool charge(Bytes size);

  Device& device_;
  const std::shared_ptr<HostLease> lease_;
  const Bytes chunk_;
  std::vector<int> nodes_;

  mutable std::mutex mutex_;                   // all below
  std::map<Bytes, std::vector<Handle>> kept_;  // by size
  std::map<Physical, Handle> live_;
  Usage usage_;
  std::size_t turn_ = 0;  // the node to ask first
};

}  // namespace terrace
