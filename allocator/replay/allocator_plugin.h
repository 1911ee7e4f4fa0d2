/* How another allocator is measured beside ours: a shared object that exports terrace_allocator_plugin().
 *
 * `terrace replay --allocator FILE.so` and the allocator benchmark load it. Calls may come from several
 * threads at once, except open and close. Sizes are bytes. Nothing here may throw. */
#ifndef TERRACE_ALLOCATOR_PLUGIN_H
#define TERRACE_ALLOCATOR_PLUGIN_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TERRACE_ALLOCATOR_PLUGIN_ABI 1

struct terrace_allocator_plugin {
  unsigned abi;     /* TERRACE_ALLOCATOR_PLUGIN_ABI */
  const char* name; /* "pytorch", "rmm_pool": the system's name in reports */
  /* An allocator for device number `device` (-1: host memory) that may hold `budget_bytes`; null on failure,
   * with the reason in `error`. */
  void* (*open)(int device, size_t budget_bytes, char* error, size_t error_size);
  void (*close)(void* self);
  /* A stream of the allocator's device, owned by it until close; null is a valid stream. */
  void* (*new_stream)(void* self);
  void* (*allocate)(void* self, size_t bytes, void* stream); /* null: out of memory */
  void (*release)(void* self, void* address, size_t bytes, void* stream);
  /* Bytes it holds from the device or the system now, for its blocks and its caches; 0: it cannot say. */
  size_t (*reserved)(void* self);
};

/* The one symbol a plugin exports. The table lives as long as the library. */
const struct terrace_allocator_plugin* terrace_allocator_plugin(void);

#ifdef __cplusplus
}
#endif
#endif
