// The visible functions, one for each row of symbols.def.
#include <array>
#include <atomic>
#include <cstring>

#include "hooks/intercept/cuda/physical_handlers.hpp"
#include "hooks/intercept/cuda/use_handlers.hpp"
#include "hooks/intercept/loaded_library.hpp"
#include "hooks/intercept/plain_text.hpp"

namespace terrace::hooks::cuda {
namespace {

constexpr std::array<Row, kSymbolCount> kRows = {{
#define SYMBOL(name, api, base, since, default_stream, parameters, arguments, handler) \
  {#name, Api::api, #base, since, DefaultStream::default_stream},
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
}};

constinit std::array<std::atomic<void*>, kSymbolCount> real_functions{};

// What the API says of itself where it is not there.
constexpr CallResult absent(Api api) {
  if (api == Api::kBlas || api == Api::kBlasLt) return 1;  // CUBLAS_STATUS_NOT_INITIALIZED
  return kNotInitialized;                                  // and NCCL's internal error
}

using GetProcAddress = CallResult (*)(const char*, void**, int, unsigned long long, QueryResult*);
using GetProcAddressV1 = CallResult (*)(const char*, void**, int, unsigned long long);

void* ask_driver(const Row& row, unsigned long long flags) {
  void* answer = nullptr;
  if (void* ask = real_function(Symbol::cuGetProcAddress_v2)) {
    QueryResult found = 0;
    if (reinterpret_cast<GetProcAddress>(ask)(row.base, &answer, row.since, flags, &found) != kSuccess)
      return nullptr;
  } else if (void* older = real_function(Symbol::cuGetProcAddress)) {
    if (reinterpret_cast<GetProcAddressV1>(older)(row.base, &answer, row.since, flags) != kSuccess)
      return nullptr;
  }
  return answer;
}

}  // namespace

const Row& row_of(Symbol symbol) noexcept { return kRows[static_cast<std::size_t>(symbol)]; }

std::optional<Symbol> symbol_named(const char* name) noexcept {
  if (name == nullptr) return std::nullopt;
  // Who looks up anything else pays one comparison.
  const bool likely = name[0] == 'c' || name[0] == 'n' || name[0] == '_';
  if (!likely) return std::nullopt;
  for (std::size_t index = 0; index < kSymbolCount; ++index) {
    if (same_text(kRows[index].name, name)) return static_cast<Symbol>(index);
  }
  return std::nullopt;
}

const char* library_of(Api api) noexcept {
  switch (api) {
    case Api::kRuntime:
      return "libcudart.so";
    case Api::kDriver:
      return "libcuda.so";
    case Api::kBlas:
      return "libcublas.so";
    case Api::kBlasLt:
      return "libcublasLt.so";
    case Api::kNccl:
      break;
  }
  return "libnccl.so";
}

void* real_function(Symbol symbol) noexcept {
  const auto index = static_cast<std::size_t>(symbol);
  void* known = real_functions[index].load(std::memory_order_acquire);
  if (known != nullptr) return known;
  void* found = find_real_function(library_of(kRows[index].api), kRows[index].name);
  if (found == nullptr) return nullptr;
  (void)adopt_real_function(symbol, found);
  return real_functions[index].load(std::memory_order_acquire);
}

bool adopt_real_function(Symbol symbol, void* function) noexcept {
  if (is_interceptor(function)) return false;
  void* none = nullptr;
  auto& slot = real_functions[static_cast<std::size_t>(symbol)];
  if (slot.compare_exchange_strong(none, function, std::memory_order_acq_rel)) {
    keep_loaded(function);
    return true;
  }
  return none == function;
}

}  // namespace terrace::hooks::cuda

// Unpacks "(a, b)" of a row to "a, b".
#define TERRACE_UNPACK(...) __VA_ARGS__

extern "C" {
using namespace terrace;
using namespace terrace::hooks::cuda;
#define SYMBOL(name, api, base, since, default_stream, parameters, arguments, handler) \
  __attribute__((visibility("default"))) CallResult name parameters {                  \
    using Real = CallResult(*) parameters;                                             \
    const Call<Real> call{reinterpret_cast<Real>(real_function(Symbol::name)),         \
                          DefaultStream::default_stream, __builtin_return_address(0)}; \
    if (call.real == nullptr) return absent(Api::api);                                 \
    return handler(call, TERRACE_UNPACK arguments);                                    \
  }
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
}

namespace terrace::hooks::cuda {
namespace {

const std::array<void*, kSymbolCount>& interceptors() {
  static const std::array<void*, kSymbolCount> all = {{
#define SYMBOL(name, api, base, since, default_stream, parameters, arguments, handler) \
  reinterpret_cast<void*>(&::name),
#include "hooks/intercept/cuda/symbols.def"
#undef SYMBOL
  }};
  return all;
}

}  // namespace

void* interceptor_of(Symbol symbol) noexcept { return interceptors()[static_cast<std::size_t>(symbol)]; }

bool is_interceptor(const void* function) noexcept {
  for (const void* ours : interceptors()) {
    if (ours == function) return true;
  }
  return false;
}

void* interceptor_for(const ProcQuery& query, void* answer) noexcept {
  if (is_interceptor(answer)) return nullptr;  // a driver that found us in the global scope
  const bool per_thread = (query.flags & kAskPerThread) != 0;
  for (std::size_t index = 0; index < kSymbolCount; ++index) {
    const Row& row = kRows[index];
    if (row.api != Api::kDriver || std::strcmp(row.base, query.base) != 0) continue;
    if (row.default_stream == DefaultStream::kPerThread && !per_thread) continue;
    const auto symbol = static_cast<Symbol>(index);
    if (real_function(symbol) != answer && ask_driver(row, query.flags) != answer) continue;
    // Asked by a program with per-thread streams, a function that has a twin is the twin: its row follows.
    if (row.default_stream == DefaultStream::kLegacy && per_thread && ask_driver(row, 0) != answer) continue;
    (void)adopt_real_function(symbol, answer);
    return interceptor_of(symbol);
  }
  return nullptr;
}

}  // namespace terrace::hooks::cuda
