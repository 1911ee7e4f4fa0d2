// The books of the loopback devices. LOOPBACK_BOOKS says what is in them: the "own" process, only
// "strangers", a "namesake" with another's bytes, or the own with bytes "untold". Else the library has no
// books. "moving": the own, and what they list of it has partly gone when they are read.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <thread>
#include <utility>

namespace {
template <typename Function>
Function of_driver(const char* name) {
  return reinterpret_cast<Function>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), name));
}

struct Process {
  unsigned number;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};
constexpr unsigned long long kMiB = 1 << 20;

std::string_view books() {
  const char* text = std::getenv("LOOPBACK_BOOKS");
  return text == nullptr ? "none" : text;
}
// What the driver counts, without what it takes for other processes'.
unsigned long long used() {
  const auto ask = of_driver<std::size_t (*)(int)>("loopback_used");
  const char* others = std::getenv("LOOPBACK_OTHERS_MIB");
  return ask(0) - (others == nullptr ? 0 : std::strtoull(others, nullptr, 10) * kMiB);
}
bool in_another_thread(const auto& work) {
  const auto current = of_driver<int (*)(void**)>("cuCtxGetCurrent");
  const auto make_current = of_driver<int (*)(void*)>("cuCtxSetCurrent");
  void* context = nullptr;
  if (current(&context) != 0) return false;
  bool done = false;
  std::thread([&] { done = make_current(context) == 0 && work() == 0; }).join();
  return done;
}
unsigned long long held = 0;
int allocate(unsigned long long bytes) {
  return of_driver<int (*)(unsigned long long*, std::size_t)>("cuMemAlloc_v2")(&held, bytes);
}
int release() {
  const unsigned long long address = std::exchange(held, 0);
  return address == 0 ? 0 : of_driver<int (*)(unsigned long long)>("cuMemFree_v2")(address);
}
// Whoever starts the library waits for another thread that allocates, as under the loader's lock.
bool another_thread_allocates() {
  if (books() == "moving") return in_another_thread([] { return allocate(500 * kMiB); });
  return in_another_thread([] { return allocate(kMiB) != 0 || release() != 0; });
}
}  // namespace

extern "C" {
#define API __attribute__((visibility("default"))) int
API nvmlInit_v2() { return books() != "none" && another_thread_allocates() ? 0 : 9; }
API nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  static int one;
  return *device = &one, 0;
}
API nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, Process* processes) {
  const auto own = static_cast<unsigned>(getpid());
  processes[0] = {own + 1, 2000 * kMiB, ~0U, ~0U};
  processes[1] = {own, used(), ~0U, ~0U};
  if (books() == "moving") (void)in_another_thread(release);
  if (books() == "untold") processes[1].bytes = ~0ULL;
  if (books() == "namesake") processes[1].bytes = 0;
  return *count = books() == "strangers" ? 1 : 2, 0;
}
#undef API
}
