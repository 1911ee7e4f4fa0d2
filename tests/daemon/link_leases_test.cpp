// Leases of link time: division by a plain reference, and random schedules of processes that come, copy, are
// held back, die and are divided anew by a successor, by seed.
#include "daemon/link_leases.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/daemon/fair_reference.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;

constexpr std::uint32_t kHalf = kLinkWhole / 2;
constexpr std::uint32_t kRounding = 4;  // less than one a weight, whoever comes first

// --- The pure part ---

TEST(LinkShares, WhoIsAloneHasAllAndWhoNeedsNothingMayBegin) {
  const std::vector<LinkClaim> claims = {{.job = 0, .need = kLinkWhole}, {.job = 1, .need = 0}};
  const auto shares = link_shares(claims);
  EXPECT_EQ(shares[0], (LinkShare{kLinkWhole, kLinkWhole}));
  EXPECT_EQ(shares[1], (LinkShare{0, kHalf}));
}

TEST(LinkShares, FirstAmongJobsByWeightThenEvenlyWithin) {
  const std::vector<LinkClaim> claims = {{.job = 7, .weight = 3, .need = kLinkWhole},
                                         {.job = 2, .weight = 1, .need = kLinkWhole},
                                         {.job = 2, .weight = 1, .need = kLinkWhole}};
  const auto shares = link_shares(claims);
  EXPECT_EQ(shares[0].lease, kLinkWhole / 4 * 3);
  EXPECT_EQ(shares[1].lease, kLinkWhole / 8);
  EXPECT_EQ(shares[2].lease, kLinkWhole / 8);
}

TEST(LinkShares, AGuaranteeHoldsWhileItIsNeeded) {
  std::vector<LinkClaim> claims = {{.job = 0, .weight = 9, .need = kLinkWhole},
                                   {.job = 1, .guarantee = kLinkWhole / 10 * 4, .need = kLinkWhole}};
  EXPECT_EQ(link_shares(claims)[1].lease, kLinkWhole / 10 * 4);
  claims[1].need = kLinkWhole / 10;
  EXPECT_EQ(link_shares(claims)[1].lease, kLinkWhole / 10);
  EXPECT_EQ(link_shares(claims)[0].lease, kLinkWhole / 10 * 9) << "the rest is not lost";
  EXPECT_EQ(link_shares(claims)[1].usable, kLinkWhole / 10 * 4);
}

TEST(LinkShares, WhatNobodyNeedsEverybodyMayUse) {
  const std::vector<LinkClaim> claims = {{.job = 0, .need = kLinkWhole / 8},
                                         {.job = 1, .need = kLinkWhole / 4}};
  const auto shares = link_shares(claims);
  EXPECT_EQ(shares[0], (LinkShare{kLinkWhole / 8, kLinkWhole / 4 * 3}));
  EXPECT_EQ(shares[1], (LinkShare{kLinkWhole / 4, kLinkWhole / 8 * 7}));
}

// In coarse units, so that the reference may hand them out one by one.
TEST(LinkShares, AreWhatAPlainReferenceSays) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    std::vector<LinkClaim> claims(1 + random() % 6);
    for (LinkClaim& claim : claims) {
      claim.job = random() % 3;
      claim.need = random() % 3 == 0 ? kLinkWhole : random() % kLinkWhole;
    }
    std::array<Claim, 3> jobs;
    for (Claim& job : jobs) {
      job.weight = 1 + random() % 4;
      job.floor = Bytes(random() % 3 == 0 ? random() % (kLinkWhole / 3) : 0);
    }
    for (LinkClaim& claim : claims) {
      claim.weight = jobs[claim.job].weight;
      claim.guarantee = static_cast<std::uint32_t>(jobs[claim.job].floor.count());
      jobs[claim.job].demand += Bytes(claim.need);
    }
    const auto of_jobs = test::shares_byte_by_byte(Bytes(kLinkWhole), jobs);
    const auto shares = link_shares(claims);
    for (std::size_t job = 0; job < jobs.size(); ++job) {
      std::uint64_t leased = 0;
      for (std::size_t i = 0; i < claims.size(); ++i) leased += claims[i].job == job ? shares[i].lease : 0;
      EXPECT_NEAR(static_cast<double>(leased), static_cast<double>(of_jobs[job].count()), kRounding)
          << "seed " << seed << ", job " << job;
    }
  }
}

