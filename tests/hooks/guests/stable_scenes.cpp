// Scenes in which a program uses more memory than its budget, by pointers that never change. Kernels are
// functions of the host that read and write through them when their turn comes on a stream.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/hooks/guests/memory_scenes.hpp"
#include "tests/hooks/guests/mixed_blocks.hpp"

namespace terrace::guest {
namespace {

// As mix(), of what a table in device memory points to, and slowly: what travels meanwhile is lost.
void mix_by_table(void** parameters) {
  auto* const table = *static_cast<std::uint64_t***>(parameters[0]);
  int done = 0;
  each_index([&](std::size_t i) {
    if (++done % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    table[0][i] = table[0][i] * 3 + table[1][i];
  });
}
// As mix(), slowly.
void slow_mix(void** parameters) {
  auto* const out = *static_cast<std::uint64_t**>(parameters[0]);
  const auto* const in = *static_cast<std::uint64_t**>(parameters[1]);
  int done = 0;
  each_index([&](std::size_t i) {
    if (++done % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    out[i] = out[i] * 3 + in[i];
  });
}
void rest(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Writes such a table.
void point(void** parameters) {
  auto* const table = *static_cast<Pointer**>(parameters[0]);
  table[0] = *static_cast<Pointer*>(parameters[1]);
  table[1] = *static_cast<Pointer*>(parameters[2]);
}

void twice_the_budget() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(kTwice));
  void *stream = nullptr, *other = nullptr;
  cuStreamCreate(&stream, 0);
  cuStreamCreate(&other, 0);
  void* const mixes = kernel("mix", mix, {8, 8});
  int failed = 0;
  for (int step = 0; step < 6; ++step) {
    for (std::size_t n = 0; n + 1 < blocks.at.size(); ++n) {
      failed += launch(mixes, n % 16 < 8 ? stream : other, {blocks.at[n], blocks.at[n + 1]}) != 0;
      blocks.mixed(n, n + 1);
      if (n % 8 == 7) cuStreamSynchronize(n % 16 < 8 ? stream : other);  // the next is on the other stream
    }
    cuCtxSynchronize();
  }
  say("failed", failed);
  say("wrong", blocks.wrong());
  say("over the budget", loopback_used(0) > 96 * kMiB);
  say("in ddr", blocks.in_hbm() < kTwice);
  blocks.free_all();
  say("freed twice", cuMemFree_v2(0x7fff12345000));
  void* all = nullptr;
  say("room again", cudaMalloc(&all, 28 * kMiB));
}

// With 15 blocks HBM is full. All but the first two are used now, so that these are the first to leave.
void use_the_others(Blocks& blocks, void* stream) {
  static void* const mixes = kernel("mix", mix, {8, 8});
  for (std::size_t n = 2; n < 14; ++n) {
    launch(mixes, stream, {blocks.at[n], blocks.at[n + 1]});
    blocks.mixed(n, n + 1);
  }
  cuStreamSynchronize(stream);
}
// One more makes them leave.
void want_room() {
  void* more = nullptr;
  say("more", cudaMalloc(&more, kBlock));
  cuCtxSynchronize();
  cudaFree(more);
}

// A kernel that runs when its blocks are wanted away, and others that are launched while they travel.
void under_kernels() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(15));
  void *slow = nullptr, *fast = nullptr;
  cuStreamCreate(&slow, 0);
  cuStreamCreate(&fast, 0);
  void* const mixes = kernel("mix", mix, {8, 8});
  void* const slow_mixes = kernel("slow_mix", slow_mix, {8, 8});
  for (int round = 0; round < 5; ++round) {
    launch(slow_mixes, slow, {blocks.at[0], blocks.at[1]});
    blocks.mixed(0, 1);
    use_the_others(blocks, fast);
    std::thread racing([&] {
      cudaSetDevice(0);
      for (int times = 0; times < 4; ++times) launch(mixes, slow, {blocks.at[0], blocks.at[1]});
    });
    for (int times = 0; times < 4; ++times) blocks.mixed(0, 1);
    void* more = nullptr;
    say("more", cudaMalloc(&more, 2 * kBlock));
    racing.join();
    cuCtxSynchronize();
    cudaFree(more);
  }
  say("wrong", blocks.wrong());
}

// The pointers of a multiplication lie in device memory: written there by a kernel, or by a copy, and used
// some time later, when nothing else says any more that the two blocks are in use.
void by_tables(const char* name, int told) {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(15));
  void *stream = nullptr, *other = nullptr, *table = nullptr;
  cuStreamCreate(&stream, 0);
  cuStreamCreate(&other, 0);
  say("table", cudaMalloc(&table, 512));
  void* const points = kernel("point", point, {8, 8, 8});
  void* const grouped = kernel(name, mix_by_table, {8}, told);
  for (int round = 0; round < 4; ++round) {
    launch(points, stream, {number(table), blocks.at[0], blocks.at[1]});
    use_the_others(blocks, stream);
    launch(grouped, other, {number(table)});
    blocks.mixed(0, 1);
    rest(2);  // until it runs
    want_room();
  }
  say("wrong", blocks.wrong());
}

