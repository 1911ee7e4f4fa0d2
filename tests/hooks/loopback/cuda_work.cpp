// What the loopback driver's streams do: kernels, which a test writes as functions of the host, copies, and
// graphs of both.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>

#include "tests/hooks/loopback/machine.hpp"

using namespace terrace::loopback;

namespace {

enum class Zero { kLegacy, kPerThread };

// Runs now or, where the stream is captured, with its graph.
int put(Entry& entry, void* handle, Zero zero, std::function<void()> run) {
  Stream* stream = stream_of(handle, zero == Zero::kPerThread);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capturing) {
    stream->graph->runs.push_back(std::move(run));
  } else {
    give_work(*stream, {.run = std::move(run)});
  }
  (void)entry;
  return kSuccess;
}

// The mapping around an address; nothing for plain memory.
std::map<Pointer, Pointer>::iterator mapping_around(Entry& entry, Pointer address) {
  auto it = entry->mappings.upper_bound(address);
  if (it == entry->mappings.begin()) return entry->mappings.end();
  --it;
  return address - it->first < entry->handles[it->second].bytes ? it : entry->mappings.end();
}

// A graph keeps the memory that it saw.
void see(Entry& entry, const Stream& stream, const std::vector<std::byte>& parameters) {
  if (!stream.capturing) return;
  for (std::size_t at = 0; at + 8 <= parameters.size(); at += 8) {
    Pointer word = 0;
    std::memcpy(&word, parameters.data() + at, 8);
    const auto mapping = mapping_around(entry, word);
    if (mapping != entry->mappings.end()) stream.graph->seen[mapping->first] = mapping->second;
  }
}

// A kernel's handle as a library gives it out: launches take it, the calls about functions refuse it.
constexpr std::uintptr_t kOfLibrary = std::uintptr_t{1} << 62;
bool is_of_library(const void* handle) {
  return (reinterpret_cast<std::uintptr_t>(handle) & kOfLibrary) != 0;
}
void* function_of(void* kernel) {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(kernel) & ~kOfLibrary);
}
// LOOPBACK_KERNEL_CALLS: "none" are served about such handles, or only the "function" is given out.
bool serves(std::string_view call) {
  const char* only = std::getenv("LOOPBACK_KERNEL_CALLS");
  return only == nullptr || call == only;
}

int launch(void* function, void* handle, Zero zero, void** parameters) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  function = function_of(function);
  auto* const kernel = static_cast<Kernel*>(function);
  if (entry->kernels.count(kernel) == 0) return kSuccess;  // nothing is known of what it does
  Stream* stream = stream_of(handle, zero == Zero::kPerThread);
  if (stream == nullptr) return kInvalidHandle;
  auto bytes = std::make_shared<std::vector<std::byte>>();
  for (std::size_t i = 0; i < kernel->sizes.size(); ++i) {
    const std::size_t at = bytes->size();
    bytes->resize(at + (kernel->sizes[i] + 7) / 8 * 8);
    std::memcpy(bytes->data() + at, parameters[i], kernel->sizes[i]);
  }
  see(entry, *stream, *bytes);
  return put(entry, handle, zero, [kernel, bytes] {
    std::vector<void*> each;
    std::size_t at = 0;
    for (const std::size_t size : kernel->sizes) {
      each.push_back(bytes->data() + at);
      at += (size + 7) / 8 * 8;
    }
    kernel->run(each.data());
  });
}

// Behind what the default stream has been given.
int now(Zero zero, const std::function<void()>& run) {
  {
    Entry entry;
    if (entry.result() != kSuccess) return entry.result();
    await_work(entry, *stream_of(nullptr, zero == Zero::kPerThread));
  }
  run();
  return kSuccess;
}
int later(void* stream, Zero zero, std::function<void()> run) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  return put(entry, stream, zero, std::move(run));
}

template <typename T>
T* at(Pointer address) {
  return reinterpret_cast<T*>(address);
}
template <typename To, typename From>
auto copying(To to, From from, std::size_t bytes) {
  return [=] { std::memmove((void*)to, (const void*)from, bytes); };
}

// What is written behind a copy's back is lost.
std::function<void()> slowly(std::function<void()> copy, std::size_t bytes) {
  const int slow = bytes < kGranularity ? 0 : machine().slow;
  return [copy = std::move(copy), slow] {
    copy();
    std::this_thread::sleep_for(std::chrono::milliseconds(slow));
  };
}

}  // namespace

