// How much the pool maps for what is asked of it, and in chunks of which size.
#include "allocator/hbm_centre.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "allocator/heap_walk.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr Bytes kLeast = 2_MiB;  // of a GPU
constexpr Bytes kMost = 16_MiB;

class HbmCentreTest : public testing::Test {
 protected:
  HbmCentreTest()
      : device_(std::move(open_emulated_device({.capacity = 16_GiB, .granularity = kLeast})).value()) {
    stream_ = *device_->create_stream(StreamPriority::kNormal);
    open(16_GiB);
  }
  ~HbmCentreTest() override {
    centre_.reset();
    EXPECT_EQ(device_->memory()->free, device_->memory()->total);
    device_->destroy_stream(stream_);
  }
  void open(Bytes budget) {
    centre_.reset();
    centre_ = std::move(HbmCentre::create(*device_, {.budget = budget, .chunk = kMost})).value();
    live_ = {};
  }
  Result<Address> allocate(Bytes span, Pool pool) {
    const HbmCentre::Request request{
        .span = span, .pool = pool, .stream = *centre_->order().index_of(stream_)};
    auto carved = centre_->carve(request, HbmCentre::Where::kOwnRange);
    if (carved && carved->count == 0) {
      if (auto grown = centre_->grow(request, live_); !grown) return grown.error();
      carved = centre_->carve(request, HbmCentre::Where::kOwnRange);
    }
    if (!carved) return carved.error();
    centre_->table().set_word(carved->first, BlockWord::live(span, pool, {}));
    live_ += span;
    return carved->first;
  }
  void free(Address at) {
    live_ -= centre_->table().word_at(at).span();
    centre_->give_back(at, {});
  }
  Bytes largest_chunk() const {
    Bytes largest;
    for (const ChunkRange& range : centre_->ranges()) {
      for (const auto& [offset, chunk] : range.chunks()) largest = std::max(largest, chunk.size);
    }
    return largest;
  }
  void expect_whole() {
    const auto walked = walk_heap(*centre_, {});
    ASSERT_TRUE(walked) << walked.error().text;
    EXPECT_EQ(walked->live, live_);
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  std::unique_ptr<HbmCentre> centre_;
  Bytes live_;
};

TEST_F(HbmCentreTest, AFewBytesOfEachKindTakeTheLeastChunkEach) {
  for (const Pool pool : {Pool::kWeights, Pool::kActivation}) {
    for (const Bytes span : {1_KiB, 100_KiB}) ASSERT_TRUE(allocate(span, pool));
  }
  EXPECT_EQ(centre_->mapped(), 4 * kLeast);
}

TEST_F(HbmCentreTest, ChunksGrowWithThePoolAndEndsStayAThousandth) {
  ASSERT_TRUE(allocate(256_MiB, Pool::kWeights));
  EXPECT_EQ(largest_chunk(), kLeast);
  ASSERT_TRUE(allocate(7_GiB + 1_MiB, Pool::kWeights));
  EXPECT_EQ(largest_chunk(), kMost);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(allocate(3_MiB, i % 2 == 0 ? Pool::kActivation : Pool::kWeights));
  EXPECT_LE(centre_->mapped(), live_ + 2 * (live_ / 1024)) << "two ranges are in use";
  expect_whole();
}

TEST_F(HbmCentreTest, TheBudgetIsUsedToItsLastGranule) {
  open(100_MiB + kLeast);
  ASSERT_TRUE(allocate(100_MiB, Pool::kWeights));
  EXPECT_TRUE(allocate(kLeast, Pool::kActivation));
  EXPECT_EQ(centre_->mapped(), centre_->budget());
  EXPECT_EQ(allocate(1_KiB, Pool::kActivation).error().code, Errc::kOutOfBudget);
}

TEST_F(HbmCentreTest, AChunkLargerThanWhatIsMissingMovesAtTheWall) {
  const Address weights = *allocate(8_GiB, Pool::kWeights);
  free(weights);
  centre_->set_budget(centre_->mapped());
  const Address small = *allocate(kLeast, Pool::kActivation);
  EXPECT_EQ(centre_->mapped(), 8_GiB);
  const Address rest = *allocate(8_GiB - kMost, Pool::kActivation);
  expect_whole();
  free(small);
  free(rest);
  ASSERT_TRUE(allocate(8_GiB, Pool::kGradient)) << "and all of it back, whatever the sizes of the chunks";
  EXPECT_EQ(centre_->mapped(), 8_GiB);
  expect_whole();
}

TEST_F(HbmCentreTest, PastTheSlackFreeChunksMoveBeforeMoreIsMapped) {
  const Address weights = *allocate(4_GiB, Pool::kWeights);
  ASSERT_TRUE(allocate(4_GiB, Pool::kOptimizer));
  free(weights);
  ASSERT_TRUE(allocate(4_GiB, Pool::kActivation));
  EXPECT_LE(centre_->mapped(), 8_GiB + 8_GiB / 128);
  expect_whole();
}

TEST_F(HbmCentreTest, WhicheverCallOfAMoveFailsNothingIsLost) {
  for (std::uint64_t nth = 1;; ++nth) {
    // The whole budget in free chunks, the first of 2 MiB and the last of 16.
    open(5_GiB);
    for (const Bytes span : {512_MiB, 4_GiB}) ASSERT_TRUE(allocate(span, Pool::kWeights));
    const ChunkRange& range = centre_->ranges()[1];
    for (const Bytes offset : {0_MiB, 512_MiB}) free(range.address_of(offset.count()));
    centre_->set_budget(centre_->mapped());
    bool fired = false;
    {
      FaultPlan plan = fail_call(nth);
      ScopedFaults faults(plan);
      (void)allocate(100_MiB, Pool::kActivation);
      fired = faults.fired();
    }
    expect_whole();
    EXPECT_EQ(device_->memory()->total - device_->memory()->free, centre_->mapped()) << nth;
    if (!fired) break;
    ASSERT_LT(nth, 200U);
  }
}

}  // namespace
}  // namespace terrace
