// What the peer tier alone promises; the rest is asked of every tier in tier_test.cpp.
#include "allocator/tiers/peer_tier.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "tests/allocator/tier_rig.hpp"

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
class Unreachable final : public Device {
 public:
  explicit Unreachable(Device& real) : real_(real) {}
  Status grant_access_to(const Device&) override {
    return Error{.code = Errc::kNotSupported, .text = "no path"};
  }

  // The rest as it is.
  const DeviceInfo& info() const override { return real_.info(); }
  Result<Address> reserve(Bytes size) override { return real_.reserve(size); }
  void release(Address address, Bytes size) override { real_.release(address, size); }
  Result<Physical> create_physical(Bytes size) override { return real_.create_physical(size); }
  Result<Physical> create_host_physical(Bytes size, int node) override {
    return real_.create_host_physical(size, node);
  }
  void destroy_physical(Physical physical) override { real_.destroy_physical(physical); }
  Status map(Address at, Physical physical, Bytes size) override { return real_.map(at, physical, size); }
  Status map_all(Address at, std::span<const PhysicalPiece> pieces) override {
    return real_.map_all(at, pieces);
  }
  Status unmap(Address at, Bytes size) override { return real_.unmap(at, size); }
  Result<MemoryInfo> memory() const override { return real_.memory(); }
  Status pin(Address host, Bytes size) override { return real_.pin(host, size); }
  void unpin(Address host, Bytes size) override { real_.unpin(host, size); }
  Result<Stream> create_stream(StreamPriority priority) override { return real_.create_stream(priority); }
  void destroy_stream(Stream stream) override { real_.destroy_stream(stream); }
  bool alive(Stream stream) const override { return real_.alive(stream); }
  Status synchronize(Stream stream) override { return real_.synchronize(stream); }
  Result<Event> create_event() override { return real_.create_event(); }
  void destroy_event(Event event) override { real_.destroy_event(event); }
  Status record(Stream stream, Event event) override { return real_.record(stream, event); }
  Status wait(Stream stream, Event event) override { return real_.wait(stream, event); }
  Status synchronize(Event event) override { return real_.synchronize(event); }
  bool completed(Event event) const override { return real_.completed(event); }
  Result<double> seconds_between(Event from, Event to) const override {
    return real_.seconds_between(from, to);
  }
  Status copy(Stream stream, Direction direction, Address to, const std::byte* from, Bytes size) override {
    return real_.copy(stream, direction, to, from, size);
  }
  Status copy_batch(Stream stream, Direction direction, std::span<const Transfer> pieces) override {
    return real_.copy_batch(stream, direction, pieces);
  }
  Status fill(Stream stream, Address to, std::uint8_t value, Bytes size) override {
    return real_.fill(stream, to, value, size);
  }
  Status launch_host(Stream stream, std::function<void()> work) override {
    return real_.launch_host(stream, std::move(work));
  }
  Result<std::uint32_t> exchange_blocks() override { return real_.exchange_blocks(); }
  Status exchange(Stream stream, const RingExchange& exchange) override {
    return real_.exchange(stream, exchange);
  }
  void* native_stream(Stream stream) const override { return real_.native_stream(stream); }
  Status bind_thread() override { return real_.bind_thread(); }

 private:
  Device& real_;
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
