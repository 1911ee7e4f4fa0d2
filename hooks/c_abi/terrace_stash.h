/* Terrace for a framework that owns its HBM: bytes go to pinned DDR and come back, in order of its streams.
 *
 *   terrace_stash_open -> spill -> depart (the HBM may be reused) -> restore -> await -> drop ->
 * terrace_stash_close
 *
 * A stream is a CUstream of the device, null the default stream. On an emulated device memory is the host's,
 * the stream is not read, and depart and await return when the bytes have moved. Any thread may call; calls
 * about one entry do not overlap. Results, errors and struct sizes are as in terrace.h. A child of fork()
 * makes no call about a stash of its parent. */
#ifndef TERRACE_STASH_H
#define TERRACE_STASH_H

#include "hooks/c_abi/terrace.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a function or a field here changes its meaning; new functions and larger structs do not raise
   it. 2: the budgets name the tier of optimizer state, where 1 said whether it is DDR. */
#define TERRACE_STASH_ABI 2

typedef struct terrace_stash terrace_stash;

typedef enum terrace_purpose {
  TERRACE_FOR_ACTIVATION = 0, /* what backward will read */
  TERRACE_FOR_OPTIMIZER = 1,  /* what an update will read and write */
  TERRACE_FOR_GRADIENT = 2,
  TERRACE_FOR_WEIGHTS = 3,
  TERRACE_PURPOSE_IS_AN_INT = 0x7fffffff
} terrace_purpose;

typedef struct terrace_stash_options {
  size_t struct_size;
  const char* device;      /* "auto", "cuda" or "emulated" */
  int32_t device_index;    /* of cuda, as the process sees them */
  const char* policy_file; /* null: the defaults */
  const char* job;         /* label in the metrics */
  int32_t join_daemon;     /* nonzero: where the environment names a daemon */
  uint64_t ddr_budget;     /* bytes; 0: as the policy says */
  double emulated_link;    /* bytes a second of an emulated device's link, each direction */
} terrace_stash_options;

#define TERRACE_UNLIMITED UINT64_MAX

/* Where optimizer state is between updates. */
#define TERRACE_OPTIMIZER_IN_HBM 0
#define TERRACE_OPTIMIZER_IN_DDR 1
#define TERRACE_OPTIMIZER_WHERE_ROOM_IS 2 /* the policy does not say */

typedef struct terrace_stash_budgets {
  size_t struct_size;
  uint64_t hbm;           /* the most that the process may hold on the device; see terrace_stash_read_lease */
  uint64_t ddr;           /* the most that the stash may pin */
  uint64_t activations;   /* of HBM, for what backward will read; TERRACE_UNLIMITED: what the rest leaves */
  int32_t optimizer_tier; /* as the policy says: one of TERRACE_OPTIMIZER_... */
  int32_t off;            /* nonzero: the policy wants nothing to move */
} terrace_stash_budgets;

typedef struct terrace_stash_lease {
  size_t struct_size;
  uint64_t hbm_bytes;        /* may be held on the device now */
  uint64_t hbm_target_bytes; /* what the daemon asks to come down to; hbm_bytes where it asks for nothing */
  uint64_t hbm_used_bytes;   /* as the preload library counts; 0: there is none */
  uint64_t ddr_bytes;        /* may be pinned now */
  int32_t switched_off;      /* nonzero: `terrace off` has reached the process; nothing is to move */
  uint64_t
      overflow_bytes; /* of device allocations that found no HBM and lie in DDR now, read over the link */
  uint64_t refusals;  /* of device allocations by the preload library so far; never falls */
} terrace_stash_lease;

typedef struct terrace_stash_counters {
  size_t struct_size;
  uint64_t spills, restores; /* begun */
  uint64_t spilled_bytes, restored_bytes;
  uint64_t entries; /* now */
  uint64_t ddr_bytes, ddr_peak_bytes;
  double spill_stall_seconds;     /* streams waited for bytes to leave */
  double restore_stall_seconds;   /* streams waited for activations to come back */
  double optimizer_stall_seconds; /* the same for optimizer state and gradients */
  double weights_stall_seconds;   /* the same for weights */
} terrace_stash_counters;

TERRACE_API int32_t terrace_stash_abi(void); /* TERRACE_STASH_ABI of the library */

TERRACE_API terrace_stash_options terrace_default_stash_options(void);
/* `options` may be null: the defaults. On failure *stash is null. */
TERRACE_API terrace_result terrace_stash_open(const terrace_stash_options* options, terrace_stash** stash);
/* Waits for what is in flight; every entry ends. Null is allowed. No call about the stash is under way. */
TERRACE_API terrace_result terrace_stash_close(terrace_stash* stash);
TERRACE_API terrace_result terrace_stash_read_budgets(terrace_stash* stash, terrace_stash_budgets* budgets);

/* The lease as it is now: it grows as the daemon grants more, and shrinks with terrace_stash_give_way. */
TERRACE_API terrace_result terrace_stash_read_lease(terrace_stash* stash, terrace_stash_lease* lease);
/* The framework has let go of what it can: it holds `used` bytes of the device, and goes on with `needed` if
 * it must. What lies above both and above the daemon's target is given back. Does nothing where nothing is
 * asked. */
TERRACE_API terrace_result terrace_stash_give_way(terrace_stash* stash, uint64_t used_bytes,
                                                  uint64_t needed_bytes);

/* Begins to copy `bytes` at `from` away, behind what the stream has queued. They are neither written nor
 * freed before depart, or before left says so. OUT_OF_BUDGET, OUT_OF_MEMORY: DDR is full. On failure there is
 * no entry and *entry is 0. */
TERRACE_API terrace_result terrace_stash_spill(terrace_stash* stash, void* stream, const void* from,
                                               uint64_t bytes, terrace_purpose purpose, uint64_t* entry);
/* In order of the stream, from here on the memory may be written and freed. On failure it holds the only
 * copy. */
TERRACE_API terrace_result terrace_stash_depart(terrace_stash* stash, void* stream, uint64_t entry);
/* *left: 1 where the copy has arrived in DDR, else 0. Does not wait. */
TERRACE_API terrace_result terrace_stash_left(terrace_stash* stash, uint64_t entry, int32_t* left);

/* Begins to copy all of the entry to `to`, behind what the stream has queued. IO: its spill failed after
 * depart. */
TERRACE_API terrace_result terrace_stash_restore(terrace_stash* stash, void* stream, uint64_t entry,
                                                 void* to);
/* In order of the stream, from here on the bytes are there. */
TERRACE_API terrace_result terrace_stash_await(terrace_stash* stash, void* stream, uint64_t entry);

/* Ends the entry. In order of the stream, from here on nothing of it reads or writes the framework's memory.
 */
TERRACE_API terrace_result terrace_stash_drop(terrace_stash* stash, void* stream, uint64_t entry);

/* A training step has ended: it took `seconds`, and what may be spilled held `held_peak_bytes` of HBM at
 * most. */
TERRACE_API terrace_result terrace_stash_note_step(terrace_stash* stash, double seconds,
                                                   uint64_t held_peak_bytes);
/* Fills what counters->struct_size covers. */
TERRACE_API terrace_result terrace_stash_read_counters(terrace_stash* stash,
                                                       terrace_stash_counters* counters);

#ifdef __cplusplus
}
#endif

#endif
