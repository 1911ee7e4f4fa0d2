// Each way in which a heap can be wrong is seen, and said.
#include "allocator/heap_walk.hpp"

#include <gtest/gtest.h>

#include "allocator/hbm_centre.hpp"

namespace terrace {
namespace {

class HeapWalkTest : public testing::Test {
 protected:
  HeapWalkTest() : device_(std::move(open_emulated_device({.capacity = 8_MiB})).value()) {
    stream_ = *device_->create_stream(StreamPriority::kNormal);
    centre_ = std::move(HbmCentre::create(*device_, {.budget = 4_MiB, .chunk = 1_MiB})).value();
    live_ = carve(10_KiB);
    table().set_word(live_, BlockWord::live(10_KiB, Pool::kExpert, {}));
    cached_at_ = carve(6_KiB);
    cached_[cached_at_] = 6_KiB;
  }
  ~HeapWalkTest() override {
    centre_.reset();
    device_->destroy_stream(stream_);
  }
  BlockTable& table() { return centre_->table(); }
  Address carve(Bytes span) {
    const HbmCentre::Request request{
        .span = span, .pool = Pool::kExpert, .stream = *centre_->order().index_of(stream_)};
    auto carved = centre_->carve(request, HbmCentre::Where::kOwnRange);
    if (carved && carved->count == 0) {
      EXPECT_TRUE(centre_->grow(request, 0_B));
      carved = centre_->carve(request, HbmCentre::Where::kOwnRange);
    }
    return carved->first;
  }
  void expect_wrong(const char* what) {
    const auto walked = walk_heap(*centre_, cached_);
    ASSERT_FALSE(walked) << what;
    EXPECT_NE(walked.error().text.find(what), std::string::npos) << walked.error().text;
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  std::unique_ptr<HbmCentre> centre_;
  Address live_ = nullptr, cached_at_ = nullptr;
  std::map<Address, Bytes> cached_;
};

TEST_F(HeapWalkTest, AWholeHeapAddsUp) {
  const auto walked = walk_heap(*centre_, cached_);
  ASSERT_TRUE(walked) << walked.error().text;
  EXPECT_EQ(walked->live, 10_KiB);
  EXPECT_EQ(walked->cached, 6_KiB);
  EXPECT_EQ(walked->free, 64_KiB - 16_KiB);
  EXPECT_EQ(walked->mapped, 64_KiB);
  EXPECT_EQ(walked->live_by_pool[static_cast<std::size_t>(Pool::kExpert)], 10_KiB);
}

TEST_F(HeapWalkTest, MemoryOfNobodyIsSeen) {
  table().remove(live_);
  expect_wrong("belongs to nobody");
}

TEST_F(HeapWalkTest, ABlockThatReachesIntoFreeMemoryIsSeen) {
  table().set_word(cached_at_, BlockWord::cached(100));
  expect_wrong("free memory starts inside");
}

TEST_F(HeapWalkTest, ABlockInFreeMemoryIsSeen) {
  table().place(cached_at_ + 6 * 1024, BlockWord::live(1_KiB, Pool::kExpert, {}));
  expect_wrong("a block starts in free memory");
}

TEST_F(HeapWalkTest, ACacheThatKnowsAnotherStoryIsSeen) {
  cached_.clear();
  expect_wrong("in no cache");
  cached_ = {{cached_at_, 7_KiB}};
  expect_wrong("under another size");
  cached_ = {{cached_at_, 6_KiB}, {live_, 10_KiB}};
  expect_wrong("a live block is in a cache");
  cached_ = {{cached_at_, 6_KiB}, {cached_at_ + (1 << 20), 6_KiB}};
  expect_wrong("lie in mapped memory");
}

TEST_F(HeapWalkTest, AStartThatTheBitmapMissesIsSeen) {
  table().remove(live_);
  table().set_word(live_, BlockWord::live(10_KiB, Pool::kExpert, {}));
  expect_wrong("not found in its block");
}

}  // namespace
}  // namespace terrace
