// What the wall asks of CUDA, and what goes past its driver's functions.
#include "hooks/intercept/cuda/device_books.hpp"
#include "hooks/intercept/cuda/handlers.hpp"

namespace terrace::hooks::cuda {
namespace {

std::optional<DeviceFacts> facts_of(int device) noexcept try {
  const DriverCalls* driver = driver_calls();
  if (driver == nullptr) return std::nullopt;
  std::size_t total = 0, free = 0;
  if (driver->device_total(&total, device) != kSuccess) return std::nullopt;
  DeviceFacts facts{"cuda:" + std::to_string(device), Bytes(total), std::nullopt};
  char pci[32] = "";
  if (driver->device_pci(pci, sizeof pci - 1, device) == kSuccess) {
    for (char& c : pci) c = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
    facts.name = pci;
  }
  const RelaxedCapture relaxed(*driver);
  if (current_device() == device && driver->memory_info(&free, &total) == kSuccess) facts.free = Bytes(free);
  return facts;
} catch (...) {
  return std::nullopt;
}

// Who allocates gets all that he needs or nothing, and then nothing has moved for him; the daemon, which asks
// from a thread of the wall's, what there is.
Bytes reclaim_on(int device, Bytes wanted) noexcept {
  const Bytes unused = stream_pools().trim(DeviceOrdinal{device});
  if (unused >= wanted) return unused;
  const bool for_a_guest = DriverCall::under_way() || RuntimeCall::under_way();
  return unused + (for_a_guest ? stable_blocks().make_way(DeviceOrdinal{device}, wanted - unused)
                               : stable_blocks().give_way(DeviceOrdinal{device}, wanted - unused));
}

[[gnu::constructor]] void give_the_wall_its_source() {
  wall().set_source({facts_of, reclaim_on, open_books, held_by_this_process});
}

void free_by_runtime(Symbol symbol, void* address) noexcept {
  if (void* real = real_function(symbol)) (void)reinterpret_cast<CallResult (*)(void*)>(real)(address);
}

}  // namespace

CallResult settle_unseen(TierId tier, void** out, Bytes size) noexcept {
  if (out == nullptr) return kSuccess;
  Allocation allocation{tier, size};
  if (tier == TierId::kHbm) {
    allocation.device = static_cast<std::int16_t>(current_device());
    allocation.charged = charge_for(size);
    if (!charge_native(allocation.device, allocation.charged)) {
      wall().count_refusal(allocation.device, allocation.charged);
      free_by_runtime(Symbol::cudaFree, *out);
      return kOutOfMemory;
    }
  }
  recorder().allocated(key_of_settled(*out), allocation, 0);
  return kSuccess;
}

}  // namespace terrace::hooks::cuda

// Called by Swap Core's session (swapcore/session_lease.cpp) where it takes a lease for all of the process.
extern "C" __attribute__((visibility("default"))) void terrace_stand_aside() {
  terrace::hooks::wall().stand_aside();
}

// Called by a stash (swapcore/stash/process_lease.cpp) that leases for all of the process.
extern "C" __attribute__((visibility("default"))) std::uint64_t terrace_wall_used(int device) {
  return terrace::hooks::wall().used(device).count();
}
extern "C" __attribute__((visibility("default"))) void terrace_wall_set_limit(int device,
                                                                              std::uint64_t limit) {
  terrace::hooks::wall().set_limit(device, terrace::Bytes(limit));
}
extern "C" __attribute__((visibility("default"))) std::uint64_t terrace_wall_overflow(int device) {
  return terrace::hooks::cuda::overflow().figures(device).alive.count();
}
extern "C" __attribute__((visibility("default"))) std::uint64_t terrace_wall_refusals(int device) {
  return terrace::hooks::wall().refusals(device);
}
extern "C" __attribute__((visibility("default"))) std::uint64_t terrace_wall_return_unused(int device) {
  return terrace::hooks::cuda::overflow().return_unused(terrace::hooks::cuda::DeviceOrdinal{device}).count();
}
extern "C" __attribute__((visibility("default"))) void terrace_wall_set_lender(
    int device, void* self, std::uint64_t (*lend)(void*, std::uint64_t),
    void (*take_back)(void*, std::uint64_t)) {
  // What nothing lies in he need not lend.
  (void)terrace_wall_return_unused(device);
  terrace::hooks::wall().set_lender(device, {self, lend, take_back});
}
