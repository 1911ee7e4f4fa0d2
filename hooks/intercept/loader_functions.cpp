#include "hooks/intercept/loader_functions.hpp"

#include <elf.h>
#include <link.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace terrace::hooks {
namespace {

// What a symbol is looked up by in one loaded object.
struct Tables {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const std::uint32_t* gnu_hash = nullptr;
};

Tables tables_of(const dl_phdr_info& info) {
  Tables tables;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    if (info.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      // The loader has added the base already, except in objects that are mapped read-only.
      const ElfW(Addr) value = entry->d_un.d_ptr;
      const ElfW(Addr) at = value < info.dlpi_addr ? value + info.dlpi_addr : value;
      if (entry->d_tag == DT_SYMTAB) tables.symbols = reinterpret_cast<const ElfW(Sym)*>(at);
      if (entry->d_tag == DT_STRTAB) tables.names = reinterpret_cast<const char*>(at);
      if (entry->d_tag == DT_GNU_HASH) tables.gnu_hash = reinterpret_cast<const std::uint32_t*>(at);
    }
  }
  return tables;
}

std::uint32_t gnu_hash_of(const char* name) {
  std::uint32_t hash = 5381;
  for (; *name != '\0'; ++name) hash = hash * 33 + static_cast<unsigned char>(*name);
  return hash;
}

// All versions of the two functions are the same function.
void* find_in(const Tables& tables, ElfW(Addr) base, const char* wanted) {
  const std::uint32_t* header = tables.gnu_hash;
  const std::uint32_t buckets = header[0], first = header[1], bloom_words = header[2];
  const std::uint32_t* bucket = header + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(std::uint32_t));
  const std::uint32_t* chain = bucket + buckets;
  const std::uint32_t hash = gnu_hash_of(wanted);
  std::uint32_t index = buckets == 0 ? 0 : bucket[hash % buckets];
  if (index < first) return nullptr;
  for (;; ++index) {
    const std::uint32_t here = chain[index - first];
    const ElfW(Sym)& symbol = tables.symbols[index];
    if ((here | 1) == (hash | 1) && symbol.st_shndx != SHN_UNDEF &&
        std::strcmp(tables.names + symbol.st_name, wanted) == 0)
      return reinterpret_cast<void*>(base + symbol.st_value);
    if ((here & 1) != 0) return nullptr;
  }
}

bool is_c_library(const char* path) {
  if (path == nullptr) return false;
  const char* slash = std::strrchr(path, '/');
  const char* file = slash == nullptr ? path : slash + 1;
  // Before glibc 2.34 the two were in a library of their own.
  return std::strcmp(file, "libc.so.6") == 0 || std::strcmp(file, "libdl.so.2") == 0;
}

int look_in(dl_phdr_info* info, std::size_t, void* data) {
  auto* found = static_cast<LoaderFunctions*>(data);
  if (!is_c_library(info->dlpi_name)) return 0;
  const Tables tables = tables_of(*info);
  if (tables.symbols == nullptr || tables.names == nullptr || tables.gnu_hash == nullptr) return 0;
  void* dlsym = find_in(tables, info->dlpi_addr, "dlsym");
  void* dlvsym = find_in(tables, info->dlpi_addr, "dlvsym");
  if (dlsym == nullptr || dlvsym == nullptr) return 0;
  found->dlsym = reinterpret_cast<decltype(found->dlsym)>(dlsym);
  found->dlvsym = reinterpret_cast<decltype(found->dlvsym)>(dlvsym);
  return 1;
}

constinit LoaderFunctions known;
constinit std::atomic<bool> is_known{false};

}  // namespace

const LoaderFunctions& loader_functions() noexcept {
  // Threads that come at the same time find, and write, the same.
  if (!is_known.load(std::memory_order_acquire)) {
    LoaderFunctions found;
    dl_iterate_phdr(look_in, &found);
    known = found;
    is_known.store(true, std::memory_order_release);
  }
  return known;
}

}  // namespace terrace::hooks