// --- The state machine ---

// A process as copy engines are: it moves what it wants, as far as it may.
struct Process {
  ClientId id;
  std::string job;
  uid_t uid = 0;
  std::shared_ptr<LinkBoard> board;  // as it has mapped it
  std::size_t slot = 0;
  double wants = 0;  // of the link's time

  [[nodiscard]] LinkSlot& page() const { return board->slots()[slot]; }
  void copy(Nanoseconds now, Nanoseconds span) const {
    for (std::size_t d = 0; d < kLinkDirections; ++d) {
      const double may = page().usable[d].load() / double{kLinkWhole};
      page().spent[d] += static_cast<std::uint32_t>(std::min(wants, may) * seconds_of(span) * 1e6);
      if (wants > may) page().limited_at[d] = static_cast<std::uint64_t>(now.count());
    }
  }
};

class Node {
 public:
  Process& start(const std::string& job, double wants, uid_t uid = 0, const std::string& device = "0") {
    Process process{.id = ClientId{next_++}, .job = job, .uid = uid, .board = {}, .wants = wants};
    devices_[process.id] = device;
    processes_.push_back(std::move(process));
    sit_down(processes_.back());
    return processes_.back();
  }
  void kill(std::size_t which) {
    links_->leave(processes_[which].id, now_);
    devices_.erase(processes_[which].id);
    processes_.erase(processes_.begin() + static_cast<std::ptrdiff_t>(which));
  }
  // The daemon is killed, and everybody comes back to its successor.
  void replace_daemon() {
    links_ = std::make_unique<LinkLeases>();
    for (const auto& [job, terms] : terms_) links_->set_terms(job, terms);
    for (Process& process : processes_) sit_down(process);
  }
  void set_terms(const std::string& job, const LinkTerms& terms) {
    terms_[job] = terms;
    links_->set_terms(job, terms);
  }
  void pass(int looks = 1) {
    for (int i = 0; i < looks; ++i) {
      for (const Process& process : processes_) process.copy(now_, LinkLeases::kLook);
      now_ += LinkLeases::kLook;
      links_->look(now_);
      check();
    }
  }
  // An independent reader of the pages: no link is leased twice, and everybody may use what it is leased.
  void check() const {
    std::map<std::string, std::array<std::uint64_t, kLinkDirections>> sums;
    for (const Process& process : processes_) {
      for (std::size_t d = 0; d < kLinkDirections; ++d) {
        const std::uint32_t lease = process.page().lease[d];
        sums[devices_.at(process.id)][d] += lease;
        ASSERT_GE(process.page().usable[d], lease);
        ASSERT_EQ(links_->leased(process.id)[d], lease);
      }
    }
    for (const auto& [device, sum] : sums) {
      for (const std::uint64_t leased : sum) ASSERT_LE(leased, kLinkWhole) << device;
    }
  }
  [[nodiscard]] std::vector<Process>& processes() { return processes_; }
  [[nodiscard]] const LinkTerms& terms(const std::string& job) { return terms_[job]; }
  [[nodiscard]] LinkLeases& links() { return *links_; }
  [[nodiscard]] Nanoseconds now() const { return now_; }

 private:
  void sit_down(Process& process) {
    const auto seat = links_->enter(process.id, {devices_.at(process.id), process.job, process.uid}, now_);
    ASSERT_TRUE(seat);
    process.board = *LinkBoard::open(OwnedFd(::dup(seat->fd)));
    process.slot = seat->slot;
  }

  std::unique_ptr<LinkLeases> links_ = std::make_unique<LinkLeases>();
  std::vector<Process> processes_;
  std::map<ClientId, std::string> devices_;
  std::map<std::string, LinkTerms> terms_;
  std::uint64_t next_ = 1;
  Nanoseconds now_ = std::chrono::seconds(100);
};

