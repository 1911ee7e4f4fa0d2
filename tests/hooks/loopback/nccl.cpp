// A libnccl.so.2 on host memory. Sends and receives of one group find each other by rank, and the group's end
// moves the bytes; what has no partner is an error. Registered ranges are counted.
#include <cstddef>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

struct ncclComm {
  int rank;
  int ranks;
};

namespace {

constexpr int kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5;

struct Part {
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t size = 0;
};

int registered = 0;
int refuse_sends_after = -1;  // successful ones to come; -1: never
int depth = 0;
std::map<std::pair<int, int>, Part> group;  // by sender and receiver

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int loopback_nccl_registered() { return registered; }
API void loopback_nccl_refuse_sends_after(int count) { refuse_sends_after = count; }

API int ncclGetVersion(int* version) {
  *version = 22809;
  return kSuccess;
}
API const char* ncclGetErrorString(int result) {
  return result == kInvalidUsage ? "invalid usage (loopback)" : "invalid argument (loopback)";
}
API int ncclCommInitAll(ncclComm** communicators, int devices, const int*) {
  for (int rank = 0; rank < devices; ++rank) communicators[rank] = new ncclComm{rank, devices};
  return kSuccess;
}
API int ncclCommDestroy(ncclComm* communicator) {
  delete communicator;
  return kSuccess;
}
API int ncclGroupStart() {
  ++depth;
  return kSuccess;
}
API int ncclGroupEnd() {
  if (--depth != 0) return kSuccess;
  int result = kSuccess;
  for (const auto& [ranks, part] : group) {
    if (part.from == nullptr || part.to == nullptr) {
      result = kInvalidUsage;
    } else {
      std::memcpy(part.to, part.from, part.size);
    }
  }
  group.clear();
  return result;
}
API int ncclSend(const void* data, std::size_t count, int type, int peer, ncclComm* communicator, void*) {
  if (type != 1 || depth == 0 || peer < 0 || peer >= communicator->ranks) return kInvalidArgument;
  if (refuse_sends_after == 0) return kInvalidUsage;
  if (refuse_sends_after > 0) --refuse_sends_after;
  Part& part = group[{communicator->rank, peer}];
  if (part.to != nullptr && part.size != count) return kInvalidUsage;
  part.from = data;
  part.size = count;
  return kSuccess;
}
API int ncclRecv(void* data, std::size_t count, int type, int peer, ncclComm* communicator, void*) {
  if (type != 1 || depth == 0 || peer < 0 || peer >= communicator->ranks) return kInvalidArgument;
  Part& part = group[{peer, communicator->rank}];
  if (part.from != nullptr && part.size != count) return kInvalidUsage;
  part.to = data;
  part.size = count;
  return kSuccess;
}
API int ncclCommRegister(ncclComm*, void* data, std::size_t size, void** handle) {
  if (data == nullptr || size == 0) return kInvalidArgument;
  ++registered;
  *handle = data;
  return kSuccess;
}
API int ncclCommDeregister(ncclComm*, void*) {
  --registered;
  return kSuccess;
}
