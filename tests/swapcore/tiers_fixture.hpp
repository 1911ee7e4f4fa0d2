// An emulated device with its pools, copy engine and residency store, for tests of what moves.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>

#include "swapcore/residency.hpp"

namespace terrace {

struct TierOptions {
  Bytes hbm = 8_MiB;
  Bytes ddr = 32_MiB;
  double link_bytes_per_second = 4e9;
  CopyEngine::Options copies{};
  Verify verify = Verify::kOff;
  Poison poison = kPoisonReleased;
};

class Tiers {
 public:
  explicit Tiers(const TierOptions& options)
      : device(std::move(open_emulated_device({.capacity = 64_MiB,
                                               .h2d_bytes_per_second = options.link_bytes_per_second,
                                               .d2h_bytes_per_second = options.link_bytes_per_second}))
                   .value()),
        compute(*device->create_stream(StreamPriority::kNormal)),
        hbm(std::move(HbmPool::create(*device, {.budget = options.hbm, .chunk = 64_KiB})).value()),
        ddr(std::move(DdrPool::create(
                          *device, {.budget = options.ddr, .slab = 256_KiB, .huge_pages = HugePages::kOff}))
                .value()),
        copies(std::move(CopyEngine::create(*device, options.copies)).value()),
        store(std::move(ResidencyStore::create({.device = *device,
                                                .hbm = *hbm,
                                                .ddr = *ddr,
                                                .copies = *copies,
                                                .compute = compute,
                                                .verify = options.verify,
                                                .poison = options.poison}))
                  .value()) {}
  ~Tiers() {
    store.reset();
    EXPECT_EQ(hbm->usage().live, 0_B);
    EXPECT_EQ(ddr->usage().live, 0_B);
    hbm.reset();
    ddr.reset();
    copies.reset();
    device->destroy_stream(compute);
    EXPECT_EQ(device->memory()->free, device->memory()->total);
  }

  // A block filled, in stream order, with a value of its own; null where HBM is full.
  BlockRef filled(Bytes size, std::uint8_t value) {
    auto block = hbm->allocate(compute, size, Pool::kActivation);
    if (!block) return nullptr;
    BlockRef ref(new Block(*block), [this](const Block* held) {
      EXPECT_TRUE(hbm->free(compute, *held));
      delete held;
    });
    if (!device->fill(compute, ref->address, value, size)) return nullptr;
    return ref;
  }
  // Whether the bytes, in stream order, are `value`: a sample that a wrong copy can't miss.
  bool holds(const BlockRef& block, std::uint8_t value) {
    bool same = true;
    EXPECT_TRUE(device->launch_host(compute, [&same, block, value] {
      for (std::uint64_t i = 0; i < block->size.count(); i += 61) {
        same = same && std::to_integer<std::uint8_t>(block->address[i]) == value;
      }
    }));
    EXPECT_TRUE(device->synchronize(compute));
    return same;
  }

  std::unique_ptr<Device> device;
  Stream compute;
  std::unique_ptr<HbmPool> hbm;
  std::unique_ptr<DdrPool> ddr;
  std::unique_ptr<CopyEngine> copies;
  std::unique_ptr<ResidencyStore> store;
};

}  // namespace terrace
