// bench_launch_scan: what reading a kernel launch's parameters for pointers costs
// (hooks/intercept/cuda/launch_view.hpp), and what counting its uses of blocks of stable addresses costs on
// top (guest_uses.hpp).
//
// For launches with a growing number of 8-byte parameters, all of them addresses inside live blocks of a pool
// with many, the median over batches of the time of one reading; the limit is 150 ns and 1 ns for each 8
// bytes. The same with blocks of stable addresses, all of them in HBM, from the first count to the last one
// dropped.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "hooks/intercept/cuda/guest_uses.hpp"
#include "hooks/intercept/cuda/launch_view.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"

extern "C" {
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxSetCurrent(void* context);
}

namespace {

using namespace terrace;
using namespace terrace::hooks::cuda;

constexpr int kBlocks = 20000, kStable = 200, kBatches = 301, kLaunches = 64;

std::vector<DevicePointer> fill_pool() {
  std::vector<DevicePointer> blocks;
  std::mt19937_64 random(1);
  for (int i = 0; i < kBlocks; ++i) {
    DevicePointer at = 0;
    const Bytes size(512 * (1 + random() % 64));
    if (stream_pools().allocate_always({nullptr, DefaultStream::kLegacy}, size, &at)) blocks.push_back(at);
  }
  return blocks;
}

// Blocks that may leave HBM, and here have no reason to.
std::vector<DevicePointer> fill_space() {
  std::vector<DevicePointer> blocks;
  for (int i = 0; i < kStable; ++i) {
    DevicePointer at = 0;
    if (stable_blocks().allocate(StableBlocks::Kind::kPlain, 2_MiB, nullptr, &at)) blocks.push_back(at);
  }
  return blocks;
}

constexpr std::size_t kPointers = 6;

// Launches of one kernel whose first parameters point somewhere into the blocks; the last is a structure.
struct Launches {
  std::vector<std::uint64_t> pointers, numbers;
  std::vector<void*> parameters;
};
Launches launches_of(const std::vector<DevicePointer>& blocks, std::size_t words) {
  Launches made;
  std::mt19937_64 random(2);
  for (std::size_t i = 0; i < kPointers * kLaunches; ++i)
    made.pointers.push_back(blocks[random() % blocks.size()] + random() % 512);
  for (std::size_t i = 0; i < words; ++i) made.numbers.push_back(random() % 100000);
  for (std::size_t i = 0; i < kLaunches; ++i) {
    for (std::size_t p = 0; p < kPointers; ++p) made.parameters.push_back(&made.pointers[i * kPointers + p]);
    made.parameters.push_back(made.numbers.data());
  }
  return made;
}

enum class What { kRead, kUse };

void one_launch(What what, const Launch& launch) {
  if (what == What::kRead) return see_launch(launch);
  GuestUses uses;
  uses.launch(launch, {nullptr, DefaultStream::kLegacy});
}

double median_nanoseconds(What what, const std::vector<DevicePointer>& blocks, std::size_t words) {
  Launches launches = launches_of(blocks, words);
  const auto kernel = reinterpret_cast<FunctionHandle>(0x1000 + words);
  std::vector<double> batches;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto began = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < kLaunches; ++i)
      one_launch(what, {kernel, launches.parameters.data() + i * (kPointers + 1)});
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    batches.push_back(took.count() / kLaunches);
  }
  std::nth_element(batches.begin(), batches.begin() + kBatches / 2, batches.end());
  return batches[kBatches / 2];
}

void measure(What what, const std::vector<DevicePointer>& blocks) {
  for (const std::size_t words : {std::size_t{2}, std::size_t{16}, std::size_t{128}, std::size_t{512}}) {
    const double took = median_nanoseconds(what, blocks, words);
    const std::size_t bytes = (kPointers + words) * 8;
    const nlohmann::ordered_json row{
        {"bench", "launch_scan"}, {"case", std::to_string(bytes) + " bytes"},
        {"system", "terrace"},    {"metric", what == What::kRead ? "read" : "use"},
        {"value", took},          {"unit", "ns"},
        {"floor", nullptr}};
    std::printf("%s\n", row.dump().c_str());
    const double limit = 150 + static_cast<double>(bytes) / 8;
    if (took > limit)
      std::fprintf(stderr, "bench_launch_scan: %zu bytes are over their %.0f ns\n", bytes, limit);
  }
}

}  // namespace

int main() {
  ::setenv("TERRACE_DDR_BUDGET", "1GiB", 1);  // read once, by what is measured
  void* context = nullptr;
  if (cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0 || cuCtxSetCurrent(context) != 0)
    return std::fprintf(stderr, "bench_launch_scan: no context on a device\n"), 1;
  const auto stable = fill_space();
  if (stable.size() < kStable)
    return std::fprintf(stderr, "bench_launch_scan: the space gave too little\n"), 1;
  measure(What::kUse, stable);
  const auto blocks = fill_pool();
  if (blocks.size() < kBlocks)
    return std::fprintf(stderr, "bench_launch_scan: the pool gave too little\n"), 1;
  measure(What::kRead, blocks);
  return 0;
}
