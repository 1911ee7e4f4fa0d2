#include "allocator/tiers/nvme_transfer.hpp"

#include <utility>

#include "runtime/assert.hpp"

namespace terrace {

void NvmeTransfer::finish(Status how) {
  {
    const std::lock_guard lock(mutex_);
    TERRACE_CHECK(!how_, "a transfer ends once");
    how_ = std::move(how);
  }
  finished_.notify_all();
}

bool NvmeTransfer::done() const {
  const std::lock_guard lock(mutex_);
  return how_.has_value();
}

Status NvmeTransfer::synchronize() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return how_.has_value(); });
  return *how_;
}

}  // namespace terrace
