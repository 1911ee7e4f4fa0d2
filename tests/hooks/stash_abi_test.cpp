// The stash as a C program sees it: hooks/c_abi/terrace_stash.h.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "hooks/c_abi/terrace_stash.h"

namespace {

using testing::HasSubstr;
constexpr std::uint64_t kBytes = 1 << 16;

class StashAbi : public testing::Test {
 protected:
  void SetUp() override {
    terrace_stash_options options = terrace_default_stash_options();
    options.device = "emulated";
    options.join_daemon = 0;
    options.ddr_budget = 64 << 20;
    ASSERT_EQ(terrace_stash_open(&options, &stash_), TERRACE_OK) << terrace_last_error();
  }
  void TearDown() override { EXPECT_EQ(terrace_stash_close(stash_), TERRACE_OK) << terrace_last_error(); }
  [[nodiscard]] terrace_stash_counters counters() const {
    terrace_stash_counters read{};
    read.struct_size = sizeof read;
    EXPECT_EQ(terrace_stash_read_counters(stash_, &read), TERRACE_OK) << terrace_last_error();
    return read;
  }

  terrace_stash* stash_ = nullptr;
};

TEST_F(StashAbi, BytesGoAndComeBack) {
  std::vector<unsigned char> memory(kBytes, 42);
  std::uint64_t entry = 0;
  ASSERT_EQ(terrace_stash_spill(stash_, nullptr, memory.data(), kBytes, TERRACE_FOR_ACTIVATION, &entry),
            TERRACE_OK)
      << terrace_last_error();
  ASSERT_NE(entry, 0U);
  ASSERT_EQ(terrace_stash_depart(stash_, nullptr, entry), TERRACE_OK);
  std::int32_t left = 0;
  ASSERT_EQ(terrace_stash_left(stash_, entry, &left), TERRACE_OK);
  EXPECT_EQ(left, 1);
  std::memset(memory.data(), 0, kBytes);
  ASSERT_EQ(terrace_stash_restore(stash_, nullptr, entry, memory.data()), TERRACE_OK);
  ASSERT_EQ(terrace_stash_await(stash_, nullptr, entry), TERRACE_OK);
  EXPECT_EQ(memory, std::vector<unsigned char>(kBytes, 42));
  EXPECT_EQ(counters().entries, 1U);
  EXPECT_GE(counters().ddr_bytes, kBytes);
  ASSERT_EQ(terrace_stash_drop(stash_, nullptr, entry), TERRACE_OK);
  EXPECT_EQ(counters().entries, 0U);
  EXPECT_EQ(counters().spilled_bytes, kBytes);
  EXPECT_EQ(counters().restored_bytes, kBytes);
  EXPECT_EQ(terrace_stash_note_step(stash_, 0.5, 0), TERRACE_OK);
}

TEST_F(StashAbi, WrongArgumentsAreRefusedInWords) {
  std::uint64_t entry = 9;
  char byte = 0;
  EXPECT_EQ(terrace_stash_spill(nullptr, nullptr, &byte, 1, TERRACE_FOR_ACTIVATION, &entry),
            TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(entry, 0U);
  EXPECT_EQ(terrace_stash_spill(stash_, nullptr, &byte, 1, static_cast<terrace_purpose>(4), &entry),
            TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_stash_spill(stash_, nullptr, &byte, UINT64_MAX, TERRACE_FOR_OPTIMIZER, &entry),
            TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_stash_spill(stash_, nullptr, &byte, 1, TERRACE_FOR_OPTIMIZER, nullptr),
            TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_stash_depart(stash_, nullptr, 5), TERRACE_NOT_FOUND);
  EXPECT_THAT(terrace_last_error(), HasSubstr("no entry 5"));
  EXPECT_EQ(terrace_stash_left(stash_, 5, nullptr), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_stash_note_step(stash_, -1, 0), TERRACE_INVALID_ARGUMENT);
  terrace_stash_counters unset{};
  EXPECT_EQ(terrace_stash_read_counters(stash_, &unset), TERRACE_INVALID_ARGUMENT);
  terrace_stash_options options = terrace_default_stash_options();
  options.emulated_link = 0;
  terrace_stash* none = stash_;
  EXPECT_EQ(terrace_stash_open(&options, &none), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(terrace_stash_close(nullptr), TERRACE_OK);
}

TEST_F(StashAbi, BudgetsAreThePolicys) {
  terrace_stash_budgets budgets{};
  budgets.struct_size = sizeof budgets;
  ASSERT_EQ(terrace_stash_read_budgets(stash_, &budgets), TERRACE_OK);
  EXPECT_EQ(budgets.ddr, 64U << 20);
  EXPECT_EQ(budgets.activations, TERRACE_UNLIMITED);
  EXPECT_EQ(budgets.optimizer_tier, TERRACE_OPTIMIZER_WHERE_ROOM_IS) << "the policy does not say";
  EXPECT_EQ(budgets.off, 0);
  EXPECT_EQ(terrace_stash_abi(), TERRACE_STASH_ABI);
}

TEST_F(StashAbi, WithoutADaemonTheLeaseIsTheBudget) {
  terrace_stash_budgets budgets{};
  budgets.struct_size = sizeof budgets;
  ASSERT_EQ(terrace_stash_read_budgets(stash_, &budgets), TERRACE_OK);
  terrace_stash_lease lease{};
  lease.struct_size = sizeof lease;
  EXPECT_EQ(terrace_stash_give_way(stash_, 0, 0), TERRACE_OK) << "nobody asks";
  ASSERT_EQ(terrace_stash_read_lease(stash_, &lease), TERRACE_OK) << terrace_last_error();
  EXPECT_EQ(lease.hbm_bytes, budgets.hbm);
  EXPECT_EQ(lease.hbm_target_bytes, budgets.hbm);
  EXPECT_EQ(lease.hbm_used_bytes, 0U) << "no preload library counts";
  EXPECT_EQ(lease.ddr_bytes, 64U << 20);
  EXPECT_EQ(lease.switched_off, 0);
  EXPECT_EQ(lease.overflow_bytes, 0U) << "nor serves";
  EXPECT_EQ(lease.refusals, 0U);
  EXPECT_EQ(terrace_stash_give_way(nullptr, 0, 0), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_stash_read_lease(stash_, nullptr), TERRACE_INVALID_ARGUMENT);
}

TEST_F(StashAbi, AnOlderCallerGetsWhatItKnows) {
  terrace_stash_counters old{};
  old.struct_size = offsetof(terrace_stash_counters, entries);
  old.entries = 1234;
  ASSERT_EQ(terrace_stash_read_counters(stash_, &old), TERRACE_OK);
  EXPECT_EQ(old.entries, 1234U) << "beyond what the caller said it has";
}

}  // namespace