void tables_from_host() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(15));
  void *stream = nullptr, *other = nullptr, *table = nullptr;
  cuStreamCreate(&stream, 0);
  cuStreamCreate(&other, 0);
  say("table", cudaMalloc(&table, 512));
  void* const innocent = kernel("a_name_that_says_nothing", mix_by_table, {8});
  for (int round = 0; round < 4; ++round) {
    const Pointer pair[2] = {blocks.at[0], blocks.at[1]};
    cuMemcpyHtoD_v2(number(table), pair, sizeof pair);
    use_the_others(blocks, stream);
    launch(innocent, other, {number(table)});
    blocks.mixed(0, 1);
    rest(2);
    want_room();
  }
  say("wrong", blocks.wrong());
}

// Both operands are in tensor maps, whose form is the driver's.
struct TwoMaps {
  Pointer words[2][16];
};
void mix_by_maps(void** parameters) {
  const auto* const maps = static_cast<TwoMaps*>(parameters[0]);
  Pointer pair[2] = {~maps->words[0][0], ~maps->words[1][0]};
  void* const plain[2] = {&pair[0], &pair[1]};
  slow_mix(const_cast<void**>(plain));
}
void tensor_maps() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(15));
  void *stream = nullptr, *other = nullptr;
  cuStreamCreate(&stream, 0);
  cuStreamCreate(&other, 0);
  void* const hidden = kernel("tma_kernel", mix_by_maps, {sizeof(TwoMaps)});
  for (int round = 0; round < 4; ++round) {
    TwoMaps maps{};
    for (int i = 0; i < 2; ++i) {
      cuTensorMapEncodeTiled(maps.words[i], 0, 1,
                             reinterpret_cast<void*>(blocks.at[static_cast<std::size_t>(i)]), nullptr,
                             nullptr, nullptr, nullptr, 0, 0, 0, 0);
    }
    use_the_others(blocks, stream);
    void* parameters[] = {&maps};
    cudaLaunchKernel(hidden, {1, 1, 1}, {1, 1, 1}, parameters, 0, other);
    blocks.mixed(0, 1);
    rest(2);
    want_room();
  }
  say("wrong", blocks.wrong());
}

void captured() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(24));  // the first ones are in DDR by now
  void *stream = nullptr, *graph = nullptr;
  cuStreamCreate(&stream, 0);
  void* const mixes = kernel("mix", mix, {8, 8});
  say("begin", cuStreamBeginCapture_v2(stream, 0));
  launch(mixes, stream, {blocks.at[0], blocks.at[23]});
  launch(mixes, stream, {blocks.at[23], blocks.at[1]});
  say("captured free", cuMemFree_v2(blocks.at[22]));
  blocks.at[22] = 0;
  say("end", cuStreamEndCapture(stream, &graph));
  for (int round = 0; round < 4; ++round) {
    for (std::size_t n = 2; n < 20; ++n) {
      launch(mixes, stream, {blocks.at[n], blocks.at[n + 1]});
      blocks.mixed(n, n + 1);
    }
    say("replay", cuGraphLaunch(graph, stream));
    blocks.mixed(0, 23);
    blocks.mixed(23, 1);
    cuStreamSynchronize(stream);
  }
  say("wrong", blocks.wrong());
}

void reset_of_frees() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(kTwice));
  say("in ddr", blocks.in_hbm() < kTwice);
  int failed = 0, device = 0;
  for (const Pointer each : blocks.at) {
    unsigned type = 0;
    device += cuPointerGetAttribute(&type, 2, each) == 0 && type == 2;
  }
  say("device memory", device);
  for (Pointer& each : blocks.at) failed += cuMemFree_v2(each) != 0;  // half of them lie in DDR
  say("failed", failed);
  say("twice", cuMemFree_v2(blocks.at[0]));
  say("inside", cuMemFree_v2(blocks.at[1] + 512));
  say("stranger", cuMemFree_v2(0x123456789000));
  say("nothing", cuMemFree_v2(0));
  blocks.at.clear();
  say("again", blocks.add(kTwice));
  say("wrong", blocks.wrong());
}

