// Scenes of a process with PyTorch, which asks again for what HBM has no room for. The budget is 96 MiB, 64
// of which the context takes.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/hooks/guests/memory_scenes.hpp"

namespace terrace::guest {
namespace {

constexpr std::size_t kLarge = 20 * kMiB, kWords = kLarge / 8;

Pointer number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

template <typename Function>
Function* of_preload(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}
long long alive() {
  const auto overflow = of_preload<std::uint64_t(int)>("terrace_wall_overflow");
  return overflow == nullptr ? -1 : static_cast<long long>(overflow(0) / kMiB);
}
long long return_unused() {
  const auto back = of_preload<std::uint64_t(int)>("terrace_wall_return_unused");
  return back == nullptr ? -1 : static_cast<long long>(back(0) / kMiB);
}
long long host_mib() { return static_cast<long long>(loopback_host_bytes() / kMiB); }

// HBM has 4 MiB left.
void* begin() {
  void* kept = nullptr;
  cudaSetDevice(0);
  say("torch", dlopen("libc10_cuda.so", RTLD_NOW | RTLD_LOCAL) != nullptr);
  say("kept", cudaMalloc(&kept, 28 * kMiB));
  return kept;
}
// As PyTorch's allocator does.
int ask_twice(void** out, std::size_t bytes) {
  const int first = cudaMalloc(out, bytes);
  cudaGetLastError();
  return first == 0 ? 0 : cudaMalloc(out, bytes);
}

std::atomic<bool> slow_done{false};
// out[i] = out[i] * 3 + 1 at every 251st word, slowly.
void slow(void** parameters) {
  auto* const out = *static_cast<std::uint64_t**>(parameters[0]);
  for (std::size_t i = 0; i < kWords; i += 251) out[i] = out[i] * 3 + 1;
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  out[0] = 7;
  slow_done = true;
}
int launch_slow(void* stream, void* out) {
  static const std::size_t kSizes[1] = {8};
  static void* const kernel = loopback_kernel("slow", slow, kSizes, 1, 1);
  slow_done = false;
  void* parameters[1] = {&out};
  return cudaLaunchKernel(kernel, {1, 1, 1}, {1, 1, 1}, parameters, 0, stream);
}
// Words that are wrong after a kernel has been over them.
int wrong_after_kernel(void* out) {
  std::vector<std::uint64_t> words(kWords);
  for (std::size_t i = 0; i < kWords; ++i) words[i] = i * 11;
  void* stream = nullptr;
  int wrong = cuStreamCreate(&stream, 0) != 0;
  wrong += cuMemcpyHtoD_v2(number(out), words.data(), kLarge) != 0;
  wrong += launch_slow(stream, out) != 0;
  wrong += cuStreamSynchronize(stream) != 0;
  wrong += cuMemcpyDtoH_v2(words.data(), number(out), kLarge) != 0;
  for (std::size_t i = 1; i < kWords; ++i) wrong += words[i] != (i % 251 == 0 ? i * 33 + 1 : i * 11) ? 1 : 0;
  return wrong + (words[0] != 7 ? 1 : 0);
}

void second_refusal() {
  void* kept = begin();
  void* out = nullptr;
  std::size_t available = 0, total = 0;
  say("first", cudaMalloc(&out, kLarge));
  say("last error", cudaGetLastError());
  say("second", cudaMalloc(&out, kLarge));
  say("no error", cudaGetLastError());
  say("in hbm", loopback_in_hbm(number(out)));
  say("access", loopback_access(number(out)));
  unsigned type = 0;
  say("attribute", cuPointerGetAttribute(&type, 2, number(out) + 4096));
  say("type", type);
  say("wrong", wrong_after_kernel(out));
  say("alive", alive());
  say("info", cudaMemGetInfo(&available, &total));
  say("available MiB", static_cast<long long>(available / kMiB));
  say("total MiB", static_cast<long long>(total / kMiB));
  say("inside", cudaFree(static_cast<char*>(out) + 512));
  launch_slow(nullptr, out);
  say("free", cudaFree(out));
  say("waited", slow_done);
  say("twice", cudaFree(out));
  say("alive", alive());
  say("again", ask_twice(&out, kLarge));
  say("host MiB", host_mib());
  say("free again", cudaFree(out));
  // Of more than one handle.
  Pointer base = 0;
  std::size_t bytes = 0;
  say("large", ask_twice(&out, 70 * kMiB));
  say("range", cuMemGetAddressRange_v2(&base, &bytes, number(out) + 66 * kMiB));
  say("of it", base == number(out) && bytes == 70 * kMiB);
  say("free large", cudaFree(out));
  say("free kept", cudaFree(kept));
  say("room", cudaMalloc(&kept, 28 * kMiB));
  say("returned", return_unused() >= 20);
  say("host MiB", host_mib());
}

void a_library_asks_once() {
  (void)begin();
  void* const blas = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
  auto* const workspace = reinterpret_cast<int (*)(Pointer*, std::size_t)>(
      blas == nullptr ? nullptr : dlsym(blas, "loopback_workspace"));
  Pointer out = 0;
  say("workspace", workspace == nullptr ? -1 : workspace(&out, kLarge));
  say("in hbm", loopback_in_hbm(out));
  say("free", cuMemFree_v2(out));
}

void which_refusal() {
  (void)begin();
  void* out = nullptr;
  const auto ask = [&](std::size_t mib) { say("ask", cudaMalloc(&out, mib * kMiB)); };
  ask(20), ask(24), ask(20);  // never the same twice
  ask(1), ask(20), ask(20);   // a success between, then the second
  ask(20);                    // the first again
  std::thread([&] { say("thread", (cudaSetDevice(0), cudaMalloc(&out, 20 * kMiB))); }).join();
  ask(20);
  const auto refusals = of_preload<std::uint64_t(int)>("terrace_wall_refusals");
  say("refusals", refusals == nullptr ? -1 : static_cast<long long>(refusals(0)));
}

// As PyTorch's expandable segments: handles first, and mapped when all of them are there.
void physical() {
  cudaSetDevice(0);
  dlopen("libc10_cuda.so", RTLD_NOW | RTLD_LOCAL);
  const int on_device[8] = {1, 1, 1, 0};
  constexpr std::size_t kHandles = 20, kEach = 2 * kMiB;
  std::vector<Pointer> handles;
  const auto create_all = [&] {
    while (handles.size() < kHandles) {
      Pointer handle = 0;
      if (const int result = cuMemCreate(&handle, kEach, on_device, 0); result != 0) return result;
      handles.push_back(handle);
    }
    return 0;
  };
  say("first", create_all());
  say("fit", static_cast<long long>(handles.size()));
  for (const Pointer handle : handles) cuMemRelease(handle);
  handles.clear();
  say("second", create_all());
  Pointer range = 0;
  say("reserve", cuMemAddressReserve(&range, kHandles * kEach, 0, 0, 0));
  for (std::size_t i = 0; i < handles.size(); ++i) cuMemMap(range + i * kEach, kEach, 0, handles[i], 0);
  const Access who{1, 0, 3};
  say("access", cuMemSetAccess(range, kHandles * kEach, &who, 1));
  say("wrong", wrong_after_kernel(reinterpret_cast<void*>(range + (kHandles * kEach - kLarge))));
  int asked_for[8] = {};
  say("describe", cuMemGetAllocationPropertiesFromHandle(asked_for, handles.back()));
  say("location", asked_for[2]);
  unsigned type = 0;
  cuPointerGetAttribute(&type, 2, range + kHandles * kEach - 8);
  say("type", type);
  say("alive", alive());
  Pointer more = 0;
  say("next", cuMemCreate(&more, kEach, on_device, 0));
  for (const Pointer handle : handles) cuMemRelease(handle);
  say("alive", alive());
  say("unmap", cuMemUnmap(range, kHandles * kEach));
  say("alive", alive());
  say("host MiB", host_mib());
  // The same again, with handles that were kept; one of them is shown to another process.
  handles.clear();
  (void)create_all();
  for (const Pointer handle : handles) cuMemRelease(handle);
  handles.clear();
  say("again", create_all());
  say("host MiB", host_mib());
  int file = -1;
  say("export", cuMemExportToShareableHandle(&file, handles.back(), 1, 0));
  for (const Pointer handle : handles) cuMemRelease(handle);
  say("alive", alive());
  say("host MiB", host_mib());
  (void)return_unused();
  say("host MiB", host_mib());
  say("room", cuMemCreate(&more, 32 * kMiB, on_device, 0));
}

void ddr_full() {
  (void)begin();
  void* out = nullptr;
  say("too large", ask_twice(&out, kLarge));
  say("fits", ask_twice(&out, 8 * kMiB));
  say("no more", ask_twice(&out, 12 * kMiB));
  say("free", cudaFree(out));
  say("fits again", ask_twice(&out, 12 * kMiB));
}

void in_order() {
  (void)begin();
  void *out = nullptr, *stream = nullptr;
  cuStreamCreate(&stream, 0);
  say("malloc", cudaMallocAsync(&out, kLarge, stream));
  say("in hbm", loopback_in_hbm(number(out)));
  launch_slow(stream, out);
  say("free", cudaFreeAsync(out, stream));
  say("waited", slow_done);
  say("alive", alive());
}

void captured() {
  (void)begin();
  void *out = nullptr, *more = nullptr, *stream = nullptr, *graph = nullptr;
  cuStreamCreate(&stream, 0);
  say("malloc", ask_twice(&out, kLarge));
  say("begin", cuStreamBeginCapture_v2(stream, 2));
  say("more", ask_twice(&more, 8 * kMiB));
  say("free", cudaFree(out));
  say("alive", alive());
  say("end", cuStreamEndCapture(stream, &graph));
  say("alive", alive());
  say("more", ask_twice(&more, 8 * kMiB));
  say("alive", alive());
}

void peers() {
  void* contexts[2] = {};
  cudaSetDevice(1);
  for (int device = 0; device < 2; ++device) cuDevicePrimaryCtxRetain(&contexts[device], device);
  (void)begin();
  void *before = nullptr, *after = nullptr;
  say("before", ask_twice(&before, kLarge));
  cudaSetDevice(1);
  say("enable", cuCtxEnablePeerAccess(contexts[0], 0));
  cudaSetDevice(0);
  say("after", ask_twice(&after, 8 * kMiB));
  say("access", loopback_access(number(before)));
  say("access", loopback_access(number(after)));
}

void forked() {
  (void)begin();
  void* out = nullptr;
  say("malloc", ask_twice(&out, kLarge));
  const pid_t child = fork();
  if (child == 0) {
    if (alive() != 0 || return_unused() != 0) _exit(1);
    // All of the policy's DDR is its own.
    void* own = nullptr;
    (void)cudaMalloc(&own, 28 * kMiB);
    _exit(ask_twice(&own, kLarge) == 0 && alive() == 20 ? 0 : 2);
  }
  int status = -1;
  waitpid(child, &status, 0);
  say("child", status);
  say("alive", alive());
  say("free", cudaFree(out));
}

void reset() {
  (void)begin();
  void* out = nullptr;
  say("malloc", ask_twice(&out, kLarge));
  say("reset", cuDevicePrimaryCtxReset_v2(0));
  say("alive", alive());
  cudaSetDevice(0);
  say("room", cudaMalloc(&out, 28 * kMiB));
  say("full", ask_twice(&out, kLarge));
}

// Whoever leases for the process has 24 MiB to lend, for what was leased before him too.
std::uint64_t lent = 0, taken_back = 0;
void lender() {
  const auto set =
      of_preload<void(int, void*, std::uint64_t (*)(void*, std::uint64_t), void (*)(void*, std::uint64_t))>(
          "terrace_wall_set_lender");
  say("found", set != nullptr);
  if (set == nullptr) return;
  (void)begin();
  void* before = nullptr;
  say("before", ask_twice(&before, 16 * kMiB));
  set(
      0, &lent,
      [](void* self, std::uint64_t bytes) {
        auto& so_far = *static_cast<std::uint64_t*>(self);
        const std::uint64_t given = bytes < 24 * kMiB - so_far ? bytes : 24 * kMiB - so_far;
        so_far += given;
        return given;
      },
      [](void* self, std::uint64_t bytes) {
        *static_cast<std::uint64_t*>(self) -= bytes;
        taken_back += bytes;
      });
  void* out = nullptr;
  say("lent", static_cast<long long>(lent / kMiB));
  say("beside it", ask_twice(&out, kLarge));
  say("free", cudaFree(before));
  say("fits", ask_twice(&out, kLarge));
  void* more = nullptr;
  say("too much", ask_twice(&more, 8 * kMiB));
  say("free", cudaFree(out));
  say("returned", return_unused());
  say("lent", static_cast<long long>(lent / kMiB));
  say("again", ask_twice(&before, 10 * kMiB));
  set(0, nullptr, nullptr, nullptr);
  say("taken back MiB", static_cast<long long>(taken_back / kMiB));
  say("of the policy", ask_twice(&out, 60 * kMiB));
  say("too much of it", ask_twice(&more, 32 * kMiB));
}

// The policy's DDR is for all devices together.
void two_devices() {
  (void)begin();
  void *kept = nullptr, *out = nullptr, *other = nullptr;
  say("first", ask_twice(&out, kLarge));
  cudaSetDevice(1);
  say("kept on the other", cudaMalloc(&kept, 28 * kMiB));
  say("too much", ask_twice(&other, 16 * kMiB));
  say("what is left", ask_twice(&other, 8 * kMiB));
  cudaSetDevice(0);
  say("free", cudaFree(out));
  cudaSetDevice(1);
  say("what is unused there", ask_twice(&other, 16 * kMiB));
  say("host MiB", host_mib());
}

// Threads that fill DDR to its end, plainly and by handles: nobody gets another's bytes, and all of it comes
// back.
void threads() {
  (void)begin();
  std::atomic<int> wrong{0}, served{0}, odd{0}, refused{0};
  std::atomic<bool> over{false};
  std::thread giving_back([&] {
    while (!over) (void)return_unused();
  });
  std::vector<std::thread> all;
  for (std::uint64_t id = 1; id <= 4; ++id) {
    all.emplace_back([&, id] {
      cudaSetDevice(0);
      const int on_device[8] = {1, 0, 1, 0};
      for (int times = 0; times < 40; ++times) {
        const std::size_t bytes = (5 + (id + static_cast<std::size_t>(times)) % 4) * 2 * kMiB;
        void* out = nullptr;
        const int result = ask_twice(&out, bytes);
        odd += result != 0 && result != 2;
        refused += result == 2;
        if (result == 0) {
          const std::uint64_t own = id << 32 | static_cast<std::uint64_t>(times);
          auto* const words = static_cast<std::uint64_t*>(out);
          words[0] = words[bytes / 8 - 1] = own;
          std::this_thread::yield();
          wrong += words[0] != own || words[bytes / 8 - 1] != own;
          served += 1;
          odd += cudaFree(out) != 0;
        }
        Pointer handle = 0;
        if (cuMemCreate(&handle, bytes, on_device, 0) == 0 || cuMemCreate(&handle, bytes, on_device, 0) == 0)
          odd += cuMemRelease(handle) != 0;
        else
          refused += 1;
      }
    });
  }
  for (std::thread& each : all) each.join();
  over = true;
  giving_back.join();
  say("odd", odd);
  say("wrong", wrong);
  say("served", served > 40);
  say("refused", refused);
  say("alive", alive());
  (void)return_unused();
  say("host MiB", host_mib());
}

// Everything once, so that each driver call can fail in turn: what was given has the right bytes, what was
// not is the ordinary error.
void faults() {
  constexpr std::size_t kSmall = 6 * kMiB;
  void* kept = begin();
  int odd = 0, wrong = 0;
  for (int round = 0; round < 2; ++round) {
    void* out = nullptr;
    const int result = ask_twice(&out, kSmall);
    odd += result != 0 && result != 2;
    if (result != 0) continue;
    std::vector<std::uint64_t> words(kSmall / 8, 5), seen(kSmall / 8);
    int tries = 0;
    while (cuMemcpyHtoD_v2(number(out), words.data(), kSmall) != 0 && ++tries < 3) {
    }
    while (cuMemcpyDtoH_v2(seen.data(), number(out), kSmall) != 0 && ++tries < 3) {
    }
    wrong += seen != words;
    if (cudaFree(out) != 0) cudaFree(out);
  }
  const int on_device[8] = {1, 0, 1, 0};
  Pointer handle = 0;
  int result = cuMemCreate(&handle, 8 * kMiB, on_device, 0);
  if (result != 0) result = cuMemCreate(&handle, 8 * kMiB, on_device, 0);
  odd += result != 0 && result != 2;
  if (result == 0 && cuMemRelease(handle) != 0) cuMemRelease(handle);
  if (cudaFree(kept) != 0) cudaFree(kept);
  say("odd", odd);
  say("wrong", wrong);
  say("alive", alive());
  (void)return_unused();
  say("host MiB", host_mib());
  say("used MiB", static_cast<long long>(loopback_used(0) / kMiB));
  say("calls", loopback_calls());
}

}  // namespace

const std::map<std::string_view, std::function<void()>>& overflow_scenes() {
  static const std::map<std::string_view, std::function<void()>> scenes = {
      {"overflow", second_refusal},
      {"overflow-which", which_refusal},
      {"overflow-library", a_library_asks_once},
      {"overflow-physical", physical},
      {"overflow-ddr-full", ddr_full},
      {"overflow-in-order", in_order},
      {"overflow-captured", captured},
      {"overflow-peers", peers},
      {"overflow-forked", forked},
      {"overflow-reset", reset},
      {"overflow-lender", lender},
      {"overflow-devices", two_devices},
      {"overflow-faults", faults},
      {"overflow-threads", threads},
  };
  return scenes;
}

}  // namespace terrace::guest
