#include "hooks/intercept/loader_functions.hpp"

#include <elf.h>
#include <link.h>

#include <atomic>
#include <cstdint>

#include "hooks/intercept/plain_text.hpp"

namespace terrace::hooks {
namespace {

// What a symbol is looked up by in one loaded object.
struct Tables {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const std::uint32_t* gnu_hash = nullptr;
};

Tables tables_of(const link_map& library) {
  Tables tables;
  for (const ElfW(Dyn)* entry = library.l_ld; entry->d_tag != DT_NULL; ++entry) {
    // The loader has added the base already, except in objects that are mapped read-only.
    const ElfW(Addr) value = entry->d_un.d_ptr;
    const ElfW(Addr) at = value < library.l_addr ? value + library.l_addr : value;
    if (entry->d_tag == DT_SYMTAB) tables.symbols = reinterpret_cast<const ElfW(Sym)*>(at);
    if (entry->d_tag == DT_STRTAB) tables.names = reinterpret_cast<const char*>(at);
    if (entry->d_tag == DT_GNU_HASH) tables.gnu_hash = reinterpret_cast<const std::uint32_t*>(at);
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
        same_text(tables.names + symbol.st_name, wanted))
      return reinterpret_cast<void*>(base + symbol.st_value);
    if ((here & 1) != 0) return nullptr;
  }
}

bool is_c_library(const char* path) {
  if (path == nullptr) return false;
  const char* file = file_name_of(path);
  // Before glibc 2.34 the two were in a library of their own.
  return same_text(file, "libc.so.6") || same_text(file, "libdl.so.2");
}

bool look_in(const link_map& library, LoaderFunctions* found) {
  if (!is_c_library(library.l_name)) return false;
  const Tables tables = tables_of(library);
  if (tables.symbols == nullptr || tables.names == nullptr || tables.gnu_hash == nullptr) return false;
  void* dlsym = find_in(tables, library.l_addr, "dlsym");
  void* dlvsym = find_in(tables, library.l_addr, "dlvsym");
  if (dlsym == nullptr || dlvsym == nullptr) return false;
  found->dlsym = reinterpret_cast<decltype(found->dlsym)>(dlsym);
  found->dlvsym = reinterpret_cast<decltype(found->dlvsym)>(dlvsym);
  return true;
}

constinit LoaderFunctions known;
constinit std::atomic<bool> is_known{false};

}  // namespace

const LoaderFunctions& loader_functions() noexcept {
  // Threads that come at the same time find, and write, the same.
  if (!is_known.load(std::memory_order_acquire)) {
    LoaderFunctions found;
    // The loader's list rather than dl_iterate_phdr(), which others stand in front of too. Libraries of the
    // start are never unloaded, and what is opened later is behind them.
    for (const link_map* library = _r_debug.r_map; library != nullptr && !look_in(*library, &found);)
      library = library->l_next;
    known = found;
    is_known.store(true, std::memory_order_release);
  }
  return known;
}

}  // namespace terrace::hooks
