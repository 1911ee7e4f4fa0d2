/* Terrace for C: Swap Core's session behind opaque handles.
 *
 *   terrace_open -> for each step: begin_step, enter_forward + offer for every layer, enter_head,
 *   enter_backward + fetch for every layer in reverse, end_step -> terrace_close
 *
 * One session serves one device and one thread; call everything of a session from that thread. No call
 * throws, aborts or prints; what went wrong is the result, and terrace_last_error() says it in words. Structs
 * that may grow begin with their size: set it, or start from the function that gives the defaults. */
#ifndef TERRACE_H
#define TERRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TERRACE_API __attribute__((visibility("default")))

typedef struct terrace_session terrace_session;
typedef struct terrace_block terrace_block; /* a hold on device memory; several may hold the same memory */

typedef enum terrace_result {
  TERRACE_OK = 0,
  TERRACE_OUT_OF_BUDGET = 1, /* a budget would be exceeded; nothing changed, the text says by what */
  TERRACE_OUT_OF_MEMORY = 2,
  TERRACE_INVALID_ARGUMENT = 3,
  TERRACE_NOT_SUPPORTED = 4,
  TERRACE_NOT_FOUND = 5,
  TERRACE_DEVICE_LOST = 6,
  TERRACE_IO = 7,
  TERRACE_PROTOCOL = 8,
  TERRACE_TIMEOUT = 9,
  TERRACE_CANCELLED = 10,
  TERRACE_INTERNAL = 11
} terrace_result;

/* Any int may be passed where one of the next three, or of terrace_purpose, is meant, and is looked at: their
   last enumerators make them as wide. */
typedef enum terrace_pool {
  TERRACE_WEIGHTS = 0,
  TERRACE_OPTIMIZER = 1,
  TERRACE_GRADIENT = 2,
  TERRACE_ACTIVATION = 3,
  TERRACE_EXPERT = 4,
  TERRACE_COMM = 5,
  TERRACE_SCRATCH = 6,
  TERRACE_POOL_IS_AN_INT = 0x7fffffff
} terrace_pool;

typedef enum terrace_site_kind {
  TERRACE_MATMUL = 0,
  TERRACE_GMM = 1,
  TERRACE_ATTENTION = 2,
  TERRACE_SCAN = 3,
  TERRACE_SITE_KIND_IS_AN_INT = 0x7fffffff
} terrace_site_kind;

/* What an output is made of; numbers may travel packed where swapcore.spill_format says so. */
typedef enum terrace_element {
  TERRACE_OPAQUE = 0,
  TERRACE_F32 = 1,
  TERRACE_BF16 = 2,
  TERRACE_ELEMENT_IS_AN_INT = 0x7fffffff
} terrace_element;

typedef struct terrace_options {
  size_t struct_size;
  const char* device;      /* "auto", "cuda" or "emulated" */
  uint64_t emulated_hbm;   /* bytes of an emulated device's memory */
  uint64_t hbm_budget;     /* bytes; 0: as the policy says */
  const char* policy_file; /* null: the defaults */
  const char* job;         /* label in the metrics */
  int32_t join_daemon;     /* nonzero: where the environment names a daemon */
} terrace_options;

typedef struct terrace_site_spec {
  size_t struct_size;
  const char* name; /* unique in the session: "layer.7.moe.fc1" */
  terrace_site_kind kind;
  int32_t layer;     /* position in forward order, 0 first */
  const char* group; /* sites of one group share a measured cost; null: the name */
} terrace_site_spec;

/* Which output: forward and recompute of the same micro-batch meet here. */
typedef struct terrace_key {
  uint32_t site;
  uint32_t micro_batch;
} terrace_key;

/* A saved activation that must come back; `slot` tells several of a layer apart. */
typedef struct terrace_save_key {
  int32_t layer;
  uint32_t micro_batch;
  uint32_t slot;
} terrace_save_key;

typedef struct terrace_counters {
  size_t struct_size;
  uint64_t hits, misses, late; /* fetches by outcome; a late one was a hit that a stream waited for */
  uint64_t evictions;
  uint64_t spilled_bytes, restored_bytes;
  double stall_seconds;
  uint64_t hbm_budget_bytes, hbm_peak_bytes;
  uint64_t ddr_budget_bytes, ddr_peak_bytes;
} terrace_counters;

