// `local_guest PLUGIN`: a program without CUDA that loads a plugin with it, as an interpreter does. Without
// PLUGIN it asks the preload library itself, in a process where no runtime is loaded.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>

int main(int argc, char** argv) {
  if (argc < 2) {
    using Malloc = int (*)(void**, std::size_t);
    const auto allocate = reinterpret_cast<Malloc>(dlsym(RTLD_DEFAULT, "cudaMalloc"));
    void* out = nullptr;
    std::printf("without a runtime %d\n", allocate == nullptr ? -1 : allocate(&out, 16));
    return 0;
  }
  void* plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) return 2;
  const auto allocate = reinterpret_cast<int (*)(std::size_t)>(dlsym(plugin, "plugin_allocate"));
  if (allocate == nullptr) return 3;
  std::printf("plugin %d\n", allocate(5 * 1024));
  return 0;
}
