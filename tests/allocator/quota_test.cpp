#include "allocator/quota.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "allocator/hbm_pool.hpp"

namespace terrace {
namespace {

TEST(Quotas, LabelsAreFewAndKeepTheirIds) {
  Quotas quotas;
  const TenantId first = *quotas.tenant("first");
  EXPECT_NE(first.index, 0);
  EXPECT_EQ(*quotas.tenant("first"), first);
  for (int i = 1; i < kTenantCount - 1; ++i) ASSERT_TRUE(quotas.tenant("t" + std::to_string(i)));
  const auto refused = quotas.tenant("one too many");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kOutOfMemory);
  EXPECT_EQ(*quotas.tenant("first"), first) << "known labels still answer";
  EXPECT_EQ(quotas.tenant("").error().code, Errc::kInvalidArgument);
  EXPECT_EQ(quotas.set_limit(TenantId{}, 1_MiB).error().code, Errc::kInvalidArgument);
}

TEST(Quotas, AChargePastALimitChangesNothing) {
  Quotas quotas;
  const TenantId tenant = *quotas.tenant("job");
  ASSERT_TRUE(quotas.set_limit(tenant, 1_MiB));
  quotas.set_limit(Pool::kActivation, 2_MiB, 1_MiB);
  EXPECT_TRUE(quotas.charge(1_MiB, Pool::kActivation, tenant));
  const Status by_pool = quotas.charge(1_B, Pool::kActivation, {});
  ASSERT_FALSE(by_pool);
  EXPECT_EQ(by_pool.error().code, Errc::kOutOfBudget);
  EXPECT_NE(by_pool.error().text.find("quota of that pool"), std::string::npos);
  quotas.refund(512_KiB, Pool::kActivation, {});
  const Status by_tenant = quotas.charge(1_B, Pool::kActivation, tenant);
  ASSERT_FALSE(by_tenant);
  EXPECT_NE(by_tenant.error().text.find("tenant \"job\""), std::string::npos);
  EXPECT_TRUE(quotas.charge(512_KiB, Pool::kActivation, {})) << "what the tenant was refused is free again";
  EXPECT_FALSE(quotas.charge(Bytes(~0ULL), Pool::kActivation, {}));
}

class PoolQuotaTest : public testing::Test {
 protected:
  PoolQuotaTest() : device_(std::move(open_emulated_device({.capacity = 64_MiB})).value()) {
    stream_ = *device_->create_stream(StreamPriority::kNormal);
    pool_ = std::move(HbmPool::create(*device_, {.budget = 32_MiB})).value();
  }
  ~PoolQuotaTest() override {
    pool_.reset();
    device_->destroy_stream(stream_);
  }
  std::unique_ptr<Device> device_;
  Stream stream_;
  std::unique_ptr<HbmPool> pool_;
};

TEST_F(PoolQuotaTest, ALimitCountsWhatWasLiveBeforeIt) {
  std::vector<Block> held;
  for (int i = 0; i < 4; ++i) held.push_back(*pool_->allocate(stream_, 1_MiB, Pool::kExpert));
  pool_->set_limit(Pool::kExpert, 5_MiB);
  held.push_back(*pool_->allocate(stream_, 1_MiB, Pool::kExpert));
  const auto refused = pool_->allocate(stream_, 1_MiB, Pool::kExpert);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
  EXPECT_EQ(refused.error().pool, Pool::kExpert);
  ASSERT_TRUE(pool_->free(stream_, *pool_->allocate(stream_, 1_MiB, Pool::kActivation))) << "others are free";
  ASSERT_TRUE(pool_->free(stream_, held.back()));
  held.back() = *pool_->allocate(stream_, 1_MiB, Pool::kExpert);
  pool_->set_limit(Pool::kExpert, kNoLimit);
  held.push_back(*pool_->allocate(stream_, 1_MiB, Pool::kExpert));
  for (const Block& block : held) EXPECT_TRUE(pool_->free(stream_, block));
  EXPECT_TRUE(pool_->walk());
}

TEST_F(PoolQuotaTest, TenantsAreCountedAndLimited) {
  const TenantId job = *pool_->tenant("job");
  ASSERT_TRUE(pool_->set_limit(job, 3_KiB));
  const HbmPool::BlockOptions as_job{.tenant = job};
  const Block first = *pool_->allocate(stream_, 2_KiB, Pool::kScratch, as_job);
  const Block second = *pool_->allocate(stream_, 1_KiB, Pool::kScratch, as_job);
  EXPECT_EQ(pool_->tenants().at(0).live, 3_KiB);
  EXPECT_FALSE(pool_->allocate(stream_, 1_B, Pool::kScratch, as_job));
  ASSERT_TRUE(pool_->free(stream_, first));
  EXPECT_EQ(pool_->tenants().at(0).live, 1_KiB);
  EXPECT_TRUE(pool_->free(stream_, *pool_->allocate(stream_, 2_KiB, Pool::kScratch, as_job)));
  ASSERT_TRUE(pool_->free_completed(second));
  EXPECT_EQ(pool_->tenants().at(0).live, 0_B);
  EXPECT_EQ(pool_->allocate(stream_, 1_KiB, Pool::kScratch, {.tenant = TenantId{9}}).error().code,
            Errc::kInvalidArgument);
}

// Whatever the interleaving with other threads and with limits that come and go, no limit is passed.
TEST_F(PoolQuotaTest, LimitsAreHardForManyThreads) {
  constexpr Bytes kLimit = 256_KiB;
  std::atomic<bool> stop{false};
  std::vector<std::jthread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      std::vector<Block> blocks;
      while (!stop.load()) {
        auto block = pool_->allocate(stream_, 16_KiB, Pool::kComm);
        if (block && blocks.size() < 12) {
          blocks.push_back(*block);
          continue;
        }
        if (block) blocks.push_back(*block);
        for (const Block& freed : blocks) ASSERT_TRUE(pool_->free(stream_, freed));
        blocks.clear();
      }
      for (const Block& freed : blocks) ASSERT_TRUE(pool_->free(stream_, freed));
    });
  }
  for (int i = 0; i < 24; ++i) {
    pool_->set_limit(Pool::kComm, kLimit);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const auto walked = pool_->walk();
    ASSERT_TRUE(walked) << walked.error().text;
    if (i % 4 == 3) pool_->set_limit(Pool::kComm, kNoLimit);
  }
  pool_->set_limit(Pool::kComm, kLimit);
  stop = true;
  threads.clear();
  std::vector<Block> all;
  while (auto block = pool_->allocate(stream_, 16_KiB, Pool::kComm)) all.push_back(*block);
  EXPECT_EQ(all.size(), kLimit / 16_KiB) << "after all that the count is exact";
  for (const Block& block : all) EXPECT_TRUE(pool_->free(stream_, block));
}

}  // namespace
}  // namespace terrace
