// Asks the loader and the driver for functions: `lookup_guest SCENE` says, for each answer, whose it is and
// by which name, as the loader knows it.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

namespace {

using Pointer = unsigned long long;

void say(const char* what, const void* function) {
  Dl_info info{};
  if (function == nullptr || dladdr(function, &info) == 0) {
    std::printf("%s: none\n", what);
    return;
  }
  const char* slash = std::strrchr(info.dli_fname, '/');
  std::printf("%s: %s %s\n", what, slash == nullptr ? info.dli_fname : slash + 1,
              info.dli_sname == nullptr ? "?" : info.dli_sname);
}

void* open(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) std::printf("cannot open %s: %s\n", library, dlerror());
  return handle;
}

void handles() {
  void* driver = open("libcuda.so.1");
  say("in the table", dlsym(driver, "cuMemAlloc_v2"));
  say("not in the table", dlsym(driver, "cuCtxGetCurrent"));
  say("of another library", dlsym(driver, "cudaMalloc"));
  const char* why = dlerror();
  std::printf("why: %d\n", why != nullptr && std::strstr(why, "cudaMalloc") != nullptr);
  std::printf("no more: %d\n", dlerror() == nullptr);
  say("loaded locally", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
  say("from the program", dlsym(dlopen(nullptr, RTLD_NOW), "cuMemAlloc_v2"));
  dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  say("loaded globally", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
  say("from the program", dlsym(dlopen(nullptr, RTLD_NOW), "cuMemAlloc_v2"));
  say("next", dlsym(RTLD_NEXT, "write"));
  say("next that is ours", dlsym(RTLD_NEXT, "nothing_has_this_name"));
  void* runtime = open("libcudart.so.13");
  say("versioned", dlvsym(runtime, "cudaMalloc", "libcudart.so.13"));
  say("another version", dlvsym(runtime, "cudaMalloc", "libcudart.so.12"));
  say("versioned default", dlvsym(RTLD_DEFAULT, "memcpy", "GLIBC_2.14"));
}

// Two runtimes in one process, each with its own functions.
void two_runtimes() {
  for (const char* library : {"libcudart.so.12", "libcudart.so.13"}) {
    void* runtime = open(library);
    const auto version = reinterpret_cast<int (*)()>(dlsym(runtime, "loopback_runtime_version"));
    const auto allocate = reinterpret_cast<int (*)(void**, std::size_t)>(dlsym(runtime, "cudaMalloc"));
    void* out = nullptr;
    const int first = allocate(&out, std::size_t{600} << 20);
    std::printf("%d: %d %d\n", version(), first, allocate(&out, std::size_t{600} << 20));
  }
}

void versions() {
  void* driver = open("libcuda.so.1");
  using Ask = int (*)(const char*, void**, int, unsigned long long, int*);
  const auto ask = reinterpret_cast<Ask>(dlsym(driver, "cuGetProcAddress_v2"));
  const struct {
    const char* name;
    int version;
    unsigned long long flags;
  } kQueries[] = {
      {"cuMemAlloc", 12000, 0},      {"cuMemAlloc", 2000, 0},        {"cuMemAllocAsync", 12000, 0},
      {"cuMemAllocAsync", 12000, 1}, {"cuMemAllocAsync", 12000, 2},  {"cuMemAllocAsync", 11000, 0},
      {"cuMemAlloc", 12000, 2},      {"cuLaunchKernel", 13000, 2},   {"cuCtxGetDevice", 12000, 0},
      {"cuCtxGetDevice", 13000, 0},  {"cuGetProcAddress", 11030, 0}, {"cuGetProcAddress", 12000, 0},
      {"cuNothing", 12000, 0}};
  for (const auto& query : kQueries) {
    void* found = nullptr;
    int status = -1;
    const int result = ask(query.name, &found, query.version, query.flags, &status);
    const std::string what = std::string(query.name) + " " + std::to_string(query.version) + " " +
                             std::to_string(query.flags) + " " + std::to_string(result) + " " +
                             std::to_string(status);
    say(what.c_str(), found);
  }
  void* runtime = open("libcudart.so.13");
  using Entry = int (*)(const char*, void**, unsigned, unsigned long long, int*);
  const auto entry = reinterpret_cast<Entry>(dlsym(runtime, "cudaGetDriverEntryPointByVersion"));
  void* found = nullptr;
  int status = -1;
  entry("cuMemFreeAsync", &found, 12000, 2, &status);
  say("entry point", found);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view scene = argc > 1 ? argv[1] : "";
  if (scene == "handles") handles();
  if (scene == "two-runtimes") two_runtimes();
  if (scene == "versions") versions();
  return 0;
}