void peers() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(kTwice));
  void* context = nullptr;
  cuDevicePrimaryCtxRetain(&context, 0);
  cudaSetDevice(1);
  say("enabled", cuCtxEnablePeerAccess(context, 0));
  // What device 1 reaches stays where it is; what comes back from DDR is open to it as well.
  int open = 0;
  for (const Pointer each : blocks.at) open += loopback_access(each) == 3 ? 1 : 0;
  say("open", open);
  void* stream = nullptr;
  cuStreamCreate(&stream, 0);
  void* const mixes = kernel("mix", mix, {8, 8});
  for (std::size_t n = 0; n + 1 < 8; ++n) {
    launch(mixes, stream, {blocks.at[n], blocks.at[n + 1]});
    blocks.mixed(n, n + 1);
  }
  cuCtxSynchronize();
  cudaSetDevice(0);
  say("wrong", blocks.wrong());
}

void own_streams_of_threads() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(15));
  void* stream = nullptr;
  cuStreamCreate(&stream, 0);
  void* const mixes = kernel("mix", mix, {8, 8});
  void* const slow = kernel("slow_mix", slow_mix, {8, 8});
  for (int round = 0; round < 3; ++round) {
    std::thread([&] {
      cudaSetDevice(0);
      for (std::size_t n = 0; n < 3; ++n)
        launch(slow, reinterpret_cast<void*>(2), {blocks.at[n], blocks.at[n + 1]});
    }).join();
    for (std::size_t n = 0; n < 3; ++n) blocks.mixed(n, n + 1);
    // All others are used after those, which are now the first to leave.
    for (std::size_t n = 4; n < 14; ++n) {
      launch(mixes, stream, {blocks.at[n], blocks.at[n + 1]});
      blocks.mixed(n, n + 1);
    }
    cuStreamSynchronize(stream);
    say("more", blocks.add(3));
    cuCtxSynchronize();
  }
  say("wrong", blocks.wrong());
}

void ordered() {
  cudaSetDevice(0);
  void *stream = nullptr, *first = nullptr, *second = nullptr, *small = nullptr;
  cuStreamCreate(&stream, 0);
  say("malloc", cudaMallocAsync(&first, 40 * kMiB, stream));
  say("malloc", cudaMallocAsync(&second, 40 * kMiB, stream));
  say("small", cudaMallocAsync(&small, 8 * kMiB, stream));
  cuMemsetD8Async(number(first), 7, 40 * kMiB, stream);
  cuMemsetD8Async(number(second), 9, 40 * kMiB, stream);
  unsigned char bytes[2] = {};
  cuStreamSynchronize(stream);
  cuMemcpyDtoH_v2(&bytes[0], number(first) + 40 * kMiB - 1, 1);
  cuMemcpyDtoH_v2(&bytes[1], number(second), 1);
  say("bytes", bytes[0] * 10 + bytes[1]);
  say("free", cudaFreeAsync(first, stream));
  say("free", cudaFreeAsync(second, stream));
  say("free", cudaFreeAsync(small, stream));
  say("free twice", cudaFreeAsync(first, stream));
}

void forked_and_ended() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(kTwice));
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    void* own = nullptr;
    // What its parent holds is other processes' to it, so that there may be no room.
    const int code = cudaMalloc(&own, 8 * kMiB);
    std::exit(code == 0 ? cudaFree(own) : code == 2 ? 0 : code);
  }
  int status = -1;
  waitpid(child, &status, 0);
  say("child", status);
  say("wrong", blocks.wrong());
  static Blocks late;
  late.at = blocks.at;
  std::fflush(stdout);
  std::atexit([] {
    int failed = 0;
    for (const Pointer each : late.at) failed += cuMemFree_v2(each) != 0;
    std::fprintf(stderr, "late %d\n", failed);
  });
}

// Libraries loaded locally: one multiplies by operands that no launch names, one registers a buffer.
void libraries() {
  cudaSetDevice(0);
  void* const blas = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
  void* const nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (blas == nullptr || nccl == nullptr) return say("libraries", 0);
  using Multiply = int (*)(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                           const void*, void*, void*, void*, const void*, void*, std::size_t, void*);
  const auto multiply = reinterpret_cast<Multiply>(dlsym(blas, "cublasLtMatmul"));
  const auto enroll =
      reinterpret_cast<int (*)(void*, void*, std::size_t, void**)>(dlsym(nccl, "ncclCommRegister"));
  Blocks blocks;
  say("allocated", blocks.add(16));
  void *stream = nullptr, *handle = nullptr;
  cuStreamCreate(&stream, 0);
  say("register", enroll(nullptr, reinterpret_cast<void*>(blocks.at[15]), kBlock, &handle));
  for (std::size_t n = 0; n < 8; ++n) {
    say("multiply", multiply(nullptr, nullptr, nullptr, reinterpret_cast<void*>(blocks.at[n + 1]), nullptr,
                             nullptr, nullptr, nullptr, nullptr, nullptr,
                             reinterpret_cast<void*>(blocks.at[n]), nullptr, nullptr, nullptr, 0, stream));
    blocks.mixed(n, n + 1);
    rest(2);  // until it runs
    if (n % 2 == 0) say("more", blocks.add(1));
    cuStreamSynchronize(stream);
  }
  say("wrong", blocks.wrong());
}

