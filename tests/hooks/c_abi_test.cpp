// libterrace.so as a C program sees it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "hooks/c_abi/terrace.h"

namespace {

using testing::HasSubstr;
using testing::StrEq;

constexpr std::uint64_t kMiB = 1 << 20;

class CAbi : public testing::Test {
 protected:
  void SetUp() override {
    terrace_options options = terrace_default_options();
    options.device = "emulated";
    options.emulated_hbm = 256 * kMiB;
    options.hbm_budget = 128 * kMiB;
    options.join_daemon = 0;
    ASSERT_EQ(terrace_open(&options, &session_), TERRACE_OK) << terrace_last_error();
  }
  void TearDown() override { EXPECT_EQ(terrace_close(session_), TERRACE_OK) << terrace_last_error(); }

  terrace_block* block(std::uint64_t bytes) {
    terrace_block* block = nullptr;
    EXPECT_EQ(terrace_allocate(session_, bytes, TERRACE_ACTIVATION, &block), TERRACE_OK)
        << terrace_last_error();
    return block;
  }
  std::uint32_t site(const char* name, int layer) {
    const terrace_site_spec spec = {sizeof spec, name, TERRACE_GMM, layer, nullptr};
    std::uint32_t site = 99;
    EXPECT_EQ(terrace_declare_site(session_, &spec, &site), TERRACE_OK) << terrace_last_error();
    return site;
  }

  terrace_session* session_ = nullptr;
};

TEST_F(CAbi, OffersComeBackWithTheirBytes) {
  const std::uint32_t fc1 = site("layer.0.fc1", 0);
  std::uint64_t hits = 0;
  for (int step = 0; step < 4; ++step) {
    ASSERT_EQ(terrace_begin_step(session_), TERRACE_OK);
    ASSERT_EQ(terrace_enter_forward(session_, 0, 0), TERRACE_OK);
    terrace_block* output = block(4 * kMiB);
    ASSERT_EQ(terrace_synchronize(session_), TERRACE_OK);
    std::memset(terrace_block_address(output), 40 + step, 4 * kMiB);
    ASSERT_EQ(terrace_offer(session_, {fc1, 0}, output), TERRACE_OK);
    terrace_release(output);
    ASSERT_EQ(terrace_enter_head(session_, 0), TERRACE_OK);
    ASSERT_EQ(terrace_enter_backward(session_, 0, 0), TERRACE_OK);
    terrace_block* fetched = nullptr;
    ASSERT_EQ(terrace_fetch(session_, {fc1, 0}, &fetched), TERRACE_OK);
    if (fetched != nullptr) {
      ++hits;
      ASSERT_EQ(terrace_synchronize(session_), TERRACE_OK);
      const auto* bytes = static_cast<const unsigned char*>(terrace_block_address(fetched));
      EXPECT_EQ(terrace_block_bytes(fetched), 4 * kMiB);
      EXPECT_EQ(bytes[0], 40 + step);
      EXPECT_EQ(bytes[4 * kMiB - 1], 40 + step);
      terrace_release(fetched);
    }
    ASSERT_EQ(terrace_end_step(session_), TERRACE_OK);
  }
  terrace_counters counters{};
  counters.struct_size = sizeof counters;
  ASSERT_EQ(terrace_read_counters(session_, &counters), TERRACE_OK);
  EXPECT_EQ(counters.hits + counters.late, hits);
  EXPECT_EQ(counters.hits + counters.late + counters.misses, 4u);
  EXPECT_GT(hits, 0u) << "everything fits, so outputs are kept";
  EXPECT_GE(counters.hbm_peak_bytes, 4 * kMiB);
  EXPECT_LE(counters.hbm_peak_bytes, counters.hbm_budget_bytes);
}

TEST_F(CAbi, ABudgetIsAResultWithWords) {
  terrace_block* block = reinterpret_cast<terrace_block*>(8);
  EXPECT_EQ(terrace_allocate(session_, 1024 * kMiB, TERRACE_WEIGHTS, &block), TERRACE_OUT_OF_BUDGET);
  EXPECT_EQ(block, nullptr);
  EXPECT_THAT(terrace_last_error(), HasSubstr("weights"));
  std::thread([] { EXPECT_THAT(terrace_last_error(), StrEq("")) << "each thread has its own"; }).join();
}

TEST_F(CAbi, WrongArgumentsAreRefused) {
  terrace_block* held = nullptr;
  std::uint32_t site_id = 0;
  EXPECT_EQ(terrace_allocate(session_, 1, static_cast<terrace_pool>(7), &held), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_allocate(session_, UINT64_MAX, TERRACE_SCRATCH, &held), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_allocate(session_, 1, TERRACE_SCRATCH, nullptr), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_allocate(nullptr, 1, TERRACE_SCRATCH, &held), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_begin_step(nullptr), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_fetch(session_, {5, 0}, &held), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_offer(session_, {5, 0}, nullptr), TERRACE_INVALID_ARGUMENT);
  (void)site("a", 0);
  terrace_site_spec again = {sizeof again, "a", TERRACE_MATMUL, 0, nullptr};
  EXPECT_EQ(terrace_declare_site(session_, &again, &site_id), TERRACE_INVALID_ARGUMENT);
  EXPECT_THAT(terrace_last_error(), HasSubstr("unique"));
  again.struct_size = 4096;
  EXPECT_EQ(terrace_declare_site(session_, &again, &site_id), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_enter_forward(session_, -1, 0), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_enter_backward(session_, INT32_MAX, 0), TERRACE_INVALID_ARGUMENT);
  terrace_counters counters{};
  EXPECT_EQ(terrace_read_counters(session_, &counters), TERRACE_INVALID_ARGUMENT) << "struct_size is not set";
  terrace_release(nullptr);
  EXPECT_EQ(terrace_block_bytes(nullptr), 0u);
}

TEST_F(CAbi, AnOutputIsOfferedOnceAStep) {
  const std::uint32_t fc1 = site("layer.0.fc1", 0);
  terrace_block* held = block(kMiB);
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(terrace_begin_step(session_), TERRACE_OK);
    ASSERT_EQ(terrace_enter_forward(session_, 0, 0), TERRACE_OK);
    EXPECT_EQ(terrace_offer(session_, {fc1, 0}, held), TERRACE_OK);
    EXPECT_EQ(terrace_offer(session_, {fc1, 0}, held), TERRACE_INVALID_ARGUMENT);
    EXPECT_EQ(terrace_offer(session_, {fc1, 1}, held), TERRACE_OK) << "another micro-batch";
    ASSERT_EQ(terrace_end_step(session_), TERRACE_OK);
  }
  terrace_release(held);
}

