// Somebody else's library in front of the C library, as a sanitizer's runtime is: until its constructor has
// asked for the real functions, a call of one leads nowhere.
#include <dlfcn.h>
#include <link.h>

#include <cstddef>

namespace {

using Visit = int (*)(dl_phdr_info*, std::size_t, void*);

char* (*real_strrchr)(const char*, int) = nullptr;
int (*real_strcmp)(const char*, const char*) = nullptr;
std::size_t (*real_strlen)(const char*) = nullptr;
int (*real_dl_iterate_phdr)(Visit, void*) = nullptr;

template <typename Function>
void find(Function& real, const char* name) {
  real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

__attribute__((constructor)) void begin() {
  (void)dlsym(RTLD_NEXT, "calloc");  // begins as names of CUDA do
  find(real_dl_iterate_phdr, "dl_iterate_phdr");
  find(real_strlen, "strlen");
  find(real_strcmp, "strcmp");
  find(real_strrchr, "strrchr");
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
char* strrchr(const char* text, int wanted) { return real_strrchr(text, wanted); }
int strcmp(const char* a, const char* b) { return real_strcmp(a, b); }
std::size_t strlen(const char* text) { return real_strlen(text); }
int dl_iterate_phdr(Visit visit, void* data) noexcept { return real_dl_iterate_phdr(visit, data); }
}
#pragma GCC visibility pop
