// Stream-ordered allocations, as PyTorch's cudaMallocAsync backend makes them, and what else meets the pool.
#include <dlfcn.h>
#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "tests/hooks/guests/memory_scenes.hpp"

namespace terrace::guest {
namespace {

Pointer number(const void* address) { return reinterpret_cast<Pointer>(address); }
unsigned long long attribute(int which) {
  void* pool = nullptr;
  std::uint64_t value = 0;
  cuDeviceGetDefaultMemPool(&pool, 0);
  cuMemPoolGetAttribute(pool, which, &value);
  return value;
}
constexpr int kReserved = 5, kReservedHigh = 6, kUsed = 7, kUsedHigh = 8;
bool from_our_pool(const void* address) { return loopback_access(number(address)) != 0; }

void attributes() {
  cudaSetDevice(0);
  void *pool = nullptr, *a = nullptr, *b = nullptr;
  cuDeviceGetDefaultMemPool(&pool, 0);
  say("malloc", cudaMallocAsync(&a, 10 * kMiB, nullptr));
  say("malloc", cudaMallocAsync(&b, 30 * kMiB, nullptr));
  say("ours", from_our_pool(a));
  Pointer base = 0;
  std::size_t bytes = 0;
  say("range", cuMemGetAddressRange_v2(&base, &bytes, number(b) + 7));
  say("of the allocation", base == number(b) && bytes == 30 * kMiB);
  say("used MiB", static_cast<long long>(attribute(kUsed) / kMiB));
  say("free", cudaFreeAsync(b, nullptr));
  say("used MiB", static_cast<long long>(attribute(kUsed) / kMiB));
  say("high MiB", static_cast<long long>(attribute(kUsedHigh) / kMiB));
  say("reserved over used", attribute(kReserved) >= 40 * kMiB);
  say("device has it", loopback_used(0) > 64 * kMiB + 40 * kMiB - 1);
  say("threshold", static_cast<long long>(attribute(4)));
  std::uint64_t zero = 0;
  say("reset",
      cuMemPoolSetAttribute(pool, kUsedHigh, &zero) + cuMemPoolSetAttribute(pool, kReservedHigh, &zero));
  say("high MiB", static_cast<long long>(attribute(kUsedHigh) / kMiB));
  say("trim", cuMemPoolTrimTo(pool, 0));
  say("given back", attribute(kReserved) < 40 * kMiB && loopback_used(0) < 64 * kMiB + 40 * kMiB);
  say("free", cudaFreeAsync(a, nullptr));
  say("twice", cudaFreeAsync(a, nullptr));
  say("inside", cudaFreeAsync(static_cast<char*>(b) + 512, nullptr));
  say("trim", cuMemPoolTrimTo(pool, 0));
  say("reserved", static_cast<long long>(attribute(kReserved)));
  say("used at the end MiB", static_cast<long long>(loopback_used(0) / kMiB));
}

// A block freed on one stream comes to another only behind what the first still does.
void streams() {
  cudaSetDevice(0);
  void *one = nullptr, *two = nullptr, *a = nullptr, *b = nullptr;
  cuStreamCreate(&one, 0);
  cuStreamCreate(&two, 0);
  say("malloc", cudaMallocAsync(&a, 900 * kMiB, one));
  loopback_busy(one, 1);
  say("free", cudaFreeAsync(a, one));
  // No room for a second one: the same bytes, behind the work of the first stream.
  say("malloc", cudaMallocAsync(&b, 900 * kMiB, two));
  say("same", a == b);
  say("waits", loopback_waits(two, one) > 0);
  say("free", cudaFreeAsync(b, two));
  say("same stream", cudaMallocAsync(&a, 900 * kMiB, two));
  say("free", cudaFreeAsync(a, two));
  // A stream that ends has been waited for.
  say("destroy", cuStreamDestroy_v2(two));
  void* three = nullptr;
  cuStreamCreate(&three, 0);
  say("malloc", cudaMallocAsync(&a, 900 * kMiB, three));
  say("free", cudaFree(a));
  say("per thread", cudaMallocAsync_ptsz(&a, kMiB, nullptr));
  say("not ours", from_our_pool(a));
  say("free", cudaFreeAsync_ptsz(a, nullptr));
  say("malloc", cudaMallocAsync(&a, kMiB, three));
  say("freed by another kind", cudaFreeAsync_ptsz(a, nullptr));
  say("used", static_cast<long long>(attribute(kUsed)));
}

void capture() {
  cudaSetDevice(0);
  void *stream = nullptr, *a = nullptr, *b = nullptr, *c = nullptr, *graph = nullptr;
  cuStreamCreate(&stream, 0);
  say("malloc", cudaMallocAsync(&a, 8 * kMiB, nullptr));
  say("begin", cuStreamBeginCapture_v2(stream, 0));
  say("captured", cudaMallocAsync(&b, 8 * kMiB, stream));
  say("ours", from_our_pool(b));
  say("elsewhere", cudaMallocAsync(&c, 8 * kMiB, nullptr));
  say("ours", from_our_pool(c));
  say("free in capture", cudaFreeAsync(a, nullptr));
  say("kept", static_cast<long long>(attribute(kUsed) / kMiB));
  say("captured free", cudaFreeAsync(b, stream));
  say("end", cuStreamEndCapture(stream, &graph));
  say("whole", graph != nullptr);
  say("malloc", cudaMallocAsync(&b, kMiB, nullptr));
  say("freed after", static_cast<long long>(attribute(kUsed) / kMiB));
  say("begin", cuStreamBeginCapture_v2(stream, 0));
  say("destroyed while captured", cuStreamDestroy_v2(stream));
  say("malloc", cudaMallocAsync(&a, kMiB, nullptr));
  say("ours", from_our_pool(a));
}

void sharing() {
  cudaSetDevice(0);
  void *pool = nullptr, *a = nullptr, *b = nullptr;
  cuDeviceGetDefaultMemPool(&pool, 0);
  say("malloc", cudaMallocAsync(&a, 8 * kMiB, nullptr));
  IpcHandle handle{};
  say("export", cuIpcGetMemHandle(&handle, number(a)));
  say("plain", cudaMalloc(&b, kMiB));
  say("export plain", cuIpcGetMemHandle(&handle, number(b)));
  const Access peer{1, 1, 3};
  say("access before", loopback_access(number(a)));
  say("let in", cuMemPoolSetAccess(pool, &peer, 1));
  say("access after", loopback_access(number(a)));
  say("malloc", cudaMallocAsync(&b, 64 * kMiB, nullptr));
  say("access of new", loopback_access(number(b)));
  // A pool of the program's own stays its own.
  say("from other", cudaMallocFromPoolAsync(&a, kMiB, loopback_other_pool(), nullptr));
  say("ours", from_our_pool(a));
  say("from default", cudaMallocFromPoolAsync(&a, kMiB, pool, nullptr));
  say("ours", from_our_pool(a));
  say("set pool", cuDeviceSetMemPool(0, loopback_other_pool()));
  say("malloc", cudaMallocAsync(&a, kMiB, nullptr));
  say("ours", from_our_pool(a));
  say("set back", cuDeviceSetMemPool(0, pool));
  say("malloc", cudaMallocAsync(&a, kMiB, nullptr));
  say("ours", from_our_pool(a));
}

// The wall holds for pool and driver together, and what the pool has free makes room.
void pool_wall() {
  std::vector<void*> kept;
  for (void* out = nullptr; kept.size() < 100 && cudaMallocAsync(&out, 100 * kMiB, nullptr) == 0;)
    kept.push_back(out);
  say("blocks", static_cast<long long>(kept.size()));
  say("last error", cudaGetLastError());
  say("under the wall", loopback_used(0) <= kGiB);
  void* plain = nullptr;
  say("plain", cudaMalloc(&plain, 200 * kMiB));
  for (int i = 0; i < 4; ++i) cudaFreeAsync(kept[static_cast<std::size_t>(i)], nullptr);
  say("plain", cudaMalloc(&plain, 200 * kMiB));
  say("under the wall", loopback_used(0) <= kGiB);
  std::size_t available = 0, total = 0;
  cudaMemGetInfo(&available, &total);
  say("room", available >= 100 * kMiB && available < 300 * kMiB);
}

void pool_threads() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      cudaSetDevice(0);
      void* stream = nullptr;
      if (t % 2 == 0) cuStreamCreate(&stream, 0);
      for (int i = 0; i < 300; ++i) {
        void *a = nullptr, *b = nullptr;
        if (cudaMallocAsync(&a, (1 + i % 7) * 300 * kKiB, stream) != 0) std::printf("refused\n");
        if (cudaMallocAsync(&b, 1 + i % 5000, stream) != 0) std::printf("refused\n");
        cudaFreeAsync(a, stream);
        cudaFreeAsync(b, stream);
      }
      if (stream != nullptr) cuStreamDestroy_v2(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  say("used", static_cast<long long>(attribute(kUsed)));
}

void torch() {
  cudaSetDevice(0);
  using Alloc = void* (*)(ssize_t, int, void*);
  using Free = void (*)(void*, ssize_t, int, void*);
  const auto alloc = reinterpret_cast<Alloc>(dlsym(RTLD_DEFAULT, "terrace_torch_alloc"));
  const auto free = reinterpret_cast<Free>(dlsym(RTLD_DEFAULT, "terrace_torch_free"));
  if (alloc == nullptr || free == nullptr) return say("found", 0);
  void* a = alloc(20 * kMiB, 0, nullptr);
  say("ours", from_our_pool(a));
  say("used MiB", static_cast<long long>(attribute(kUsed) / kMiB));
  free(a, 20 * kMiB, 0, nullptr);
  say("used MiB", static_cast<long long>(attribute(kUsed) / kMiB));
  say("null", alloc(0, 0, nullptr) == nullptr && alloc(3 * kGiB, 0, nullptr) == nullptr);
  cudaGetLastError();
  void* b = nullptr;
  say("malloc", cudaMallocAsync(&b, kMiB, nullptr));
  say("ours", from_our_pool(b));
}

void launches() {
  cudaSetDevice(0);
  void *a = nullptr, *b = nullptr;
  cudaMallocAsync(&a, kMiB, nullptr);
  cudaMallocAsync(&b, kMiB, nullptr);
  Pointer first = number(a) + 100;
  int count = 5;
  struct {
    Pointer nothing, other, nowhere;
  } second = {0, number(b), 12345};
  void* parameters[] = {&first, &count, &second};
  const void* kernel = reinterpret_cast<void*>(0x11);
  for (int i = 0; i < 3; ++i)
    say("launch", cudaLaunchKernel(kernel, {1, 1, 1}, {1, 1, 1}, parameters, 0, nullptr));
  say("no parameters",
      cudaLaunchKernel(reinterpret_cast<void*>(0x12), {1, 1, 1}, {1, 1, 1}, nullptr, 0, nullptr));
  say("opaque",
      cudaLaunchKernel(reinterpret_cast<void*>(0x99), {1, 1, 1}, {1, 1, 1}, parameters, 0, nullptr));
  say("unload", cuModuleUnload(nullptr));
  say("launch", cudaLaunchKernel(kernel, {1, 1, 1}, {1, 1, 1}, parameters, 0, nullptr));
}

// With a budget of 128 MiB. Everything once, so that each driver call can fail in turn: whatever happens,
// what was given stays usable, and the driver ends with what it was not asked to take back.
void faults() {
  cudaSetDevice(0);
  void *one = nullptr, *two = nullptr, *plain = nullptr;
  cuStreamCreate(&one, 0);
  cuStreamCreate(&two, 0);
  std::vector<void*> kept;
  const auto allocate = [&](std::size_t bytes, void* stream) {
    void* out = nullptr;
    if (cudaMallocAsync(&out, bytes, stream) == 0) kept.push_back(out);
  };
  for (int round = 0; round < 2; ++round) {
    allocate(3 * kMiB, one);
    allocate(40 * kMiB, one);
    if (one != nullptr) loopback_busy(one, 1);
    if (!kept.empty() && cudaFreeAsync(kept.back(), one) == 0) kept.pop_back();
    allocate(40 * kMiB, two);
    if (cudaMalloc(&plain, 16 * kMiB) == 0) cudaFree(plain);
    for (void* each : kept) cudaFreeAsync(each, two);
    kept.clear();
  }
  if (two != nullptr) cuStreamDestroy_v2(two);
  void* pool = nullptr;
  if (cuDeviceGetDefaultMemPool(&pool, 0) == 0) cuMemPoolTrimTo(pool, 0);
  say("used MiB", static_cast<long long>(loopback_used(0) / kMiB));
  say("calls", loopback_calls());
}

}  // namespace

const std::map<std::string_view, std::function<void()>>& pool_scenes() {
  static const std::map<std::string_view, std::function<void()>> scenes = {
      {"attributes", attributes}, {"streams", streams},     {"capture", capture},
      {"sharing", sharing},       {"pool-wall", pool_wall}, {"pool-threads", pool_threads},
      {"torch", torch},           {"launches", launches},   {"faults", faults},
  };
  return scenes;
}

}  // namespace terrace::guest