TERRACE_API const char* terrace_version(void);
/* What the last failed call of this thread said; "" where none has failed. Valid until the next failure. */
TERRACE_API const char* terrace_last_error(void);

TERRACE_API terrace_options terrace_default_options(void);
/* `options` may be null: the defaults. On failure *session is null. */
TERRACE_API terrace_result terrace_open(const terrace_options* options, terrace_session** session);
/* Null is allowed. TERRACE_INVALID_ARGUMENT, and nothing done, while blocks of the session are held. */
TERRACE_API terrace_result terrace_close(terrace_session* session);

/* The CUstream on which the session expects computation; null on an emulated device. */
TERRACE_API void* terrace_native_stream(terrace_session* session);
/* Waits for all work on that stream. On an emulated device a block may be read and written after it. */
TERRACE_API terrace_result terrace_synchronize(terrace_session* session);

/* Memory for use on the session's stream. On failure *block is null. */
TERRACE_API terrace_result terrace_allocate(terrace_session* session, uint64_t bytes, terrace_pool pool,
                                            terrace_block** block);
TERRACE_API void* terrace_block_address(const terrace_block* block);
TERRACE_API uint64_t terrace_block_bytes(const terrace_block* block);
/* Drops this hold; the memory goes with its last one, in order of the stream. Null is allowed. */
TERRACE_API void terrace_release(terrace_block* block);

TERRACE_API terrace_result terrace_declare_site(terrace_session* session, const terrace_site_spec* spec,
                                                uint32_t* site);

/* Gives up on a step that was begun and not ended, with all that was offered in it. */
TERRACE_API terrace_result terrace_begin_step(terrace_session* session);
TERRACE_API terrace_result terrace_enter_forward(terrace_session* session, int32_t layer,
                                                 uint32_t micro_batch);
TERRACE_API terrace_result terrace_enter_head(terrace_session* session, uint32_t micro_batch);
TERRACE_API terrace_result terrace_enter_backward(terrace_session* session, int32_t layer,
                                                  uint32_t micro_batch);
/* Behind the last backward: the optimizer. */
TERRACE_API terrace_result terrace_enter_update(terrace_session* session);
/* What was offered or saved and not asked for is released. */
TERRACE_API terrace_result terrace_end_step(terrace_session* session);
/* Gives up on the step that runs, with all that was offered or saved in it; nothing where none runs. */
TERRACE_API terrace_result terrace_cancel_step(terrace_session* session);

/* Forward: a site's output, computed on the session's stream and never written again. The hold stays the
 * caller's, to be released as usual. Outside of a step nothing is kept. */
TERRACE_API terrace_result terrace_offer(terrace_session* session, terrace_key key,
                                         const terrace_block* output);
/* The same of an output of numbers. */
TERRACE_API terrace_result terrace_offer_numbers(terrace_session* session, terrace_key key,
                                                 const terrace_block* output, terrace_element element);
/* The output has been written since it was offered, so that its fetch must be a miss. */
TERRACE_API terrace_result terrace_changed(terrace_session* session, terrace_key key);
/* Recompute: a hold on the bytes that were offered, ready on the stream; null: a miss, so compute it. Where
 * shapes may have changed since, compare terrace_block_bytes. */
TERRACE_API terrace_result terrace_fetch(terrace_session* session, terrace_key key, terrace_block** output);

/* Keeps an activation until it is loaded: in HBM inside the policy's checkpoint budget, else as its
 * contingency says. The hold stays the caller's. TERRACE_INVALID_ARGUMENT: saved before, and not loaded. */
TERRACE_API terrace_result terrace_save(terrace_session* session, terrace_save_key key,
                                        const terrace_block* activation);
/* A hold on the same bytes, perhaps elsewhere, ready on the stream. TERRACE_NOT_FOUND: never saved, or loaded
 * already. On failure *activation is null. */
TERRACE_API terrace_result terrace_load(terrace_session* session, terrace_save_key key,
                                        terrace_block** activation);

/* Fills what counters->struct_size covers. */
TERRACE_API terrace_result terrace_read_counters(terrace_session* session, terrace_counters* counters);

#ifdef __cplusplus
}
#endif

#endif
