// The rows of symbols.def as an enum, with the real function behind each.
#pragma once

#include <cstddef>

namespace terrace::hooks::cuda {

enum class Symbol : unsigned char {
#define SYMBOL(name, library, parameters, arguments, handler) name,
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
};
inline constexpr std::size_t kSymbolCount = 0
#define SYMBOL(name, library, parameters, arguments, handler) +1
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
    ;

// Null where no loaded library has it. Found once, then one load.
[[nodiscard]] void* real_function(Symbol symbol) noexcept;

// The intercepting function to give to who asked for `query` by name ("cuMemAlloc") and was given `answer`:
// null unless `answer` is exactly the real function behind a row, so that other versions and the variants for
// per-thread streams stay as they are.
[[nodiscard]] void* interceptor_of(const char* query, const void* answer) noexcept;

}  // namespace terrace::hooks::cuda
