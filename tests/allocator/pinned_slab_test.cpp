#include "allocator/pinned_slab.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numa.h>
#include <numaif.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "runtime/pin_step.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;

Bytes address_space_used() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return Bytes(pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)));
}

class PinnedSlabTest : public testing::Test {
 protected:
  std::unique_ptr<EmulatedDevice> device_ = std::move(EmulatedDevice::create({.capacity = 1_MiB})).value();
};

TEST_F(PinnedSlabTest, IsAlignedWritableAndPinnedAsLongAsItLives) {
  {
    const auto slab = std::move(PinnedSlab::create(*device_, 3_MiB + 4_KiB, {})).value();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(slab->base()) % kPinStep.count(), 0U);
    EXPECT_EQ(slab->size(), 3_MiB + 4_KiB);
    EXPECT_EQ(device_->pinned_bytes(), slab->size());
    std::memset(slab->base(), 1, slab->size().count());
  }
  EXPECT_EQ(device_->pinned_bytes(), 0_B);
}

TEST_F(PinnedSlabTest, TwoSlabsNeverTouch) {
  std::vector<std::unique_ptr<PinnedSlab>> slabs;
  for (int i = 0; i < 3; ++i) slabs.push_back(std::move(PinnedSlab::create(*device_, kPinStep, {})).value());
  for (const auto& a : slabs) {
    for (const auto& b : slabs) EXPECT_NE(a->end(), b->base());
  }
}

TEST_F(PinnedSlabTest, ExplicitHugePagesFallBackToTransparentOnes) {
  const SlabOptions wanted{.huge_pages = HugePages::kExplicit};
  const auto odd = std::move(PinnedSlab::create(*device_, 2_MiB + 4_KiB, wanted)).value();
  EXPECT_EQ(odd->pages(), HugePages::kTransparent) << "no whole number of huge pages";
  // The system may have some set aside; refused they are when the call fails.
  for (const std::uint64_t nth : {1U, 2U}) {
    ScopedFaults faults(fail_call(FaultPoint::kHostTouch, nth));
    const auto slab = std::move(PinnedSlab::create(*device_, 2_MiB, wanted));
    if (slab) std::memset((*slab)->base(), 1, 2'097'152);
  }
  const auto slab = std::move(PinnedSlab::create(*device_, 2_MiB, wanted)).value();
  std::memset(slab->base(), 1, slab->size().count());
}

TEST_F(PinnedSlabTest, WhicheverCallFailsNothingIsLeft) {
  for (const HugePages pages : {HugePages::kOff, HugePages::kTransparent, HugePages::kExplicit}) {
    for (std::uint64_t nth = 1;; ++nth) {
      ScopedFaults faults(fail_call(nth));
      const auto slab = PinnedSlab::create(*device_, 10_MiB, {.huge_pages = pages});
      if (!faults.fired()) break;
      ASSERT_LT(nth, 20U);
      if (slab) continue;  // explicit pages refused: others took their place
      EXPECT_EQ(slab.error().code, Errc::kOutOfMemory);
      EXPECT_THAT(slab.error().text, HasSubstr("leaves least"));
      EXPECT_EQ(device_->pinned_bytes(), 0_B);
    }
  }
  const Bytes before = address_space_used();
  for (int i = 0; i < 100; ++i) {
    ScopedFaults faults(fail_call(FaultPoint::kDevicePin, 1));
    EXPECT_FALSE(PinnedSlab::create(*device_, 4_MiB, {.touching_threads = 1}));
  }
  EXPECT_LT(address_space_used(), before + 200_MiB) << "a hundred slabs of 4 MiB would show";
}

TEST_F(PinnedSlabTest, MoreThanTheMachineHasIsRefusedByName) {
  const auto slab = PinnedSlab::create(*device_, 1024_GiB * 16, {});
  ASSERT_FALSE(slab);
  EXPECT_EQ(slab.error().code, Errc::kOutOfMemory);
  EXPECT_THAT(slab.error().text, HasSubstr("leaves least"));
  EXPECT_FALSE(PinnedSlab::create(*device_, round_down(Bytes(UINT64_MAX), 4_KiB), {}));
}

// The flags of the mapping that starts at an address, as /proc/self/smaps has them; empty: it does not say.
std::string flags_of_mapping_at(const std::byte* base) {
  std::ostringstream start;
  start << std::hex << reinterpret_cast<std::uintptr_t>(base) << '-';
  std::ifstream smaps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.rfind(start.str(), 0) == 0) here = true;
    if (here && line.rfind("VmFlags:", 0) == 0) return line;
  }
  return {};
}

TEST_F(PinnedSlabTest, AChildOfForkDoesNotHaveIt) {
  const auto slab = std::move(PinnedSlab::create(*device_, 2_MiB, {})).value();
  const std::string flags = flags_of_mapping_at(slab->base());
  if (flags.empty()) GTEST_SKIP() << "this system does not say what a fork copies";
  EXPECT_THAT(flags, HasSubstr(" dc")) << "do not copy on fork";
}

TEST_F(PinnedSlabTest, MemoryIsWantedOnTheNodesNamed) {
  int mode = MPOL_DEFAULT;
  if (numa_available() < 0 || get_mempolicy(&mode, nullptr, 0, nullptr, 0) != 0) {
    GTEST_SKIP() << "this system lets nobody ask where memory is";
  }
  for (const bool bound : {false, true}) {
    const auto slab =
        std::move(PinnedSlab::create(*device_, 1_MiB,
                                     {.numa_nodes = bound ? std::vector<int>{0} : std::vector<int>{}}))
            .value();
    ASSERT_EQ(get_mempolicy(&mode, nullptr, 0, slab->base(), MPOL_F_ADDR), 0);
    EXPECT_EQ(mode, bound ? MPOL_PREFERRED : MPOL_DEFAULT);
  }
}

TEST(NumaNodes, OneThatIsNotThereIsRefusedByName) {
  EXPECT_TRUE(check_numa_nodes({}).ok());
  if (numa_available() < 0) GTEST_SKIP() << "this system knows no NUMA nodes";
  EXPECT_TRUE(check_numa_nodes({0}).ok());
  for (const int node : {-1, 900, 4'000'000}) {
    const Status refused = check_numa_nodes({0, node});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
    EXPECT_THAT(refused.error().text, HasSubstr("NUMA node " + std::to_string(node) + " does not exist"));
  }
}

}  // namespace
}  // namespace terrace
