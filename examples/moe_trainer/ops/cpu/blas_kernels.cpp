#include "examples/moe_trainer/ops/cpu/blas_kernels.hpp"

#include <cblas.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

// Exported by every OpenBLAS that chooses at run time; a build for one processor has neither and needs none.
extern "C" {
__attribute__((weak)) void gotoblas_dynamic_quit();
__attribute__((weak)) void gotoblas_dynamic_init();
}

namespace terrace::trainer::cpu {
namespace {

constexpr const char* kChoice = "OPENBLAS_CORETYPE";

bool chosen_without_avx() {
  constexpr std::array<std::string_view, 8> kOld = {"Prescott", "Core2",     "Penryn",  "Dunnington",
                                                    "Nehalem",  "Barcelona", "Opteron", "Unknown"};
  return std::find(kOld.begin(), kOld.end(), std::string_view(blas_kernels_in_use())) != kOld.end();
}

const char* best_family() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return "SkylakeX";
  }
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? "Haswell" : nullptr;
}

}  // namespace

const char* blas_kernels_in_use() { return openblas_get_corename(); }

void choose_blas_kernels() {
  const char* family = best_family();
  if (gotoblas_dynamic_quit == nullptr || gotoblas_dynamic_init == nullptr || family == nullptr) return;
  if (std::getenv(kChoice) != nullptr || !chosen_without_avx()) return;
  // The variable is the library's only way to be told; children don't inherit it.
  if (::setenv(kChoice, family, 1) != 0) return;
  gotoblas_dynamic_quit();
  gotoblas_dynamic_init();
  (void)::unsetenv(kChoice);
}

}  // namespace terrace::trainer::cpu