TEST_F(CAbi, AStepThatNeverEndedIsGivenUpByTheNext) {
  const std::uint32_t fc1 = site("layer.0.fc1", 0);
  terrace_block* held = block(kMiB);
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(terrace_begin_step(session_), TERRACE_OK);
    ASSERT_EQ(terrace_enter_forward(session_, 0, 0), TERRACE_OK);
    EXPECT_EQ(terrace_offer(session_, {fc1, 0}, held), TERRACE_OK);
  }
  terrace_release(held);
}

TEST_F(CAbi, AnOutputThatHasChangedSinceIsAMiss) {
  const std::uint32_t fc1 = site("layer.0.fc1", 0);
  for (int step = 0; step < 5; ++step) {
    const bool measured = step < 3, changed = step == 4;
    ASSERT_EQ(terrace_begin_step(session_), TERRACE_OK);
    ASSERT_EQ(terrace_enter_forward(session_, 0, 0), TERRACE_OK);
    terrace_block* output = block(kMiB);
    ASSERT_EQ(terrace_offer_numbers(session_, {fc1, 0}, output, TERRACE_BF16), TERRACE_OK);
    terrace_release(output);
    if (changed) {
      ASSERT_EQ(terrace_changed(session_, {fc1, 0}), TERRACE_OK);
    }
    ASSERT_EQ(terrace_enter_head(session_, 0), TERRACE_OK);
    ASSERT_EQ(terrace_enter_backward(session_, 0, 0), TERRACE_OK);
    terrace_block* fetched = nullptr;
    ASSERT_EQ(terrace_fetch(session_, {fc1, 0}, &fetched), TERRACE_OK);
    if (!measured) {
      EXPECT_EQ(fetched == nullptr, changed) << "everything fits, so outputs are kept";
    }
    terrace_release(fetched);
    ASSERT_EQ(terrace_enter_update(session_), TERRACE_OK);
    ASSERT_EQ(terrace_end_step(session_), TERRACE_OK);
  }
  EXPECT_EQ(terrace_changed(session_, {7, 0}), TERRACE_INVALID_ARGUMENT);
}

