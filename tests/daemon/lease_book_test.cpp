#include "daemon/lease_book.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace terrace {
namespace {

TierAmounts ddr_only(Bytes bytes) {
  TierAmounts amounts;
  amounts[static_cast<std::size_t>(TierId::kDdr)] = bytes;
  return amounts;
}

LeaseBook::Newcomer on(const std::string& device, Bytes hbm_budget, const TierAmounts& held = {}) {
  return {.job = "job", .device = device, .hbm_budget = hbm_budget, .held = held};
}

TEST(LeaseBook, GrantsWhatIsLeft) {
  LeaseBook book(ddr_only(100_MiB));
  book.adopt(ClientId{1}, on("0", 10_GiB));
  book.adopt(ClientId{2}, on("0", 99_GiB));  // the device's budget is set by the first
  EXPECT_EQ(book.request(ClientId{1}, TierId::kHbm, 7_GiB), 7_GiB);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 7_GiB), 3_GiB);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 1_B), 0_B);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kDdr, 1_GiB), 100_MiB);
  EXPECT_EQ(book.request(ClientId{1}, TierId::kNvme, 1_B), 0_B);
  EXPECT_EQ(book.leased(TierId::kHbm), 10_GiB);
}

TEST(LeaseBook, DevicesHaveBudgetsOfTheirOwn) {
  LeaseBook book(ddr_only(0_B));
  book.adopt(ClientId{1}, on("gpu0", 10_GiB));
  book.adopt(ClientId{2}, on("gpu1", 20_GiB));
  EXPECT_EQ(book.request(ClientId{1}, TierId::kHbm, 30_GiB), 10_GiB);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 30_GiB), 20_GiB);
  EXPECT_EQ(book.budget(TierId::kHbm), 30_GiB);
}

TEST(LeaseBook, WhatALeavingClientHeldIsFree) {
  LeaseBook book(ddr_only(0_B));
  book.adopt(ClientId{1}, on("0", 10_GiB));
  book.adopt(ClientId{2}, on("0", 10_GiB));
  EXPECT_EQ(book.request(ClientId{1}, TierId::kHbm, 10_GiB), 10_GiB);
  book.leave(ClientId{1});
  book.leave(ClientId{1});
  EXPECT_EQ(book.leased(ClientId{1}, TierId::kHbm), 0_B);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 10_GiB), 10_GiB);
}

TEST(LeaseBook, HoldingsOfAnEarlierDaemonCountOnce) {
  LeaseBook book(ddr_only(0_B));
  TierAmounts held;
  held[0] = 6_GiB;
  book.adopt(ClientId{1}, on("0", 8_GiB, held));
  book.adopt(ClientId{2}, on("0", 8_GiB, held));  // more than the budget: entered, and nothing granted on top
  EXPECT_EQ(book.leased(TierId::kHbm), 12_GiB);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 1_GiB), 0_B);
  EXPECT_EQ(book.release(ClientId{1}, TierId::kHbm, 99_GiB), 6_GiB);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 4_GiB), 2_GiB);
}

TEST(LeaseBook, PinnedMemoryIsByNumaNode) {
  LeaseBook book(LeaseBook::Options{.node_budgets = ddr_only(90_MiB), .numa = {{0, 1_GiB}, {2, 2_GiB}}});
  const auto at = [](int node) {
    return LeaseBook::Newcomer{.job = "job", .device = "0", .numa_node = node};
  };
  book.adopt(ClientId{1}, at(0));
  book.adopt(ClientId{2}, at(2));
  EXPECT_EQ(book.budget(ClientId{1}, TierId::kDdr), 30_MiB);
  EXPECT_EQ(book.request(ClientId{1}, TierId::kDdr, 1_GiB), 30_MiB);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kDdr, 50_MiB), 50_MiB);
  book.adopt(ClientId{3}, at(-1));
  book.adopt(ClientId{4}, at(7));  // no such node: as if it had said nothing
  EXPECT_EQ(book.request(ClientId{3}, TierId::kDdr, 1_GiB), 10_MiB) << "where most is left";
  EXPECT_EQ(book.leased(TierId::kDdr), 90_MiB);
  EXPECT_EQ(book.budget(TierId::kDdr), 90_MiB);
}

TEST(LeaseBook, TermsAreOfEachDeviceAndFollowBudgets) {
  LeaseBook book(ddr_only(100_B));
  book.set_terms("vip", {.weight = 2, .hbm = Amount::of_share(0.5), .ddr = Amount::of(30_B)});
  book.adopt(ClientId{1}, {.job = "vip", .device = "0", .hbm_budget = 100_B});
  book.adopt(ClientId{2}, on("0", 100_B));
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 100_B), 50_B);
  EXPECT_EQ(book.request(ClientId{2}, TierId::kDdr, 100_B), 70_B);
  book.set_budgets(ddr_only(200_B), {{"0", 300_B}});
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 500_B), 100_B) << "half of 300 is left to the other";
  book.set_terms("vip", {});
  EXPECT_EQ(book.request(ClientId{2}, TierId::kHbm, 500_B), 150_B);
}

// Against a model that keeps a plain list of who holds what.
struct ModelClient {
  ClientId id;
  int device;
  std::uint64_t hbm, ddr;
};

class LeaseBookModel : public testing::TestWithParam<unsigned> {};

TEST_P(LeaseBookModel, AgreesAfterEveryStep) {
  constexpr std::uint64_t kHbm = 1000, kDdr = 500;
  std::mt19937 random(GetParam());
  LeaseBook book(ddr_only(Bytes(kDdr)));
  std::vector<ModelClient> model;
  std::uint64_t next = 1;
  const auto sum = [&](int device) {
    std::uint64_t total = 0;
    for (const ModelClient& client : model) {
      total += device < 0 ? client.ddr : client.device == device ? client.hbm : 0;
    }
    return total;
  };
  for (int step = 0; step < 2000; ++step) {
    const unsigned action = random() % 8;
    const std::uint64_t amount = random() % 400;
    if (model.empty() || action == 0) {
      const ModelClient client{ClientId{next++}, static_cast<int>(random() % 3), 0, 0};
      book.adopt(client.id, on(std::to_string(client.device), Bytes(kHbm)));
      model.push_back(client);
      continue;
    }
    ModelClient& client = model[random() % model.size()];
    const bool hbm = random() % 2 == 0;
    std::uint64_t& holds = hbm ? client.hbm : client.ddr;
    const TierId tier = hbm ? TierId::kHbm : TierId::kDdr;
    if (action == 1) {
      book.leave(client.id);
      model.erase(model.begin() + (&client - model.data()));
    } else if (action < 5) {
      const std::uint64_t left = hbm ? kHbm - sum(client.device) : kDdr - sum(-1);
      ASSERT_EQ(book.request(client.id, tier, Bytes(amount)).count(), std::min(amount, left));
      holds += std::min(amount, left);
    } else {
      ASSERT_EQ(book.release(client.id, tier, Bytes(amount)).count(), std::min(amount, holds));
      holds -= std::min(amount, holds);
    }
    std::uint64_t all = 0;
    for (int device = 0; device < 3; ++device) {
      ASSERT_LE(sum(device), kHbm);
      all += sum(device);
    }
    ASSERT_EQ(book.leased(TierId::kHbm).count(), all);
    ASSERT_EQ(book.leased(TierId::kDdr).count(), sum(-1));
    ASSERT_LE(book.leased(TierId::kDdr).count(), kDdr);
    ASSERT_EQ(book.clients(), model.size());
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, LeaseBookModel, testing::Range(0U, 20U));

}  // namespace
}  // namespace terrace
