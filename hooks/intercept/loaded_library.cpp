#include "hooks/intercept/loaded_library.hpp"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>

#include <cstring>

#include "hooks/intercept/loader_functions.hpp"

namespace terrace::hooks {
namespace {

struct Search {
  const char* library;
  char path[PATH_MAX];
  bool found;
};

// "/x/libcuda.so.1" begins with libcuda.so; libcuda.sound does not.
bool file_begins_with(const char* path, const char* library) {
  const char* slash = std::strrchr(path, '/');
  const char* file = slash == nullptr ? path : slash + 1;
  const std::size_t length = std::strlen(library);
  return std::strncmp(file, library, length) == 0 && (file[length] == '\0' || file[length] == '.');
}

// The loader's lock is held here, so nothing is opened yet.
int note_library(dl_phdr_info* info, std::size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  if (info->dlpi_name == nullptr || !file_begins_with(info->dlpi_name, search->library)) return 0;
  if (std::strlen(info->dlpi_name) >= sizeof search->path) return 0;
  std::strcpy(search->path, info->dlpi_name);
  search->found = true;
  return 1;
}

}  // namespace

// A library that is closed and loaded again elsewhere would leave a kept function dangling.
void keep_loaded(const void* function) noexcept {
  Dl_info info{};
  if (dladdr(function, &info) != 0 && info.dli_fname != nullptr)
    (void)dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

void* find_next_function(const char* symbol) noexcept {
  void* function = loader_functions().dlsym(RTLD_NEXT, symbol);
  if (function == nullptr) (void)dlerror();  // our failed looks are not the guest's
  return function;
}

void* find_real_function(const char* library, const char* symbol) noexcept {
  void* function = find_next_function(symbol);
  if (function == nullptr) {
    Search search{library, {}, false};
    dl_iterate_phdr(note_library, &search);
    if (search.found) {
      void* handle = dlopen(search.path, RTLD_LAZY | RTLD_NOLOAD);
      if (handle != nullptr) function = loader_functions().dlsym(handle, symbol);
    }
    (void)dlerror();
  }
  if (function != nullptr) keep_loaded(function);
  return function;
}

bool is_loaded(const char* library) noexcept {
  Search search{library, {}, false};
  dl_iterate_phdr(note_library, &search);
  return search.found;
}

bool is_in_library(const void* function, const char* library) noexcept {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr &&
         file_begins_with(info.dli_fname, library);
}

}  // namespace terrace::hooks
