#include "swapcore/stable/backing_store.hpp"

#include <gtest/gtest.h>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

using Alias = BackingStore::Alias;

class BackingStoreTest : public testing::Test {
 protected:
  BackingStoreTest() { store_ = std::move(BackingStore::create(*device_, {1_MiB, lease_, {0}})).value(); }
  ~BackingStoreTest() override {
    store_.reset();
    EXPECT_EQ(device_->mapped_bytes(), 0_B);
    EXPECT_EQ(device_->reserved_bytes(), 0_B);
    EXPECT_EQ(device_->memory()->free, 8_MiB);
    EXPECT_EQ(lease_->held(), 0_B);
  }
  std::unique_ptr<EmulatedDevice> device_ =
      std::move(EmulatedDevice::create({.capacity = 8_MiB, .granularity = 64_KiB})).value();
  std::shared_ptr<HostLease> lease_ = std::make_shared<HostLease>(1_MiB);
  std::unique_ptr<BackingStore> store_;
};

TEST_F(BackingStoreTest, HandlesComeBackWithTheirAlias) {
  const HbmHandle first = store_->take_hbm(256_KiB, Alias::kMapped).value();
  ASSERT_NE(first.alias, nullptr);
  first.alias[0] = std::byte{3};
  store_->give_back(first);
  EXPECT_EQ(store_->hbm_room(), 1_MiB);
  const ScopedFaults no_more(fail_call(1));
  const HbmHandle again = store_->take_hbm(256_KiB, Alias::kMapped).value();
  EXPECT_EQ(again.physical, first.physical);
  EXPECT_EQ(again.alias, first.alias);
  store_->give_back(again);
}

TEST_F(BackingStoreTest, TheBudgetCountsWhatIsKeptAndGivesItUpForOtherSizes) {
  const HbmHandle large = store_->take_hbm(768_KiB, Alias::kNone).value();
  const Result<HbmHandle> refused = store_->take_hbm(512_KiB, Alias::kNone);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
  EXPECT_EQ(refused.error().bytes, 256_KiB);
  store_->give_back(large);
  EXPECT_EQ(store_->hbm_held(), 768_KiB);
  const HbmHandle other = store_->take_hbm(512_KiB, Alias::kNone).value();
  EXPECT_EQ(store_->hbm_held(), 512_KiB);
  store_->give_back(other);
  EXPECT_EQ(store_->hbm_peak(), 768_KiB);
}

TEST_F(BackingStoreTest, ALoweredBudgetTakesWhatIsKeptAtOnceAndTheRestAsItComes) {
  const HbmHandle used = store_->take_hbm(512_KiB, Alias::kNone).value();
  store_->give_back(store_->take_hbm(256_KiB, Alias::kMapped).value());
  store_->set_hbm_budget(128_KiB);
  EXPECT_EQ(store_->hbm_held(), 512_KiB);
  EXPECT_FALSE(store_->take_hbm(64_KiB, Alias::kNone).ok());
  store_->give_back(used);
  EXPECT_EQ(store_->hbm_held(), 0_B);
  EXPECT_EQ(store_->hbm_room(), 128_KiB);
}

TEST_F(BackingStoreTest, KeptHostMemoryIsGivenUpForOtherSizes) {
  const HostBacking first = store_->take_host(768_KiB).value();
  EXPECT_EQ(store_->take_host(512_KiB).error().code, Errc::kOutOfBudget);
  store_->give_back(first);
  const HostBacking again = store_->take_host(768_KiB).value();
  EXPECT_EQ(again.handle.physical, first.handle.physical);
  store_->give_back(again);
  const HostBacking other = store_->take_host(512_KiB).value();
  other.alias[0] = std::byte{1};
  store_->give_back(other);
}

TEST_F(BackingStoreTest, AFailedCallTakesNothing) {
  for (std::uint64_t nth = 1;; ++nth) {
    const ScopedFaults faults(fail_call(nth));
    const Result<HbmHandle> hbm = store_->take_hbm(320_KiB, Alias::kMapped);
    if (hbm.ok()) store_->give_back(*hbm);
    const Result<HostBacking> host = store_->take_host(320_KiB);
    if (host.ok()) store_->give_back(*host);
    store_->set_hbm_budget(1_MiB);  // a device without memory lowers it
    EXPECT_EQ(store_->hbm_room(), 1_MiB) << nth;
    if (!faults.fired()) break;
    ASSERT_LT(nth, 50U);
    store_->set_hbm_budget(0_B);  // begin anew
    store_->set_hbm_budget(1_MiB);
  }
}

}  // namespace
}  // namespace terrace
