#include "hooks/intercept/cuda/driver_calls.hpp"

#include <atomic>

#include "hooks/intercept/cuda/symbols.hpp"
#include "hooks/intercept/loaded_library.hpp"

namespace terrace::hooks::cuda {
namespace {

constexpr const char* kDriverLibrary = "libcuda.so";

template <typename Function>
bool find(Function& function, const char* name) {
  function = reinterpret_cast<Function>(find_real_function(kDriverLibrary, name));
  return function != nullptr;
}

// What a driver does not export it may still hand out to who asks for it by its release.
template <typename Function>
void find_or_ask(Function& function, const char* name) {
  constexpr int kRelease = 12040;  // the newest of what is optional here
  if (find(function, name)) return;
  using Ask = CallResult (*)(const char*, void**, int, unsigned long long, QueryResult*);
  const auto ask = reinterpret_cast<Ask>(real_function(Symbol::cuGetProcAddress_v2));
  void* found = nullptr;
  QueryResult how = 0;
  if (ask != nullptr && ask(name, &found, kRelease, 0, &how) == kSuccess)
    function = reinterpret_cast<Function>(found);
}

bool find_all(DriverCalls& calls) {
  bool all = true;
#define DRIVER_CALL(member, name, parameters) all = all && find(calls.member, name);
#define DRIVER_CALL_OPTIONAL(member, name, parameters) find_or_ask(calls.member, name);
#include "hooks/intercept/cuda/driver_calls.def"
#undef DRIVER_CALL
#undef DRIVER_CALL_OPTIONAL
  return all;
}

constinit DriverCalls known;
constinit std::atomic<bool> is_known{false};
constinit std::atomic<bool> finding{false};

}  // namespace

const DriverCalls* driver_calls() noexcept {
  if (is_known.load(std::memory_order_acquire)) return &known;
  DriverCalls found;
  if (!find_all(found)) return nullptr;
  // The first writes; who comes meanwhile waits for a few stores.
  if (!finding.exchange(true, std::memory_order_acq_rel)) {
    known = found;
    is_known.store(true, std::memory_order_release);
  }
  while (!is_known.load(std::memory_order_acquire)) {
  }
  return &known;
}

DeviceOrdinal current_device() noexcept {
  const DriverCalls* driver = driver_calls();
  DeviceOrdinal device = -1;
  if (driver == nullptr || driver->context_device(&device) != kSuccess) return -1;
  return device;
}

CurrentContext::CurrentContext(const DriverCalls& driver, ContextHandle wanted) noexcept : driver_(driver) {
  result_ = driver_.context_get(&before_);
  if (result_ != kSuccess || before_ == wanted) return;
  result_ = driver_.context_set(wanted);
  changed_ = result_ == kSuccess;
}

}  // namespace terrace::hooks::cuda
