// The CUDA driver, opened at run time: no binary of ours links a CUDA library, so one build serves machines
// with and without a GPU.
//
// Calls go through the table: driver.cuMemMap(...). cuda.h's macros put the same version suffix on the member
// and on the symbol behind it.
#pragma once

#include <cuda.h>

#include "runtime/device.hpp"

namespace terrace::cuda {

struct Driver {
#define DRIVER_SYMBOL(name) decltype(&::name) name = nullptr;
#define DRIVER_SYMBOL_SINCE(name, older) decltype(&::name) name = nullptr;
#define DRIVER_SYMBOL_OPTIONAL(name) decltype(&::name) name = nullptr;
#include "runtime/cuda/driver_symbols.def"
#undef DRIVER_SYMBOL
#undef DRIVER_SYMBOL_SINCE
#undef DRIVER_SYMBOL_OPTIONAL
};

// Opens and initialises the driver on first use, and keeps it: a driver is never closed. Errors:
// kNotSupported (none on this machine, too old, or it finds no device; the text says which), the same at
// every call.
[[nodiscard]] Result<const Driver*> open_driver();

// What a driver call was about: recorded in its error.
struct CallSite {
  const char* call;  // "cuMemCreate"
  Bytes size;        // what it was asked to handle; zero where that means nothing
  DeviceId device;
};

// The one check of driver calls: ok, or an error that says which call, for how much, on which device and why.
[[nodiscard]] Status check(const Driver& driver, CUresult result, const CallSite& site);

}  // namespace terrace::cuda
