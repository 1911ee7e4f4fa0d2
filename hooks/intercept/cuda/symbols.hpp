// The rows of symbols.def as an enum, with the real function behind each.
#pragma once

#include <cstddef>
#include <optional>

#include "hooks/intercept/cuda/abi.hpp"

namespace terrace::hooks::cuda {

enum class Symbol : unsigned char {
#define SYMBOL(name, api, base, since, default_stream, parameters, arguments, handler) name,
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
};
inline constexpr std::size_t kSymbolCount = 0
#define SYMBOL(name, api, base, since, default_stream, parameters, arguments, handler) +1
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
    ;
static_assert(kSymbolCount <= 256, "Symbol holds every row");

enum class Api : unsigned char { kRuntime, kDriver, kBlas, kBlasLt, kNccl };

struct Row {
  const char* name;  // as exported
  Api api;
  const char* base;  // as cuGetProcAddress is asked
  int since;         // the CUDA release of this signature, 12010 for 12.1
  DefaultStream default_stream;
};
[[nodiscard]] const Row& row_of(Symbol symbol) noexcept;
[[nodiscard]] std::optional<Symbol> symbol_named(const char* name) noexcept;
[[nodiscard]] const char* library_of(Api api) noexcept;  // how its file's name begins

// Null where no loaded library has it. Found once, then one load.
[[nodiscard]] void* real_function(Symbol symbol) noexcept;
// Makes `function` the real one where none is known yet. False: another one is.
bool adopt_real_function(Symbol symbol, void* function) noexcept;

[[nodiscard]] void* interceptor_of(Symbol symbol) noexcept;
[[nodiscard]] bool is_interceptor(const void* function) noexcept;

// How cuGetProcAddress was asked.
struct ProcQuery {
  const char* base;
  unsigned long long flags;
};
// The intercepting function for who asked the driver that way and was given `answer`: null unless the driver
// gives that same answer for the version of a row's signature, so that every other version stays as it is.
[[nodiscard]] void* interceptor_for(const ProcQuery& query, void* answer) noexcept;

}  // namespace terrace::hooks::cuda
