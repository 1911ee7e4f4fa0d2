// A program that allocates in every way there is: `memory_guest SCENE` prints what it was told, a line a
// fact. Built with each loopback runtime, linked dynamically and statically.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/hooks/guests/memory_scenes.hpp"

namespace terrace::guest {

void say(const char* what, long long value) { std::printf("%s %lld\n", what, value); }

namespace {

constexpr std::size_t kTooMuch = 2 * kGiB;

// How many blocks of a size the device gives before it says no.
template <typename Allocate>
int fill(Allocate allocate) {
  int given = 0;
  while (given < 1000 && allocate() == 0) ++given;
  return given;
}

// The budget is 1 GiB in what follows; the loopback context has 64 MiB of it.
void wall() {
  void* kept[8] = {};
  say("blocks", fill([&, i = 0]() mutable { return cudaMalloc(&kept[i++ % 8], 128 * kMiB); }));
  say("last error", cudaGetLastError());
  say("no error", cudaGetLastError());
  say("small", cudaMalloc(&kept[7], 64 * kMiB));
  say("too much", cudaMalloc(&kept[7], 128 * kMiB));
  say("free", cudaFree(kept[0]));
  say("again", cudaMalloc(&kept[0], 128 * kMiB));
  say("no more", cudaMalloc(&kept[7], 128 * kMiB));
  cudaGetLastError();
}

void every_way() {
  const int on_device[8] = {1, 0, 1, 0};
  cudaSetDevice(0);
  void* kept = nullptr;
  say("base", cudaMalloc(&kept, 800 * kMiB));
  Pointer out = 0;
  void* place = nullptr;
  std::size_t pitch = 0;
  const std::size_t more = 300 * kMiB;
  say("cuMemAlloc", cuMemAlloc_v2(&out, more));
  say("managed", cuMemAllocManaged(&out, more, 1));
  say("pitch", cuMemAllocPitch_v2(&out, &pitch, 1000, more / 1024, 4));
  say("async", cuMemAllocAsync(&out, more, nullptr));
  say("from pool", cuMemAllocFromPoolAsync(&out, more, loopback_other_pool(), nullptr));
  say("create", cuMemCreate(&out, more, on_device, 0));
  const Array what{more / 1024 / 4, 1024, 0x20, 1};
  say("array", cuArrayCreate_v2(&place, &what));
  say("host", cuMemHostAlloc(&place, more, 0));
  // Another process's memory is charged there.
  IpcHandle handle{};
  say("export", cuIpcGetMemHandle(&handle, reinterpret_cast<Pointer>(kept)));
  say("import", cuIpcOpenMemHandle_v2(&out, handle, 1));
  say("close", cuIpcCloseMemHandle(out));
  say("import handle", cuMemImportFromShareableHandle(&out, nullptr, 1));
  say("release", cuMemRelease(out));
  const Array small{1024, 1024, 0x20, 1};
  say("small array", cuArrayCreate_v2(&place, &small));
  say("destroy", cuArrayDestroy(place));
  say("more than there is", cuMemAlloc_v2(&out, std::size_t{1} << 40));
}

// Physical memory lives as long as a handle or a mapping holds it.
void physical() {
  const int on_device[8] = {1, 0, 1, 0};
  cudaSetDevice(0);
  Pointer range = 0, handle = 0, again = 0, other = 0;
  say("reserve", cuMemAddressReserve(&range, kGiB, 0, 0, 0));
  say("create", cuMemCreate(&handle, 512 * kMiB, on_device, 0));
  say("map", cuMemMap(range, 512 * kMiB, 0, handle, 0));
  say("release", cuMemRelease(handle));
  say("still held", cuMemCreate(&other, 512 * kMiB, on_device, 0));
  say("retain", cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(range + 1)));
  say("unmap", cuMemUnmap(range, 512 * kMiB));
  say("held again", cuMemCreate(&other, 512 * kMiB, on_device, 0));
  say("release", cuMemRelease(again));
  say("free now", cuMemCreate(&other, 512 * kMiB, on_device, 0));
  say("release", cuMemRelease(other));
}

void memory_info() {
  std::size_t available = 0, total = 0;
  void* kept = nullptr;
  say("malloc", cudaMalloc(&kept, 256 * kMiB));
  say("info", cudaMemGetInfo(&available, &total));
  say("available MiB", static_cast<long long>(available / kMiB));
  say("total MiB", static_cast<long long>(total / kMiB));
}

void two_devices() {
  void* kept = nullptr;
  cudaSetDevice(0);
  say("first", cudaMalloc(&kept, 700 * kMiB));
  cudaSetDevice(1);
  say("second", cudaMalloc(&kept, 700 * kMiB));
  say("second full", cudaMalloc(&kept, 700 * kMiB));
  // A thread without a context gets one from the runtime, on its first device.
  std::thread([] {
    void* own = nullptr;
    say("thread full", cudaMalloc(&own, 700 * kMiB));
    say("thread", cudaMalloc(&own, 100 * kMiB));
  }).join();
  say("reset", cuDevicePrimaryCtxReset_v2(1));
  say("after", cudaMalloc(&kept, 700 * kMiB));
}

void threads_at_the_wall() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 500; ++i) {
        void* out = nullptr;
        if (cudaMalloc(&out, 150 * kMiB) == 0) {
          if (loopback_used(0) > kGiB) std::printf("over the wall\n");
          cudaFree(out);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  say("left", static_cast<long long>(loopback_used(0) / kMiB));
}

// The child has an account of its own, or none: nothing of its parent's.
void forked() {
  void* kept = nullptr;
  say("parent", cudaMalloc(&kept, 700 * kMiB));
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    void* own = nullptr;
    const int code = cudaMalloc(&own, 200 * kMiB) + cudaFree(own) + cudaFree(kept);
    _exit(code);
  }
  int status = -1;
  waitpid(child, &status, 0);
  say("child", status);
  say("parent full", cudaMalloc(&kept, 700 * kMiB));
}

