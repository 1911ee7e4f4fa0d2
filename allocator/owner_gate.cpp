#include "allocator/owner_gate.hpp"

#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace terrace {
namespace {

bool membarrier_call(int command) { return syscall(SYS_membarrier, command, 0, 0) == 0; }

// Once for the process; a child of fork() keeps it.
bool has_membarrier() {
  static const bool registered = membarrier_call(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
  return registered;
}

}  // namespace

OwnerGate::OwnerGate() {
  if (!has_membarrier()) flags_.store(kFence, std::memory_order_relaxed);
}

bool OwnerGate::enter_with_fence(std::uint32_t allowed) {
  inside_.exchange(1, std::memory_order_seq_cst);
  if ((flags_.load(std::memory_order_seq_cst) & ~allowed) == 0) return true;
  leave();
  return false;
}

void OwnerGate::barrier() {
  if constexpr (kThreadSanitizer) return;
  if (has_membarrier()) (void)membarrier_call(MEMBARRIER_CMD_PRIVATE_EXPEDITED);
}

void OwnerGate::await_owner() const {
  while (inside_.load(std::memory_order_seq_cst) != 0) sched_yield();
}

}  // namespace terrace