TEST(LinkLeases, WhoIsAloneOnItsDeviceHasTheWholeLinkAndNobodyLooks) {
  Node node;
  const Process& one = node.start("a", 0);
  EXPECT_EQ(one.page().usable[0], kLinkWhole);
  EXPECT_EQ(one.page().lease[1], kLinkWhole);
  EXPECT_EQ(node.links().due(), std::nullopt);
  node.start("a", 0, 0, "1");
  EXPECT_EQ(node.links().due(), std::nullopt) << "another device";
  node.start("a", 0, 0, "1");
  EXPECT_TRUE(node.links().due());
}

TEST(LinkLeases, WhereNobodyCopiesTheDaemonLooksSeldomAndEverybodyMayUseAll) {
  Node node;
  node.start("a", 0);
  node.start("b", 0);
  node.pass(40);  // what the first did alone is forgotten
  const Nanoseconds next = *node.links().due();
  node.pass(static_cast<int>((next - node.now()) / LinkLeases::kLook));
  EXPECT_EQ(*node.links().due(), next + LinkLeases::kIdleLook);
  for (const Process& process : node.processes()) EXPECT_EQ(process.page().usable[0], kLinkWhole);
  node.processes()[1].wants = 0.2;
  node.pass(10);
  EXPECT_LE(*node.links().due(), node.now() + LinkLeases::kLook);
}

TEST(LinkLeases, ACrowdIsLookedAtLessOftenAndDividedAllTheSame) {
  Node node;
  for (int i = 0; i < 32; ++i) node.start("a", 1);
  node.pass(100);
  EXPECT_EQ(*node.links().due() - node.now() / (4 * LinkLeases::kLook) * (4 * LinkLeases::kLook),
            4 * LinkLeases::kLook);
  for (const Process& process : node.processes()) EXPECT_EQ(process.page().lease[0], kLinkWhole / 32);
}

TEST(LinkLeases, TwoWhoWantAllHaveHalfAndTheRestOfWhoStops) {
  Node node;
  node.start("a", 1);
  node.start("b", 1);
  node.pass(10);
  for (const Process& process : node.processes()) EXPECT_EQ(process.page().lease[1], kHalf);
  node.processes()[0].wants = 0;
  node.pass(40);
  EXPECT_EQ(node.processes()[0].page().lease[1], 0U);
  EXPECT_EQ(node.processes()[1].page().lease[1], kLinkWhole);
  EXPECT_EQ(node.processes()[0].page().usable[1], kHalf) << "it may begin at once";
  node.processes()[0].wants = 1;
  node.pass(10);
  EXPECT_EQ(node.processes()[0].page().lease[1], kHalf);
}

TEST(LinkLeases, WhoUsesLittleLeavesTheRest) {
  Node node;
  node.start("a", 0.1);
  node.start("b", 1);
  node.pass(40);
  EXPECT_LE(node.processes()[0].page().lease[0], kLinkWhole / 5);
  EXPECT_GE(node.processes()[0].page().lease[0], kLinkWhole / 10);
  EXPECT_EQ(node.processes()[0].page().usable[0], kHalf);
  EXPECT_GE(node.processes()[1].page().lease[0], kLinkWhole / 5 * 4);
}

TEST(LinkLeases, ADeadProcessesTimeAndAnnouncementsAreOver) {
  Node node;
  node.start("a", 1);
  node.start("b", 1);
  node.pass(3);
  const auto board = node.processes()[0].board;
  node.processes()[0].page().lanes[1].begun = 5;
  node.kill(0);
  EXPECT_EQ(node.processes()[0].page().lease[0], kLinkWhole) << "at once";
  for (const LinkSlot& slot : board->slots()) EXPECT_EQ(slot.lanes[1].begun, slot.lanes[1].ended);
}

TEST(LinkLeases, UsersHaveBoardsOfTheirOwnAndOneLink) {
  Node node;
  node.start("a", 1, 1000);
  node.start("b", 1, 1001);
  node.start("b", 1, 1001);
  node.pass(5);
  EXPECT_EQ(node.processes()[0].page().lease[0], kHalf);
  EXPECT_EQ(node.processes()[1].page().lease[0], kHalf / 2);
  const auto& mine = node.processes()[0];
  for (std::size_t i = 0; i < LinkBoard::kSlots; ++i) {
    if (i == mine.slot) continue;
    EXPECT_EQ(mine.board->slots()[i].usable[0], 0U) << "nothing of the others";
  }
}

