// The visible functions, one for each row of symbols.def.
#include <array>
#include <atomic>
#include <cstring>

#include "hooks/intercept/cuda/handlers.hpp"
#include "hooks/intercept/loaded_library.hpp"

namespace terrace::hooks::cuda {
namespace {

constexpr const char* kRuntime = "libcudart.so";
constexpr const char* kDriver = "libcuda.so";

struct Row {
  const char* name;
  const char* library;
};
constexpr std::array<Row, kSymbolCount> kRows = {{
#define SYMBOL(name, library, parameters, arguments, handler) {#name, library},
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
}};

constinit std::array<std::atomic<void*>, kSymbolCount> real_functions{};

}  // namespace

void* real_function(Symbol symbol) noexcept {
  const auto index = static_cast<std::size_t>(symbol);
  void* known = real_functions[index].load(std::memory_order_acquire);
  if (known != nullptr) return known;
  void* found = find_real_function(kRows[index].library, kRows[index].name);
  real_functions[index].store(found, std::memory_order_release);
  return found;
}

}  // namespace terrace::hooks::cuda

// Unpacks "(a, b)" of a row to "a, b".
#define TERRACE_UNPACK(...) __VA_ARGS__

extern "C" {
using namespace terrace;
using namespace terrace::hooks::cuda;
#define SYMBOL(name, library, parameters, arguments, handler)              \
  __attribute__((visibility("default"))) CallResult name parameters {      \
    using Real = CallResult(*) parameters;                                 \
    const auto real = reinterpret_cast<Real>(real_function(Symbol::name)); \
    if (real == nullptr) return kNotInitialized;                           \
    return handler(real, TERRACE_UNPACK arguments);                        \
  }
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
}

namespace terrace::hooks::cuda {

void* interceptor_of(const char* query, const void* answer) noexcept {
  static const std::array<void*, kSymbolCount> interceptors = {{
#define SYMBOL(name, library, parameters, arguments, handler) reinterpret_cast<void*>(&::name),
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
  }};
  const std::size_t length = std::strlen(query);
  for (std::size_t index = 0; index < kSymbolCount; ++index) {
    if (std::strncmp(kRows[index].name, query, length) != 0) continue;
    if (real_function(static_cast<Symbol>(index)) == answer) return interceptors[index];
  }
  return nullptr;
}

}  // namespace terrace::hooks::cuda
