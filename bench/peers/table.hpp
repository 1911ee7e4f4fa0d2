// One C++ class as the C table that a peer exports (allocator/replay/allocator_plugin.h).
//
// An Allocator has
//   static std::unique_ptr<Allocator> open(int device, std::size_t budget, std::string& why);  // null: see
//   why void* new_stream(); void* allocate(std::size_t bytes, void* stream);                // null: out of
//   memory void release(void* address, std::size_t bytes, void* stream); std::size_t reserved(); // 0: it
//   cannot say
// What a foreign library throws ends here: as the reason that open() failed, or as out of memory.
#pragma once

#include <cstddef>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>

#include "allocator/replay/allocator_plugin.h"

namespace terrace::bench {

using AllocatorPlugin = struct terrace_allocator_plugin;  // the function of that name hides the struct

template <typename Allocator>
struct PeerTable {
  static void* open(int device, std::size_t budget, char* error, std::size_t error_size) {
    std::string why;
    try {
      if (auto opened = Allocator::open(device, budget, why)) return opened.release();
    } catch (const std::exception& thrown) {
      why = thrown.what();
    }
    std::snprintf(error, error_size, "%s", why.c_str());
    return nullptr;
  }
  static void close(void* self) { delete static_cast<Allocator*>(self); }
  static void* new_stream(void* self) { return static_cast<Allocator*>(self)->new_stream(); }
  static void* allocate(void* self, std::size_t bytes, void* stream) {
    try {
      return static_cast<Allocator*>(self)->allocate(bytes, stream);
    } catch (const std::exception&) {
      return nullptr;
    }
  }
  static void release(void* self, void* address, std::size_t bytes, void* stream) {
    static_cast<Allocator*>(self)->release(address, bytes, stream);
  }
  static std::size_t reserved(void* self) { return static_cast<Allocator*>(self)->reserved(); }
};

template <typename Allocator>
constexpr AllocatorPlugin table_for(const char* name) {
  using Table = PeerTable<Allocator>;
  return {.abi = TERRACE_ALLOCATOR_PLUGIN_ABI,
          .name = name,
          .open = Table::open,
          .close = Table::close,
          .new_stream = Table::new_stream,
          .allocate = Table::allocate,
          .release = Table::release,
          .reserved = Table::reserved};
}

}  // namespace terrace::bench

// The one symbol of a peer.
#define TERRACE_EXPORT_PEER(Allocator, name)                                               \
  extern "C" __attribute__((visibility("default"))) const terrace::bench::AllocatorPlugin* \
  terrace_allocator_plugin() {                                                             \
    static constexpr auto kTable = terrace::bench::table_for<Allocator>(name);             \
    return &kTable;                                                                        \
  }