TEST(LinkLeases, HostileWordsMoveNobodyBeyondItsShare) {
  Node node;
  node.start("a", 1);
  node.start("b", 1, 7);
  node.pass(5);
  Process& liar = node.processes()[1];
  for (const std::uint64_t at : {UINT64_MAX, std::uint64_t{1}, static_cast<std::uint64_t>(INT64_MAX)}) {
    liar.page().limited_at[0] = at;
    liar.page().spent[0] += 0xfffffff0U;
    liar.page().lease[0] = UINT32_MAX;
    liar.page().usable[0] = UINT32_MAX;
    node.processes()[0].copy(node.now(), LinkLeases::kLook);
    node.links().look(node.now() + LinkLeases::kLook);
    EXPECT_GE(node.processes()[0].page().lease[0], kHalf - 1);
  }
}

TEST(LinkLeases, AFullBoardLimitsNobody) {
  LinkLeases links;
  for (std::uint64_t i = 1; i <= LinkBoard::kSlots; ++i)
    EXPECT_TRUE(links.enter(ClientId{i}, {"0", "a", 0}, Nanoseconds(1)));
  EXPECT_FALSE(links.enter(ClientId{999}, {"0", "a", 0}, Nanoseconds(1)));
  EXPECT_EQ(links.leased(ClientId{999}), LinkAmounts{});
  links.leave(ClientId{999}, Nanoseconds(1));
  links.leave(ClientId{17}, Nanoseconds(1));
  EXPECT_EQ(links.enter(ClientId{1000}, {"0", "a", 0}, Nanoseconds(1))->slot, 16U);
  links.leave(ClientId{3}, Nanoseconds(1));
  links.leave(ClientId{40}, Nanoseconds(1));
  EXPECT_EQ(links.enter(ClientId{1001}, {"0", "a", 0}, Nanoseconds(1))->slot, 39U)
      << "a slot just left may still be written to: the others come first";
}

// Whatever happened before: when everybody goes on wanting what it wants, everybody gets what is fair.
void run_schedule(unsigned seed) {
  std::mt19937 random(seed);
  Node node;
  const std::array<std::string, 3> jobs = {"a", "b", "c"};
  for (const std::string& job : jobs)
    node.set_terms(job, {1 + static_cast<std::uint32_t>(random() % 4),
                         random() % 3 == 0 ? static_cast<std::uint32_t>(random() % 300000) : 0});
  for (int step = 0; step < 60; ++step) {
    const unsigned action = random() % 12;
    const std::size_t count = node.processes().size();
    if (count == 0 || (action == 0 && count < 6)) {
      node.start(jobs[random() % 3], random() % 2 == 0 ? 1.0 : 0.0, random() % 2);
    } else if (action == 1) {
      node.kill(random() % count);
    } else if (action == 2) {
      node.replace_daemon();
    } else if (action == 3) {
      node.processes()[random() % count].wants = random() % 3 == 0 ? 1.0 : 0.0;
    } else {
      node.pass();
    }
    node.check();
    if (testing::Test::HasFatalFailure()) return;
  }
  node.pass(60);
  std::vector<LinkClaim> claims;
  for (const Process& process : node.processes()) {
    const auto job = static_cast<std::size_t>(process.job.front() - 'a');
    const LinkTerms& terms = node.terms(process.job);
    const bool all = process.wants > 0 || node.processes().size() == 1;
    claims.push_back({job, terms.weight, terms.guarantee, all ? kLinkWhole : 0});
  }
  const auto fair = link_shares(claims);
  for (std::size_t i = 0; i < claims.size(); ++i)
    EXPECT_NEAR(node.processes()[i].page().lease[0], fair[i].lease, kRounding)
        << "seed " << seed << ", process " << i;
}

TEST(LinkLeasesModel, LeasesComeOutFairWhoeverDiesMeanwhile) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    run_schedule(seed);
    ASSERT_FALSE(testing::Test::HasFatalFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace terrace
