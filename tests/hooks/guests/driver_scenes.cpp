// Scenes in which a program with more blocks than its budget asks the driver about them, or for memory beside
// them.
#include <cstdint>
#include <vector>

#include "tests/hooks/guests/memory_scenes.hpp"
#include "tests/hooks/guests/mixed_blocks.hpp"

namespace terrace::guest {
namespace {

// How many blocks an answer is right for, asked of an address inside each.
template <typename Ask>
int answers(const Blocks& blocks, const Ask& ask) {
  int right = 0;
  for (const Pointer each : blocks.at) right += ask(each, each + kBlock - 8) ? 1 : 0;
  return right;
}

void questions() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(kTwice));
  void* stream = nullptr;
  cuStreamCreate(&stream, 0);
  // A launch that is seen: from now on what leaves is out of reach.
  launch(kernel("mix", mix, {8, 8}), stream, {blocks.at[30], blocks.at[31]});
  blocks.mixed(30, 31);
  cuStreamSynchronize(stream);
  say("more", blocks.add(16));
  const int all = static_cast<int>(blocks.at.size());
  say("in ddr", blocks.in_hbm() < all);
  say("range", answers(blocks, [](Pointer block, Pointer inside) {
        Pointer base = 0;
        std::size_t bytes = 0;
        return cuMemGetAddressRange_v2(&base, &bytes, inside) == 0 && base == block && bytes == kBlock &&
               cuMemGetAddressRange_v2(nullptr, &bytes, inside) == 0 &&
               cuMemGetAddressRange_v2(&base, nullptr, inside) == 0;
      }));
  say("access", answers(blocks, [](Pointer, Pointer inside) {
        const int device[2] = {1, 0};
        unsigned long long flags = 0;
        return cuMemGetAccess(&flags, device, inside) == 0 && flags == 3;
      }));
  say("attributes", answers(blocks, [](Pointer block, Pointer inside) {
        Pointer base = 0, bytes = 0;
        return cuPointerGetAttribute(&base, 11, inside) == 0 && base == block &&
               cuPointerGetAttribute(&bytes, 12, inside) == 0 && bytes == kBlock;
      }));
  Pointer base = 0, handle = 0;
  std::size_t bytes = 0;
  say("stranger", cuMemGetAddressRange_v2(&base, &bytes, 0x123456789000));
  // Blocks that are in DDR when somebody is given what reaches their memory past the driver.
  const auto now_in_hbm = [&](std::size_t n) { return loopback_in_hbm(blocks.at[n]); };
  say("were in hbm", now_in_hbm(0) + now_in_hbm(1) + now_in_hbm(2));
  say("retain", cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(blocks.at[0] + 8)));
  say("bind", cuMulticastBindAddr(1, 0, blocks.at[1], kBlock, 0));
  say("tokens", cuPointerGetAttribute(&base, 5, blocks.at[2]));
  say("are in hbm", now_in_hbm(0) + now_in_hbm(1) + now_in_hbm(2));
  say("wrong", blocks.wrong());
  say("release", cuMemRelease(handle));
}

// Memory that the driver serves itself, beside 14 blocks in room for 16: what cannot fit, what the driver
// refuses, and what comes and goes. Between them steps that use each block.
void native_memory() {
  cudaSetDevice(0);
  Blocks blocks;
  say("allocated", blocks.add(14));
  void* stream = nullptr;
  cuStreamCreate(&stream, 0);
  void* const mixes = kernel("mix", mix, {8, 8});
  const auto steps = [&] {
    for (int step = 0; step < 4; ++step) {
      for (std::size_t n = 0; n + 1 < blocks.at.size(); ++n) {
        launch(mixes, stream, {blocks.at[n], blocks.at[n + 1]});
        blocks.mixed(n, n + 1);
        cuStreamSynchronize(stream);
      }
    }
  };
  steps();
  const int on_device[8] = {1, 0, 1, 0};
  const std::size_t fits = 24 * kMiB, does_not = 64 * kMiB;
  Pointer out = 0;
  void* memory = nullptr;
  const Array what{does_not / 1024 / 4, 1024, 0x20, 1};
  say("too large", cuMemCreate(&out, does_not, on_device, 0));
  say("too large", cuMemAllocManaged(&out, does_not, 1));
  say("too large", cuArrayCreate_v2(&memory, &what));
  say("in hbm", blocks.in_hbm());
  steps();
  say("in hbm", blocks.in_hbm());

  loopback_refuse(fits);
  say("refused", cuMemCreate(&out, fits, on_device, 0));
  loopback_refuse(0);
  steps();
  say("in hbm", blocks.in_hbm());

  say("create", cuMemCreate(&out, fits, on_device, 0));
  say("gave way", blocks.in_hbm() < 14);
  say("release", cuMemRelease(out));
  steps();
  say("in hbm", blocks.in_hbm());

  const Array large{fits / 1024 / 4, 1024, 0x20, 1};
  say("create", cuArrayCreate_v2(&memory, &large));
  say("release", cuArrayDestroy(memory));
  steps();
  say("in hbm", blocks.in_hbm());
  say("wrong", blocks.wrong());
}

}  // namespace

const std::map<std::string_view, std::function<void()>>& driver_scenes() {
  static const std::map<std::string_view, std::function<void()>> scenes = {
      {"questions", questions},
      {"native-memory", native_memory},
  };
  return scenes;
}

}  // namespace terrace::guest
