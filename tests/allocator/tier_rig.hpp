// Two emulated devices, what a tier is made of, and HBM that the host can look into, for tests of tiers.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "allocator/ddr_pool.hpp"
#include "allocator/tiers/ddr_tier.hpp"
#include "allocator/tiers/nvme_tier.hpp"
#include "allocator/tiers/peer_tier.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/emulated/emulated_device.hpp"

namespace terrace {

// A folder in the working directory (the build folder: a real file system), gone with the object.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string name = (std::filesystem::current_path() / "tier-test-XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

class TierRig {
 public:
  static constexpr Bytes kHbm = 4_MiB;

  TierRig()
      : device(std::move(EmulatedDevice::create(
                             {.capacity = kHbm, .h2d_bytes_per_second = 4e9, .d2h_bytes_per_second = 4e9}))
                   .value()),
        peer(std::move(EmulatedDevice::create({.capacity = 4_MiB})).value()),
        ddr(std::move(DdrPool::create(*device, {.budget = 16_MiB, .slab = 1_MiB})).value()),
        copies(std::move(CopyEngine::create(*device)).value()),
        compute(*device->create_stream(StreamPriority::kNormal)),
        hbm(*device->reserve(kHbm)),
        physical_(*device->create_physical(kHbm)) {
    EXPECT_TRUE(device->map(hbm, physical_, kHbm));
  }
  // What a tier took is given back: only what the rig itself holds is left.
  ~TierRig() {
    EXPECT_EQ(ddr->usage().live, 0_B);
    copies.reset();
    ddr.reset();
    device->destroy_stream(compute);
    EXPECT_TRUE(device->unmap(hbm, kHbm));
    device->destroy_physical(physical_);
    device->release(hbm, kHbm);
    for (const EmulatedDevice* each : {device.get(), peer.get()}) {
      EXPECT_EQ(each->live_physical(), 0_B);
      EXPECT_EQ(each->reserved_bytes(), 0_B);
      EXPECT_EQ(each->pinned_bytes(), 0_B);
      EXPECT_EQ(each->live_streams(), 0);
      EXPECT_EQ(each->live_events(), 0);
    }
  }
  TierRig(const TierRig&) = delete;
  TierRig& operator=(const TierRig&) = delete;

  [[nodiscard]] Result<std::unique_ptr<NvmeTier>> open_nvme(const NvmeTier::Options& options) {
    return NvmeTier::create(*device, *ddr, *copies, options);
  }

  ScratchFolder folder;
  std::unique_ptr<EmulatedDevice> device;
  std::unique_ptr<EmulatedDevice> peer;
  std::unique_ptr<DdrPool> ddr;
  std::unique_ptr<CopyEngine> copies;
  Stream compute;
  Address hbm;  // kHbm bytes, readable and writable by the host

 private:
  Physical physical_;
};

// Bytes that no other tag has.
inline void write_pattern(Address at, Bytes size, std::uint64_t tag) {
  std::mt19937_64 random(tag);
  for (std::uint64_t i = 0; i < size.count(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(at + i, &word, std::min<std::uint64_t>(8, size.count() - i));
  }
}

inline bool has_pattern(const std::byte* at, Bytes size, std::uint64_t tag) {
  std::vector<std::byte> expected(size.count());
  write_pattern(expected.data(), size, tag);
  return std::memcmp(at, expected.data(), size.count()) == 0;
}

}  // namespace terrace
