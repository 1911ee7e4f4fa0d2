#include "allocator/host_room.hpp"

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <vector>

namespace terrace {
namespace {

struct Limit {
  const char* name;
  Bytes left;
};

std::vector<Limit> limits_on(const MemoryLimits& limits, LockLimit lock_limit) {
  std::vector<Limit> list{{"the machine", limits.machine_left}};
  if (limits.group_left) list.push_back({"the control group", *limits.group_left});
  if (lock_limit == LockLimit::kCounts && limits.lockable)
    list.push_back({"RLIMIT_MEMLOCK", *limits.lockable});
  return list;
}

}  // namespace

bool may_lock_any_amount() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> sets{};
  if (syscall(SYS_capget, &header, sets.data()) != 0) return false;
  return (sets[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK)) != 0;
}

std::string least_room(const MemoryLimits& limits, LockLimit lock_limit) {
  const std::vector<Limit> list = limits_on(limits, lock_limit);
  Limit least = list.front();
  std::string all;
  for (const Limit& limit : list) {
    if (limit.left < least.left) least = limit;
    all += (all.empty() ? "" : ", ") + std::string(limit.name) + " " + format_bytes(limit.left);
  }
  return std::string(least.name) + " leaves least: " + format_bytes(least.left) + " (" + all + ")";
}

Status room_for(Bytes size, const MemoryLimits& limits) {
  if (size <= limits.machine_left && (!limits.group_left || size <= *limits.group_left)) return {};
  return Error{.code = Errc::kOutOfMemory,
               .text = format_bytes(size) +
                       " of host memory are not to be had: " + least_room(limits, LockLimit::kIgnored),
               .bytes = size};
}

}  // namespace terrace