TEST_F(CAbi, WhatIsSavedComesBackOnce) {
  ASSERT_EQ(terrace_begin_step(session_), TERRACE_OK);
  terrace_block* saved = block(kMiB);
  ASSERT_EQ(terrace_synchronize(session_), TERRACE_OK);
  std::memset(terrace_block_address(saved), 7, kMiB);
  ASSERT_EQ(terrace_save(session_, {0, 0, 1}, saved), TERRACE_OK) << terrace_last_error();
  EXPECT_EQ(terrace_save(session_, {0, 0, 1}, saved), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_save(session_, {-1, 0, 1}, saved), TERRACE_INVALID_ARGUMENT);
  terrace_release(saved);
  terrace_block* loaded = nullptr;
  ASSERT_EQ(terrace_load(session_, {0, 0, 1}, &loaded), TERRACE_OK) << terrace_last_error();
  ASSERT_EQ(terrace_synchronize(session_), TERRACE_OK);
  EXPECT_EQ(static_cast<const unsigned char*>(terrace_block_address(loaded))[kMiB - 1], 7);
  terrace_release(loaded);
  EXPECT_EQ(terrace_load(session_, {0, 0, 1}, &loaded), TERRACE_NOT_FOUND);
  EXPECT_EQ(loaded, nullptr);
}

TEST_F(CAbi, ACancelledStepKeepsNothing) {
  const std::uint32_t fc1 = site("layer.0.fc1", 0);
  ASSERT_EQ(terrace_begin_step(session_), TERRACE_OK);
  terrace_block* output = block(kMiB);
  ASSERT_EQ(terrace_offer(session_, {fc1, 0}, output), TERRACE_OK);
  ASSERT_EQ(terrace_save(session_, {0, 0, 0}, output), TERRACE_OK);
  ASSERT_EQ(terrace_cancel_step(session_), TERRACE_OK);
  terrace_block* loaded = nullptr;
  EXPECT_EQ(terrace_load(session_, {0, 0, 0}, &loaded), TERRACE_NOT_FOUND);
  ASSERT_EQ(terrace_begin_step(session_), TERRACE_OK);
  EXPECT_EQ(terrace_offer(session_, {fc1, 0}, output), TERRACE_OK) << "another step, offered anew";
  EXPECT_EQ(terrace_offer_numbers(session_, {fc1, 1}, output, static_cast<terrace_element>(3)),
            TERRACE_INVALID_ARGUMENT);
  terrace_release(output);
  ASSERT_EQ(terrace_end_step(session_), TERRACE_OK);
}

TEST_F(CAbi, ItDoesNotCloseUnderHeldBlocks) {
  terrace_block* held = block(kMiB);
  EXPECT_EQ(terrace_close(session_), TERRACE_INVALID_ARGUMENT);
  terrace_release(held);
}

TEST(CAbiOpen, FailuresSayWhatToDoAndGiveNoSession) {
  terrace_options options = terrace_default_options();
  terrace_session* session = reinterpret_cast<terrace_session*>(8);
  options.device = "emulated";
  options.policy_file = "/nonexistent/terrace.toml";
  EXPECT_EQ(terrace_open(&options, &session), TERRACE_IO);
  EXPECT_EQ(session, nullptr);
  EXPECT_THAT(terrace_last_error(), HasSubstr("no such policy file"));
  options.policy_file = nullptr;
  options.device = "quantum";
  EXPECT_NE(terrace_open(&options, &session), TERRACE_OK);
  options.struct_size = 0;
  EXPECT_EQ(terrace_open(&options, &session), TERRACE_INVALID_ARGUMENT);
  EXPECT_EQ(terrace_close(nullptr), TERRACE_OK);
  EXPECT_THAT(terrace_version(), HasSubstr("."));
}

TEST(CAbiOpen, AnOlderCallersShorterStructIsEnough) {
  terrace_options options = terrace_default_options();
  options.device = "emulated";
  options.struct_size = offsetof(terrace_options, policy_file);  // a version without the later fields
  options.policy_file = reinterpret_cast<const char*>(1);
  options.emulated_hbm = 64 * kMiB;
  options.hbm_budget = 32 * kMiB;
  terrace_session* session = nullptr;
  ASSERT_EQ(terrace_open(&options, &session), TERRACE_OK) << terrace_last_error();
  EXPECT_EQ(terrace_close(session), TERRACE_OK);
}

}  // namespace
