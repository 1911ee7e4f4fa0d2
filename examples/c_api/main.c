/* Swap Core from C: two layers whose outputs are offered in forward and fetched in backward, on the emulated
 * device, so that it runs anywhere. Where a fetch is a miss, the output is computed again. */
#include <stdio.h>
#include <string.h>

#include "hooks/c_abi/terrace.h"

enum { kLayers = 2, kSteps = 3, kBytes = 8 << 20 };

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, terrace_last_error());
  return 1;
}

/* Stands for an operator: layer and step decide every byte. */
static int compute(terrace_session* session, int layer, int step, terrace_block** output) {
  if (terrace_allocate(session, kBytes, TERRACE_ACTIVATION, output) != TERRACE_OK) return failed("allocate");
  if (terrace_synchronize(session) != TERRACE_OK) return failed("synchronize");
  memset(terrace_block_address(*output), 16 * layer + step, kBytes);
  return 0;
}

static int is_as_computed(const terrace_block* output, int layer, int step) {
  const unsigned char* bytes = terrace_block_address(output);
  for (size_t i = 0; i < kBytes; ++i) {
    if (bytes[i] != 16 * layer + step) return 0;
  }
  return 1;
}

static int forward(terrace_session* session, const uint32_t* sites, int step) {
  for (int layer = 0; layer < kLayers; ++layer) {
    terrace_block* output = NULL;
    if (terrace_enter_forward(session, layer, 0) != TERRACE_OK) return failed("enter_forward");
    if (compute(session, layer, step, &output) != 0) return 1;
    const terrace_key key = {sites[layer], 0};
    if (terrace_offer(session, key, output) != TERRACE_OK) return failed("offer");
    terrace_release(output); /* from here on Terrace decides: keep it, move it, or drop it */
  }
  return 0;
}

static int backward(terrace_session* session, const uint32_t* sites, int step) {
  for (int layer = kLayers - 1; layer >= 0; --layer) {
    terrace_block* output = NULL;
    if (terrace_enter_backward(session, layer, 0) != TERRACE_OK) return failed("enter_backward");
    const terrace_key key = {sites[layer], 0};
    if (terrace_fetch(session, key, &output) != TERRACE_OK) return failed("fetch");
    if (output == NULL && compute(session, layer, step, &output) != 0) return 1;
    if (terrace_synchronize(session) != TERRACE_OK) return failed("synchronize");
    const int right = is_as_computed(output, layer, step);
    terrace_release(output);
    if (!right) return fprintf(stderr, "layer %d came back changed\n", layer), 1;
  }
  return 0;
}

static int train(terrace_session* session) {
  uint32_t sites[kLayers];
  for (int layer = 0; layer < kLayers; ++layer) {
    char name[32];
    snprintf(name, sizeof name, "layer.%d.fc1", layer);
    const terrace_site_spec spec = {sizeof spec, name, TERRACE_MATMUL, layer, "fc1"};
    if (terrace_declare_site(session, &spec, &sites[layer]) != TERRACE_OK) return failed("declare_site");
  }
  for (int step = 0; step < kSteps; ++step) {
    if (terrace_begin_step(session) != TERRACE_OK) return failed("begin_step");
    if (forward(session, sites, step) != 0) return 1;
    if (terrace_enter_head(session, 0) != TERRACE_OK) return failed("enter_head");
    if (backward(session, sites, step) != 0) return 1;
    if (terrace_end_step(session) != TERRACE_OK) return failed("end_step");
  }
  return 0;
}

int main(void) {
  terrace_options options = terrace_default_options();
  options.device = "emulated";
  options.emulated_hbm = (uint64_t)256 << 20;
  options.hbm_budget = (uint64_t)128 << 20;
  options.job = "c_api";
  terrace_session* session = NULL;
  if (terrace_open(&options, &session) != TERRACE_OK) return failed("open");
  const int result = train(session);

  terrace_counters counters = {.struct_size = sizeof counters};
  if (result == 0 && terrace_read_counters(session, &counters) == TERRACE_OK) {
    printf("hits %llu, misses %llu, late %llu, HBM peak %llu of %llu bytes\n",
           (unsigned long long)counters.hits, (unsigned long long)counters.misses,
           (unsigned long long)counters.late, (unsigned long long)counters.hbm_peak_bytes,
           (unsigned long long)counters.hbm_budget_bytes);
    printf("every fetched byte was as offered\n");
  }
  if (terrace_close(session) != TERRACE_OK) return failed("close");
  return result;
}
