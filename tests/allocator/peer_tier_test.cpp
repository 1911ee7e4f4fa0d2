// What the peer tier alone promises; the rest is asked of every tier in tier_test.cpp.
#include "allocator/tiers/peer_tier.hpp"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/allocator/tier_rig.hpp"
#include "tests/runtime/passing_device.hpp"

namespace terrace {
namespace {

TEST(PeerTier, MemoryIsThePeersAndInsideTheBudget) {
  TierRig rig;
  auto tier = std::move(PeerTier::create(*rig.device, *rig.peer, {.budget = 1_MiB, .slab = 256_KiB})).value();
  EXPECT_EQ(rig.peer->live_physical(), 0_B) << "nothing before it is needed";
  const Bytes own = rig.device->live_physical();
  const TierBlock block = *tier->allocate(100_KiB, Pool::kActivation);
  EXPECT_EQ(rig.peer->live_physical(), 256_KiB);
  EXPECT_EQ(rig.device->live_physical(), own);
  EXPECT_EQ(tier->usage().mapped, 256_KiB);
  EXPECT_TRUE(tier->info().stream_ordered);
  EXPECT_TRUE(tier->info().device_addressable);
  EXPECT_TRUE(tier->free(block));
}

TEST(PeerTier, FreeSlabsMakeWayForALargerBlock) {
  TierRig rig;
  auto tier = std::move(PeerTier::create(*rig.device, *rig.peer, {.budget = 1_MiB, .slab = 256_KiB})).value();
  std::vector<TierBlock> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(*tier->allocate(256_KiB, Pool::kActivation));
  EXPECT_EQ(tier->usage().mapped, 1_MiB);
  for (int i = 1; i < 4; ++i) EXPECT_TRUE(tier->free(blocks[static_cast<std::size_t>(i)]));
  const auto large = tier->allocate(700_KiB, Pool::kActivation);
  ASSERT_TRUE(large);
  EXPECT_LE(rig.peer->live_physical(), 1_MiB);
  EXPECT_FALSE(tier->allocate(256_KiB, Pool::kActivation)) << "the first block still holds its slab";
  EXPECT_TRUE(tier->free(*large));
  EXPECT_TRUE(tier->free(blocks[0]));
}

TEST(PeerTier, APeerThatIsFullIsOutOfMemory) {
  TierRig rig;
  auto tier = std::move(PeerTier::create(*rig.device, *rig.peer, {.budget = 64_MiB, .slab = 1_MiB})).value();
  std::vector<TierBlock> blocks;
  auto block = tier->allocate(1_MiB, Pool::kActivation);
  for (; block; block = tier->allocate(1_MiB, Pool::kActivation)) blocks.push_back(*block);
  EXPECT_EQ(block.error().code, Errc::kOutOfMemory);
  EXPECT_EQ(blocks.size(), 4U);
  for (const TierBlock& each : blocks) EXPECT_TRUE(tier->free(each));
}

TEST(PeerTier, ADeviceIsNoPeerOfItsOwn) {
  TierRig rig;
  EXPECT_EQ(PeerTier::create(*rig.device, *rig.device, {.budget = 1_MiB}).error().code,
            Errc::kInvalidArgument);
}

// A peer behind no common path: what a GPU says of a device of another kind.
class Unreachable final : public PassingDevice {
 public:
  using PassingDevice::PassingDevice;
  Status grant_access_to(const Device&) override {
    return Error{.code = Errc::kNotSupported, .text = "no path"};
  }
};

TEST(PeerTier, NoPathBetweenTheTwoIsNotSupported) {
  TierRig rig;
  Unreachable peer(*rig.peer);
  const auto refused = PeerTier::create(*rig.device, peer, {.budget = 1_MiB});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kNotSupported);
}

}  // namespace
}  // namespace terrace