extern "C" {
#define API __attribute__((visibility("default"))) int
// Kernels: 0x11 has a pointer, a number, and a structure that ends in a pointer; 0x12 nothing; 0x100 + N has
// N parameters of 8 bytes. Of others nothing is known.
API cuFuncGetParamInfo(void* function, std::size_t index, std::size_t* offset, std::size_t* bytes) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  if (const auto* kernel = static_cast<Kernel*>(function);
      entry->kernels.count(static_cast<Kernel*>(function)) != 0) {
    if (!kernel->told) return kInvalidHandle;
    if (index >= kernel->sizes.size()) return kInvalidValue;
    *bytes = kernel->sizes[index];
    *offset = index * 8;
    return kSuccess;
  }
  static constexpr std::size_t kFirst[3][2] = {{0, 8}, {8, 4}, {16, 24}};
  if (function == reinterpret_cast<void*>(0x11)) {
    if (index >= 3) return kInvalidValue;
    *offset = kFirst[index][0];
    *bytes = kFirst[index][1];
    return kSuccess;
  }
  const auto structure = reinterpret_cast<std::uintptr_t>(function) - 0x1000;
  if (structure < 0x1000) {
    *offset = index * 8;
    *bytes = index < 6 ? 8 : structure * 8;
    return index < 7 ? kSuccess : kInvalidValue;
  }
  return function == reinterpret_cast<void*>(0x12) ? kInvalidValue : kInvalidHandle;
}
API cuFuncGetName(const char** name, void* function) {
  const Entry entry;
  const auto value = reinterpret_cast<std::uintptr_t>(function);
  if (value == 0x11 || value == 0x12 || value - 0x1000 < 0x1000) return *name = "fixed", kSuccess;
  if (entry->kernels.count(static_cast<Kernel*>(function)) == 0) return kInvalidHandle;
  return *name = static_cast<Kernel*>(function)->name, kSuccess;
}
API cuKernelGetParamInfo(void* kernel, std::size_t index, std::size_t* offset, std::size_t* bytes) {
  if (!is_of_library(kernel) || !serves("info")) return kInvalidHandle;
  return cuFuncGetParamInfo(function_of(kernel), index, offset, bytes);
}
API cuKernelGetName(const char** name, void* kernel) {
  if (!is_of_library(kernel) || !serves("info")) return kInvalidHandle;
  return cuFuncGetName(name, function_of(kernel));
}
API cuKernelGetFunction(void** function, void* kernel) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  if (!is_of_library(kernel) || !serves("function")) return kInvalidHandle;
  return *function = function_of(kernel), kSuccess;
}
API loopback_kernel_of_library(void** kernel, void* function) {
  *kernel = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(function) | kOfLibrary);
  return kSuccess;
}
#define WORK(sync, async, zero)                                                                         \
  API cuLaunchKernel##async(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                            unsigned, void* stream, void** parameters, void**) {                        \
    return launch(function, stream, zero, parameters);                                                  \
  }                                                                                                     \
  API cuLaunchKernelEx##async(const unsigned* config, void* function, void** parameters, void**) {      \
    void* stream = nullptr;                                                                             \
    std::memcpy(&stream, reinterpret_cast<const char*>(config) + 32, sizeof stream);                    \
    return launch(function, stream, zero, parameters);                                                  \
  }                                                                                                     \
  API cuMemcpyHtoD_v2##sync(Pointer to, const void* from, std::size_t bytes) {                          \
    return now(zero, copying(to, from, bytes));                                                         \
  }                                                                                                     \
  API cuMemcpyDtoH_v2##sync(void* to, Pointer from, std::size_t bytes) {                                \
    return now(zero, copying(to, from, bytes));                                                         \
  }                                                                                                     \
  API cuMemcpyDtoD_v2##sync(Pointer to, Pointer from, std::size_t bytes) {                              \
    return now(zero, copying(to, from, bytes));                                                         \
  }                                                                                                     \
  API cuMemsetD8_v2##sync(Pointer to, unsigned char value, std::size_t bytes) {                         \
    return now(zero, [=] { std::memset(at<void>(to), value, bytes); });                                 \
  }                                                                                                     \
  API cuMemcpyAsync##async(Pointer to, Pointer from, std::size_t bytes, void* stream) {                 \
    return later(stream, zero, slowly(copying(to, from, bytes), bytes));                                \
  }                                                                                                     \
  API cuMemcpyHtoDAsync_v2##async(Pointer to, const void* from, std::size_t bytes, void* stream) {      \
    return later(stream, zero, slowly(copying(to, from, bytes), bytes));                                \
  }                                                                                                     \
  API cuMemcpyDtoHAsync_v2##async(void* to, Pointer from, std::size_t bytes, void* stream) {            \
    return later(stream, zero, slowly(copying(to, from, bytes), bytes));                                \
  }                                                                                                     \
  API cuMemsetD8Async##async(Pointer to, unsigned char value, std::size_t bytes, void* stream) {        \
    return later(stream, zero, [=] { std::memset(at<void>(to), value, bytes); });                       \
  }                                                                                                     \
  API cuGraphLaunch##async(void* which, void* stream) {                                                 \
    Entry entry;                                                                                        \
    if (entry.result() != kSuccess) return entry.result();                                              \
    auto* const graph = static_cast<Graph*>(which);                                                     \
    if (entry->graphs.count(graph) == 0) return kInvalidValue;                                          \
    for (const auto& [start, handle] : graph->seen) {                                                   \
      const auto mapping = entry->mappings.find(start);                                                 \
      if (mapping == entry->mappings.end() || mapping->second != handle) return kUnknown;               \
    }                                                                                                   \
    for (const auto& run : graph->runs) put(entry, stream, zero, run);                                  \
    return kSuccess;                                                                                    \
  }
