// dlsym and dlvsym: who asks a library for a function of the table gets the intercepting one.
//
// The caller's view stays: what is not in the table goes on by a jump, so that the loader sees the caller's
// own return address, by which it knows what RTLD_NEXT and RTLD_DEFAULT mean there. A name of the table
// answers null, with the loader's own error, wherever it would without this library.
#include <dlfcn.h>

#include <cstddef>

#include "hooks/intercept/cuda/symbols.hpp"
#include "hooks/intercept/loaded_library.hpp"
#include "hooks/intercept/loader_functions.hpp"

#if defined(__x86_64__)

namespace terrace::hooks::cuda {
namespace {

// In two registers: null in the second, and the call goes on to the loader.
struct Answer {
  void* function;
  void* is_final;
};
constexpr Answer kAskTheLoader{nullptr, nullptr};
Answer final_answer(void* function) { return {function, reinterpret_cast<void*>(1)}; }

// What the caller's own scope has beyond the global one: a library loaded locally sees those it depends on.
void* find_from(const void* caller, const char* name) {
  Dl_info info{};
  void* map = nullptr;
  if (dladdr1(caller, &info, &map, RTLD_DL_LINKMAP) == 0 || map == nullptr) return nullptr;
  void* found = loader_functions().dlsym(map, name);
  if (found == nullptr) (void)dlerror();
  return is_interceptor(found) ? nullptr : found;
}

// `found` is what the loader finds for a row's name where this library is not.
Answer intercepted(Symbol symbol, void* found) {
  if (found == nullptr) return final_answer(nullptr);
  // A function of the same name elsewhere is somebody else's; a second library of the same kind stays whole.
  if (!is_in_library(found, library_of(row_of(symbol).api)) || !adopt_real_function(symbol, found))
    return final_answer(found);
  return final_answer(interceptor_of(symbol));
}

Answer look_up(void* handle, const char* name, const void* caller) noexcept {
  if (handle == RTLD_NEXT) return kAskTheLoader;
  const auto symbol = symbol_named(name);
  if (!symbol) return kAskTheLoader;
  if (handle == RTLD_DEFAULT) {
    void* found = find_next_function(name);
    if (found == nullptr) found = find_from(caller, name);
    if (found != nullptr) return intercepted(*symbol, found);
    return final_answer(loader_functions().dlsym(RTLD_NEXT, name));  // null, and the loader's words
  }
  void* found = loader_functions().dlsym(handle, name);
  // The program's own handle reaches the global scope, where this library stands first.
  if (is_interceptor(found)) found = loader_functions().dlsym(RTLD_NEXT, name);
  return intercepted(*symbol, found);
}

// A version belongs to one library: RTLD_DEFAULT and the program's handle find it there.
Answer look_up_version(void* handle, const char* name, const char* version) noexcept {
  if (handle == RTLD_NEXT) return kAskTheLoader;
  const auto symbol = symbol_named(name);
  if (!symbol) return kAskTheLoader;
  const auto dlvsym = loader_functions().dlvsym;
  void* found = dlvsym(handle, name, version);
  if (is_interceptor(found)) found = dlvsym(RTLD_NEXT, name, version);
  return intercepted(*symbol, found);
}

}  // namespace
}  // namespace terrace::hooks::cuda

extern "C" {
using terrace::hooks::cuda::Answer;

__attribute__((visibility("hidden"))) void* terrace_loader_dlsym = nullptr;
__attribute__((visibility("hidden"))) void* terrace_loader_dlvsym = nullptr;

__attribute__((visibility("hidden"), used)) Answer terrace_look_up(void* handle, const char* name,
                                                                   const void* caller) {
  terrace_loader_dlsym = reinterpret_cast<void*>(terrace::hooks::loader_functions().dlsym);
  return terrace::hooks::cuda::look_up(handle, name, caller);
}
__attribute__((visibility("hidden"), used)) Answer terrace_look_up_version(void* handle, const char* name,
                                                                           const char* version) {
  terrace_loader_dlvsym = reinterpret_cast<void*>(terrace::hooks::loader_functions().dlvsym);
  return terrace::hooks::cuda::look_up_version(handle, name, version);
}
}

// dlsym(handle, name), dlvsym(handle, name, version): ask ours, then answer or jump to the loader's with the
// registers and the return address of the caller.
__asm__(R"(
  .text
  .globl dlsym
  .type dlsym, @function
dlsym:
  .cfi_startproc
  endbr64
  pushq %rdi
  .cfi_adjust_cfa_offset 8
  pushq %rsi
  .cfi_adjust_cfa_offset 8
  subq $8, %rsp
  .cfi_adjust_cfa_offset 8
  movq 24(%rsp), %rdx
  call terrace_look_up
  addq $8, %rsp
  .cfi_adjust_cfa_offset -8
  popq %rsi
  .cfi_adjust_cfa_offset -8
  popq %rdi
  .cfi_adjust_cfa_offset -8
  testq %rdx, %rdx
  jne 1f
  jmpq *terrace_loader_dlsym(%rip)
1:
  ret
  .cfi_endproc
  .size dlsym, . - dlsym

  .globl dlvsym
  .type dlvsym, @function
dlvsym:
  .cfi_startproc
  endbr64
  pushq %rdi
  .cfi_adjust_cfa_offset 8
  pushq %rsi
  .cfi_adjust_cfa_offset 8
  pushq %rdx
  .cfi_adjust_cfa_offset 8
  call terrace_look_up_version
  movq %rdx, %rcx
  popq %rdx
  .cfi_adjust_cfa_offset -8
  popq %rsi
  .cfi_adjust_cfa_offset -8
  popq %rdi
  .cfi_adjust_cfa_offset -8
  testq %rcx, %rcx
  jne 1f
  jmpq *terrace_loader_dlvsym(%rip)
1:
  ret
  .cfi_endproc
  .size dlvsym, . - dlvsym
)");

#endif
