// A plain CUDA program that knows nothing of Terrace: its blocks, all of them used in every step, may be more
// than the GPU has. bench/oversubscribed.py runs it with and without a budget.
//
//   for each step, for each block b:   block[b] = mix(block[b], block[b + 1])   `passes` times over, on one
//   stream
//
// Prints one JSON line: seconds a step, copy rates measured before, what the context takes, and a checksum of
// every bit of every block. Linked with the static runtime.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using Word = unsigned long long;

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "oversubscribed: %s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}

__device__ Word scattered(Word x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

__global__ void fill(Word* out, std::size_t words, Word seed) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += stride)
    out[i] = scattered(seed * words + i);
}

// Each pass reads both blocks and writes one: 3 * 8 bytes a word.
__global__ void mix(Word* out, const Word* in, std::size_t words, int passes) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (int pass = 0; pass < passes; ++pass) {
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += stride)
      out[i] = scattered(out[i] + pass) ^ (in[i] << 1);
  }
}

// Every bit counts, wherever it is; the order of the additions does not.
__global__ void checksum(const Word* block, std::size_t words, Word* sum) {
  Word own = 0;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += stride)
    own += scattered(block[i] ^ scattered(i));
  atomicAdd(sum, own);
}

constexpr int kGrid = 132 * 8, kThreads = 256;

struct Options {
  std::size_t blocks = 64, block_mib = 1024;
  int steps = 12, passes = 16;
};

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const long value = std::atol(argv[i + 1]);
    if (std::strcmp(argv[i], "--blocks") == 0) options.blocks = static_cast<std::size_t>(value);
    if (std::strcmp(argv[i], "--block-mib") == 0) options.block_mib = static_cast<std::size_t>(value);
    if (std::strcmp(argv[i], "--steps") == 0) options.steps = static_cast<int>(value);
    if (std::strcmp(argv[i], "--passes") == 0) options.passes = static_cast<int>(value);
    if (value < 1 || options.blocks < 2) {
      std::fprintf(stderr, "oversubscribed: %s %s: at least 1, and 2 blocks\n", argv[i], argv[i + 1]);
      std::exit(2);
    }
  }
  return options;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Rates {
  double h2d, d2h, both;  // bytes a second
};

Rates measure_link() {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  constexpr int kTimes = 8;
  void *host[2], *device[2];
  cudaStream_t streams[2];
  for (int i = 0; i < 2; ++i) {
    check(cudaMallocHost(&host[i], kBytes), "cudaMallocHost");
    check(cudaMalloc(&device[i], kBytes), "cudaMalloc");
    check(cudaStreamCreate(&streams[i]), "cudaStreamCreate");
  }
  enum class Way { kUp, kDown, kBoth };
  const auto rate = [&](Way way) {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const double from = now();
    for (int i = 0; i < kTimes; ++i) {
      if (way != Way::kDown)
        check(cudaMemcpyAsync(device[0], host[0], kBytes, cudaMemcpyHostToDevice, streams[0]), "copy");
      if (way != Way::kUp)
        check(cudaMemcpyAsync(host[1], device[1], kBytes, cudaMemcpyDeviceToHost, streams[1]), "copy");
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return kTimes * static_cast<double>(kBytes) * (way == Way::kBoth ? 2 : 1) / (now() - from);
  };
  (void)rate(Way::kBoth);  // the first is slower
  const Rates rates{rate(Way::kUp), rate(Way::kDown), rate(Way::kBoth)};
  for (int i = 0; i < 2; ++i) {
    check(cudaFree(device[i]), "cudaFree");
    check(cudaFreeHost(host[i]), "cudaFreeHost");
    check(cudaStreamDestroy(streams[i]), "cudaStreamDestroy");
  }
  return rates;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = options_of(argc, argv);
  std::size_t available = 0, total = 0;
  check(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
  const std::size_t context = total - available;
  const Rates link = measure_link();
  const std::size_t bytes = options.block_mib << 20, words = bytes / sizeof(Word);
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  std::vector<Word*> blocks(options.blocks);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    check(cudaMalloc(&blocks[b], bytes), "cudaMalloc");
    fill<<<kGrid, kThreads, 0, stream>>>(blocks[b], words, b);
  }
  std::vector<double> steps;
  for (int step = 0; step < options.steps; ++step) {
    const double from = now();
    for (std::size_t b = 0; b < blocks.size(); ++b)
      mix<<<kGrid, kThreads, 0, stream>>>(blocks[b], blocks[(b + 1) % blocks.size()], words, options.passes);
    check(cudaStreamSynchronize(stream), "a step");
    steps.push_back(now() - from);
  }
  Word* sum = nullptr;
  check(cudaMalloc(&sum, sizeof *sum), "cudaMalloc");
  check(cudaMemset(sum, 0, sizeof *sum), "cudaMemset");
  for (Word* block : blocks) checksum<<<kGrid, kThreads, 0, stream>>>(block, words, sum);
  Word result = 0;
  check(cudaStreamSynchronize(stream), "the checksum");
  check(cudaMemcpy(&result, sum, sizeof result, cudaMemcpyDeviceToHost), "cudaMemcpy");
  // The first half is for learning.
  std::vector<double> settled(steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2), steps.end());
  std::sort(settled.begin(), settled.end());
  std::printf(
      "{\"step_seconds\": %.6f, \"h2d\": %.0f, \"d2h\": %.0f, \"both\": %.0f, \"context_bytes\": %zu, "
      "\"checksum\": \"%016llx\", \"all_steps\": [",
      settled[settled.size() / 2], link.h2d, link.d2h, link.both, context, result);
  for (std::size_t i = 0; i < steps.size(); ++i) std::printf("%s%.6f", i == 0 ? "" : ", ", steps[i]);
  std::printf("]}\n");
  for (Word* block : blocks) check(cudaFree(block), "cudaFree");
  return 0;
}