WORK(, , Zero::kLegacy)
WORK(_ptds, _ptsz, Zero::kPerThread)
#undef WORK

// As one that hides what it encodes.
API cuTensorMapEncodeTiled(void* map, int, unsigned, void* address, const void*, const void*, const void*,
                           const void*, int, int, int, int) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  std::memset(map, 0, 128);
  const Pointer hidden = ~reinterpret_cast<Pointer>(address);
  std::memcpy(map, &hidden, sizeof hidden);
  return kSuccess;
}
// Of plain memory and of what is mapped; the host's other memory is unknown.
API cuPointerGetAttribute(void* value, int attribute, Pointer address) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  const bool plain = address - kPlainMemory < kPlainBytes;
  if (!plain && mapping_around(entry, address) == entry->mappings.end()) return kInvalidValue;
  if (attribute == 5) return kSuccess;  // tokens for others
  if (attribute == 11 || attribute == 12) {
    // Of mapped memory all of the addresses reserved there.
    auto range = entry->ranges.upper_bound(address);
    if (range == entry->ranges.begin()) return kInvalidValue;
    --range;
    return *static_cast<Pointer*>(value) = attribute == 11 ? range->first : range->second, kSuccess;
  }
  if (attribute != 2) return kInvalidValue;
  auto* const type = static_cast<unsigned*>(value);
  if (plain) return *type = 2, kSuccess;
  // As memory of the host is, where that is mapped.
  const bool device = entry->handles[mapping_around(entry, address)->second].device >= 0;
  return *type = device ? 2 : 1, kSuccess;
}
// Launches behind everybody's back.
API loopback_hidden_launch(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, void* stream, void** parameters, void**) {
  return launch(function, stream, Zero::kLegacy, parameters);
}
// A kernel of the test's: `run` gets pointers to copies of its parameters, of these sizes. Where it is not
// told, the driver does not say what they are.
__attribute__((visibility("default"))) void* loopback_kernel(const char* name, void (*run)(void**),
                                                             const std::size_t* sizes, std::size_t count,
                                                             int told) {
  const Entry entry;
  auto* made = new Kernel{name, run, {sizes, sizes + count}, told != 0};
  entry->kernels.insert(made);
  return made;
}
// What comes on the stream later comes so much later.
API loopback_delay(void* stream, int milliseconds) {
  Entry entry;
  return put(entry, stream, Zero::kLegacy,
             [=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}
// How many bytes of the host's memory are physical memory of ours.
__attribute__((visibility("default"))) std::size_t loopback_host_bytes() {
  const std::lock_guard lock(machine().mutex);
  std::size_t bytes = 0;
  for (const auto& [handle, physical] : machine().handles) {
    if (physical.device < 0) bytes += physical.bytes;
  }
  return bytes;
}
// Whether the memory under an address is a device's.
API loopback_in_hbm(Pointer address) {
  Entry entry;
  const auto mapping = mapping_around(entry, address);
  return mapping != entry->mappings.end() && entry->handles[mapping->second].device >= 0 ? 1 : 0;
}
#undef API
}