// A block that is in DDR is shown to another program, which writes into it.
void exports() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(kTwice));
  IpcHandle handle{};
  say("export", cuIpcGetMemHandle(&handle, blocks.at[0]));
  say("in hbm", loopback_in_hbm(blocks.at[0]));
  std::string text;
  for (const char c : handle.opaque) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(c));
    text += two;
  }
  setenv("GUEST_HANDLE", text.c_str(), 1);
  std::fflush(stdout);
  say("other", std::system("\"$(readlink /proc/$PPID/exe)\" imports"));
  blocks.expected[0][0] = 4242;
  say("wrong", blocks.wrong());
  say("free", cuMemFree_v2(blocks.at[0]));
}

void imports() {
  cudaSetDevice(0);
  IpcHandle handle{};
  const std::string text = std::getenv("GUEST_HANDLE");
  for (std::size_t i = 0; i < sizeof handle.opaque; ++i)
    handle.opaque[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  Pointer at = 0;
  say("open", cuIpcOpenMemHandle_v2(&at, handle, 1));
  if (at == 0) return;
  std::uint64_t word = 0;
  cuMemcpyDtoH_v2(&word, at + (kWords - 1) * 8, 8);
  say("seen", word == word_at(0, kWords - 1));
  word = 4242;
  cuMemcpyHtoD_v2(at, &word, 8);
  say("close", cuIpcCloseMemHandle(at));
  say("again", cuIpcCloseMemHandle(at));
}

// The daemon wants half of it back while the program computes.
void shrinks() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(15));
  void* stream = nullptr;
  cuStreamCreate(&stream, 0);
  void* const mixes = kernel("mix", mix, {8, 8});
  int steps = 0;
  for (; steps < 2000 && (steps < 3 || loopback_used(0) > 80 * kMiB); ++steps) {
    const std::size_t n = static_cast<std::size_t>(steps) % 14;
    launch(mixes, stream, {blocks.at[n], blocks.at[n + 1]});
    blocks.mixed(n, n + 1);
    cuStreamSynchronize(stream);
    rest(1);
  }
  say("came down", loopback_used(0) <= 80 * kMiB);
  say("wrong", blocks.wrong());
}

// With a budget of 72 MiB: four blocks. All of it once, so that each driver call can fail in turn: what the
// program was told went well has the right bytes.
void stable_faults() {
  alarm(100);  // who hangs is ended, and says so
  cudaSetDevice(0);
  void* stream = nullptr;
  const bool has_stream = cuStreamCreate(&stream, 0) == 0;
  void* const mixes = kernel("mix", mix, {8, 8});
  Blocks blocks;
  for (int n = 0; n < 6; ++n) blocks.add(1);
  for (std::size_t n = 0; has_stream && n + 1 < blocks.at.size(); ++n) {
    if (launch(mixes, stream, {blocks.at[n], blocks.at[n + 1]}) == 0) blocks.mixed(n, n + 1);
  }
  int tries = 0;
  while (cuCtxSynchronize() != 0 && ++tries < 3) {
  }
  int wrong = 0;
  std::vector<std::uint64_t> host(kWords);
  for (std::size_t n = 0; n < blocks.at.size(); ++n) {
    tries = 0;
    while (cuMemcpyDtoH_v2(host.data(), blocks.at[n], kBlock) != 0 && ++tries < 3) {
    }
    std::vector<std::uint64_t> seen;
    each_index([&](std::size_t i) { seen.push_back(host[i]); });
    wrong += seen == blocks.expected[n] ? 0 : 1;
  }
  say("blocks", static_cast<long long>(blocks.at.size()));
  say("wrong", wrong);
  say("over the budget", loopback_used(0) > 72 * kMiB);
  blocks.free_all();
  say("calls", loopback_calls());
  void* none = nullptr;
  say("after all", cudaMalloc(&none, kBlock));
}

}  // namespace

const std::map<std::string_view, std::function<void()>>& stable_scenes() {
  static const std::map<std::string_view, std::function<void()>> scenes = {
      {"twice", twice_the_budget},
      {"under-kernels", under_kernels},
      {"grouped", [] { by_tables("gemm_grouped_kernel", 1); }},
      {"untold", [] { by_tables("whatever", 0); }},
      {"tables-from-host", tables_from_host},
      {"tensor-maps", tensor_maps},
      {"captured", captured},
      {"frees", reset_of_frees},
      {"peers", peers},
      {"threads-own", own_streams_of_threads},
      {"ordered", ordered},
      {"ends", forked_and_ended},
      {"exports", exports},
      {"imports", imports},
      {"libraries", libraries},
      {"shrinks", shrinks},
      {"stable-faults", stable_faults},
  };
  return scenes;
}

}  // namespace terrace::guest