struct FreesLate {
  void* memory = nullptr;
  ~FreesLate() {
    if (memory != nullptr) std::fprintf(stderr, "late %d\n", cudaFree(memory));
  }
};
FreesLate early;  // destroyed after what main makes

void ends(std::string_view how) {
  static FreesLate late;
  cudaMallocAsync(&early.memory, kMiB, nullptr);
  cudaMallocAsync(&late.memory, kMiB, nullptr);
  say("begun", early.memory != nullptr && late.memory != nullptr);
  std::fflush(stdout);
  if (how == "exit") std::exit(7);
  if (how == "_exit") _exit(7);
  if (how == "term") std::raise(SIGTERM);
  if (how == "abort") throw std::string("nobody catches this");
  if (how == "thread") {
    std::thread([] {
      void* own = nullptr;
      cudaMallocAsync(&own, kMiB, nullptr);
      std::exit(7);
    }).join();
  }
  if (how == "exec") execl("/bin/true", "true", nullptr);
}

}  // namespace

const std::map<std::string_view, std::function<void()>>& memory_scenes() {
  static const std::map<std::string_view, std::function<void()>> scenes = {
      {"wall", wall},
      {"every-way", every_way},
      {"physical", physical},
      {"memory-info", memory_info},
      {"two-devices", two_devices},
      {"threads-at-the-wall", threads_at_the_wall},
      {"fork", forked},
      {"exit", [] { ends("exit"); }},
      {"_exit", [] { ends("_exit"); }},
      {"term", [] { ends("term"); }},
      {"abort", [] { ends("abort"); }},
      {"thread", [] { ends("thread"); }},
      {"exec", [] { ends("exec"); }},
      {"aside",
       [] {
         void* out = nullptr;
         say("malloc", cudaMalloc(&out, 700 * kMiB));
         const auto aside = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "terrace_stand_aside"));
         say("found", aside != nullptr);
         if (aside != nullptr) aside();
         say("malloc", cudaMalloc(&out, 700 * kMiB));
         say("free", cudaFree(out));
       }},
      {"led",
       [] {
         void* out = nullptr;
         say("malloc", cudaMalloc(&out, 300 * kMiB));
         const auto used = reinterpret_cast<std::uint64_t (*)(int)>(dlsym(RTLD_DEFAULT, "terrace_wall_used"));
         const auto limit =
             reinterpret_cast<void (*)(int, std::uint64_t)>(dlsym(RTLD_DEFAULT, "terrace_wall_set_limit"));
         say("found", used != nullptr && limit != nullptr);
         if (used == nullptr || limit == nullptr) return;
         say("used", static_cast<long long>(used(0) >> 20));
         for (const std::size_t mib : {600, 520, 2, 900}) {  // 2: less than is charged, and all of that stays
           limit(0, mib * kMiB);
           say("malloc", cudaMalloc(&out, 150 * kMiB));
         }
         say("free", cudaFree(out));
         say("used", static_cast<long long>(used(0) >> 20));
       }},
      {"too-much-at-once",
       [] {
         void* out = nullptr;
         say("refused", cudaMalloc(&out, kTooMuch));
         say("refused", cudaMalloc(&out, kTooMuch));
       }},
  };
  return scenes;
}

}  // namespace terrace::guest

int main(int argc, char** argv) {
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  using namespace terrace::guest;
  for (const auto* scenes :
       {&memory_scenes(), &overflow_scenes(), &pool_scenes(), &stable_scenes(), &driver_scenes()}) {
    const auto scene = scenes->find(wanted);
    if (scene != scenes->end()) return scene->second(), 0;
  }
  return 64;
}
