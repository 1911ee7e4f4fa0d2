#include "hooks/intercept/loaded_library.hpp"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>

#include <cstring>

namespace terrace::hooks {
namespace {

struct Search {
  const char* library;
  char path[PATH_MAX];
  bool found;
};

// The loader's lock is held here, so nothing is opened yet.
int note_library(dl_phdr_info* info, std::size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  if (info->dlpi_name == nullptr) return 0;
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* file = slash == nullptr ? info->dlpi_name : slash + 1;
  const std::size_t length = std::strlen(search->library);
  if (std::strncmp(file, search->library, length) != 0) return 0;
  if (file[length] != '\0' && file[length] != '.') return 0;  // libcuda.so.1, and not libcuda.sound
  if (std::strlen(info->dlpi_name) >= sizeof search->path) return 0;
  std::strcpy(search->path, info->dlpi_name);
  search->found = true;
  return 1;
}

// A library that is closed and loaded again elsewhere would leave a kept function dangling.
void keep_loaded(void* function) {
  Dl_info info{};
  if (dladdr(function, &info) != 0 && info.dli_fname != nullptr)
    (void)dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

}  // namespace

void* find_real_function(const char* library, const char* symbol) noexcept {
  void* function = dlsym(RTLD_NEXT, symbol);
  if (function == nullptr) {
    Search search{library, {}, false};
    dl_iterate_phdr(note_library, &search);
    if (search.found) {
      void* handle = dlopen(search.path, RTLD_LAZY | RTLD_NOLOAD);
      if (handle != nullptr) function = dlsym(handle, symbol);
    }
  }
  if (function != nullptr) keep_loaded(function);
  (void)dlerror();  // our failed looks are not the guest's
  return function;
}

}  // namespace terrace::hooks
