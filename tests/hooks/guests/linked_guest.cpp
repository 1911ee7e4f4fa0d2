// A program linked with the runtime and the driver. `linked_guest SCENE` prints what each call returned; with
// and without the preload library the output must be the same.
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/hooks/guests/cuda_api.hpp"

namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kTooMuch = std::size_t{32} << 30;  // more than a device has

void say(const char* call, int result) { std::printf("%s %d\n", call, result); }

// 17 allocations of a size that tells them apart: 11 on the device, 2^0 to 2^10 KiB; 5 pinned; one of them
// pitched.
void every_call() {
  void* a[12] = {};
  Pointer p[9] = {};
  std::size_t pitch = 0;
  say("cudaMalloc", cudaMalloc(&a[0], 1 * kKiB));
  say("cudaMallocAsync", cudaMallocAsync(&a[1], 2 * kKiB, nullptr));
  say("cudaMallocFromPoolAsync", cudaMallocFromPoolAsync(&a[2], 4 * kKiB, nullptr, nullptr));
  say("cudaMallocManaged", cudaMallocManaged(&a[3], 8 * kKiB, 1));
  say("cudaMallocPitch", cudaMallocPitch(&a[4], &pitch, 100, 32));  // 512 * 32 = 16 KiB
  say("cuMemAlloc_v2", cuMemAlloc_v2(&p[0], 32 * kKiB));
  say("cuMemAllocAsync", cuMemAllocAsync(&p[1], 64 * kKiB, nullptr));
  say("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync(&p[2], 128 * kKiB, nullptr, nullptr));
  say("cuMemAllocManaged", cuMemAllocManaged(&p[3], 256 * kKiB, 1));
  const int on_device[8] = {1, 0, 1, 0}, on_host[8] = {1, 0, 3, 0};
  say("cuMemCreate", cuMemCreate(&p[4], 512 * kKiB, on_device, 0));
  say("cudaMallocHost", cudaMallocHost(&a[5], 1 * kKiB));
  say("cudaHostAlloc", cudaHostAlloc(&a[6], 2 * kKiB, 0));
  say("cuMemHostAlloc", cuMemHostAlloc(&a[7], 4 * kKiB, 0));
  say("cuMemAllocHost_v2", cuMemAllocHost_v2(&a[8], 8 * kKiB));
  say("cuMemCreate host", cuMemCreate(&p[5], 16 * kKiB, on_host, 0));
  // The small ones go again; 512, 256 and 128 KiB of device memory and 16 KiB of host memory stay.
  for (int i = 0; i < 4; ++i) say("cudaFree", cudaFree(a[i]));
  say("cudaFreeAsync", cudaFreeAsync(a[4], nullptr));
  say("cuMemFree_v2", cuMemFree_v2(p[0]));
  say("cuMemFreeAsync", cuMemFreeAsync(p[1], nullptr));
  say("cudaFreeHost", cudaFreeHost(a[5]));
  say("cudaFreeHost", cudaFreeHost(a[6]));
  say("cuMemFreeHost", cuMemFreeHost(a[7]));
  say("cuMemFreeHost", cuMemFreeHost(a[8]));
}

// Device memory on streams of its own, and pinned memory, which no trace of device memory holds.
void streams() {
  void* const one = reinterpret_cast<void*>(0x70);
  void* const two = reinterpret_cast<void*>(0x80);
  void* a[4] = {};
  Pointer p[2] = {};
  say("cudaMallocAsync", cudaMallocAsync(&a[0], 1 * kKiB, one));
  say("cudaMallocFromPoolAsync", cudaMallocFromPoolAsync(&a[1], 2 * kKiB, one, two));
  say("cuMemAllocAsync", cuMemAllocAsync(&p[0], 3 * kKiB, one));
  say("cudaMallocManaged", cudaMallocManaged(&a[2], 4 * kKiB, 1));
  say("cudaMallocHost", cudaMallocHost(&a[3], 5 * kKiB));
  say("cudaFreeAsync", cudaFreeAsync(a[0], two));
  say("cuMemFreeAsync", cuMemFreeAsync(p[0], two));
  say("cudaFree", cudaFree(a[2]));
  say("cudaFreeHost", cudaFreeHost(a[3]));
}

void failures() {
  void* out = reinterpret_cast<void*>(0x1234);
  Pointer handle = 7;
  errno = ENOTTY;
  say("too much", cudaMalloc(&out, kTooMuch));
  say("untouched", out == reinterpret_cast<void*>(0x1234));
  say("nowhere", cudaMalloc(nullptr, 1));
  say("driver nowhere", cuMemAlloc_v2(nullptr, 1));
  say("nothing", cuMemAllocHost_v2(&out, 0));
  say("never allocated", cudaFree(&out));
  say("null", cudaFree(nullptr));
  say("bad handle", cuMemRelease(0));
  say("no properties", cuMemCreate(&handle, 1, nullptr, 0));
  say("errno kept", errno == ENOTTY);
  say("real", cudaMalloc(&out, kKiB));
  say("wrong free", cudaFree(static_cast<char*>(out) + 1));  // and the block stays counted
}

void hidden_allocation() {
  void* out = nullptr;
  say("seen", cudaMalloc(&out, kKiB));
  say("cudaFree", cudaFree(out));
  say("hidden", loopback_hidden_alloc(&out, kKiB));
  say("cudaFree", cudaFree(out));
}

void by_name() {
  void* found = nullptr;
  int status = -1;
  void* context = nullptr;
  cuDevicePrimaryCtxRetain(&context, 0);
  cuCtxSetCurrent(context);
  say("cuMemAlloc", cuGetProcAddress_v2("cuMemAlloc", &found, 12000, 0, &status));
  Pointer address = 0;
  say("call", reinterpret_cast<int (*)(Pointer*, std::size_t)>(found)(&address, 3 * kKiB));
  say("cuMemFree", cuGetProcAddress("cuMemFree", &found, 12000, 0));
  say("call", reinterpret_cast<int (*)(Pointer)>(found)(address));
  say("old", cuGetProcAddress_v2("cuMemAlloc", &found, 2000, 0, &status));
  unsigned old_style = 0;
  say("call", reinterpret_cast<int (*)(unsigned*, unsigned)>(found)(&old_style, 77));
  say("argument", static_cast<int>(old_style));
  say("unknown", cuGetProcAddress_v2("cuNothing", &found, 12000, 0, &status));
  say("null", found == nullptr);
  say("status", status);
  say("bad", cuGetProcAddress(nullptr, &found, 12000, 0));
}

// The child allocates and frees after its parent has; each is counted for itself.
void forked() {
  void* before = nullptr;
  say("parent", cudaMalloc(&before, 4 * kKiB));
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    void* own = nullptr;
    int result = cudaMalloc(&own, 1 * kKiB);
    result += cudaFree(own);
    result += cudaMalloc(&own, 2 * kKiB);
    _exit(result);
  }
  int status = -1;
  waitpid(child, &status, 0);
  say("child", status);
  say("parent", cudaFree(before));
}

void many_threads() {
  std::vector<std::thread> threads;
  std::vector<int> failed(8);
  for (std::size_t t = 0; t < failed.size(); ++t) {
    threads.emplace_back([&failed, t] {
      for (int i = 0; i < 2000; ++i) {
        void* out = nullptr;
        failed[t] += cudaMalloc(&out, kKiB) != 0;
        failed[t] += cudaFree(out) != 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int all = 0;
  for (const int count : failed) all += count;
  say("failed", all);
}

// No CUDA call at all.
void idle() {
  namespace fs = std::filesystem;
  const auto count = [](const char* folder) {
    return static_cast<int>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
  };
  say("threads", count("/proc/self/task"));
  say("descriptors", count("/proc/self/fd"));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view scene = argc > 1 ? argv[1] : "";
  if (scene == "every-call") every_call();
  if (scene == "streams") streams();
  if (scene == "failures") failures();
  if (scene == "hidden") hidden_allocation();
  if (scene == "by-name") by_name();
  if (scene == "fork") forked();
  if (scene == "threads") many_threads();
  if (scene == "idle") idle();
  return 0;
}
