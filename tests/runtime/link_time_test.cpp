// The link between processes: boards, seats, and what copies make of them.
#include "runtime/link_time.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/fault.hpp"
#include "runtime/link_board.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Nanoseconds kNow = seconds(1000);

std::shared_ptr<LinkBoard> board_of_a_daemon(Nanoseconds looked_at) {
  auto board = *LinkBoard::create();
  board->note_look(looked_at);
  return board;
}

TEST(LinkBoard, BothSidesSeeOnePageWhichNobodyCanShrink) {
  auto made = *LinkBoard::create();
  auto opened = LinkBoard::open(OwnedFd(::dup(made->fd())));
  ASSERT_TRUE(opened.ok()) << opened.error().text;
  made->slots()[5].usable[1] = 17;
  EXPECT_EQ((*opened)->slots()[5].usable[1], 17U);
  (*opened)->slots()[62].spent[0] = 4;
  EXPECT_EQ(made->slots()[62].spent[0], 4U);
  EXPECT_NE(::ftruncate(made->fd(), 0), 0);
}

TEST(LinkBoard, WhatIsNoBoardIsRefused) {
  EXPECT_FALSE(LinkBoard::open(OwnedFd()).ok());
  EXPECT_FALSE(LinkBoard::open(OwnedFd(::open("/dev/null", O_RDWR | O_CLOEXEC))).ok());
  const int unsealed = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(::ftruncate(unsealed, static_cast<off_t>(LinkBoard::kSize)), 0);
  EXPECT_NE(LinkBoard::open(OwnedFd(::dup(unsealed))).error().text.find("sealed"), std::string::npos);
  ASSERT_EQ(::fcntl(unsealed, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(LinkBoard::open(OwnedFd(unsealed)).error().code, Errc::kProtocol) << "zeros";
  const ScopedFaults faults(fail_call(FaultPoint::kPageCreate, 1));
  EXPECT_EQ(LinkBoard::create().error().code, Errc::kIo);
}

TEST(LinkView, WhoIsAloneMayUseAll) {
  LinkTime link;
  LinkView view(link, 0);
  EXPECT_EQ(view.usable(kNow), 1);
  EXPECT_FALSE(view.collective_runs(kNow));
  view.note_limited(kNow);
  view.note_spent(1);
}

TEST(LinkView, ASeatBindsWhileTheDaemonLooks) {
  LinkTime link;
  LinkView down(link, 1);
  const auto board = board_of_a_daemon(kNow);
  board->slots()[3].usable[1] = kLinkWhole / 4;
  link.take_seat(board, 3);
  EXPECT_DOUBLE_EQ(down.usable(kNow), 0.25);
  EXPECT_DOUBLE_EQ(down.usable(kNow + LinkView::kStale), 0.25);
  EXPECT_EQ(down.usable(kNow + LinkView::kStale + milliseconds(1)), 1) << "a daemon that hangs limits nobody";
  board->note_look(kNow + seconds(5));
  EXPECT_DOUBLE_EQ(down.usable(kNow + seconds(5)), 0.25);
  link.leave_seat(board.get());
  EXPECT_EQ(down.usable(kNow + seconds(5)), 1);
}

TEST(LinkView, NoValueOnTheBoardIsBelievedFurtherThanItMakesSense) {
  LinkTime link;
  LinkView view(link, 0);
  const auto board = board_of_a_daemon(kNow);
  link.take_seat(board, 0);
  board->slots()[0].usable[0] = 0;
  EXPECT_EQ(view.usable(kNow), LinkView::kLeast) << "nobody stands still";
  board->slots()[0].usable[0] = UINT32_MAX;
  EXPECT_EQ(view.usable(kNow), 1);
  board->slots()[0].usable[0] = 1;
  for (const std::int64_t looked : {INT64_MIN, INT64_MAX, std::int64_t{-1}}) {
    board->note_look(Nanoseconds(looked));
    EXPECT_EQ(view.usable(kNow), 1) << looked;
  }
}

TEST(LinkView, ALaterSeatIsNotLeftByTheEarlierOnesEnd) {
  LinkTime link;
  LinkView view(link, 0);
  const auto first = board_of_a_daemon(kNow), second = board_of_a_daemon(kNow);
  second->slots()[1].usable[0] = kLinkWhole / 2;
  link.take_seat(first, 0);
  link.take_seat(second, 1);
  link.leave_seat(first.get());
  EXPECT_DOUBLE_EQ(view.usable(kNow), 0.5);
}

TEST(LinkView, WhatIsSpentIsToldToTheMicrosecond) {
  LinkTime link;
  LinkView view(link, 1);
  const auto board = board_of_a_daemon(kNow);
  link.take_seat(board, 2);
  for (int i = 0; i < 10; ++i) view.note_spent(0.25e-6);
  EXPECT_EQ(board->slots()[2].spent[1], 2U);
  view.note_spent(-1);
  view.note_spent(0.5e-6);
  EXPECT_EQ(board->slots()[2].spent[1], 3U);
  EXPECT_EQ(board->slots()[2].spent[0], 0U);
}

TEST(LinkView, ACollectiveOfAnyProcessIsSeenUntilItEndsOrIsForgotten) {
  LinkTime link;
  LinkView view(link, 0);
  const auto board = board_of_a_daemon(kNow);
  link.take_seat(board, 0);
  CollectiveLane& one = board->slots()[40].lanes[2];
  CollectiveLane& other = board->slots()[7].lanes[0];
  one.begun = 1;
  EXPECT_TRUE(view.collective_runs(kNow));
  other.begun = 1;
  one.ended = 1;
  EXPECT_TRUE(view.collective_runs(kNow + seconds(1)));
  other.ended = 1;
  EXPECT_FALSE(view.collective_runs(kNow + seconds(1)));
  // Who has announced it is dead: what stays as it is does not count for ever, but the next does.
  one.begun = 2;
  EXPECT_TRUE(view.collective_runs(kNow + seconds(2)));
  EXPECT_FALSE(view.collective_runs(kNow + seconds(2) + LinkView::kLongestCollective));
  other.begun = 2;
  EXPECT_TRUE(view.collective_runs(kNow + seconds(2) + LinkView::kLongestCollective));
}

TEST(LinkTime, LanesAreFewAndComeBack) {
  LinkTime link;
  std::vector<std::size_t> taken;
  while (const auto lane = link.take_lane()) taken.push_back(*lane);
  EXPECT_EQ(taken.size(), LinkSlot::kLanes);
  ASSERT_NE(link.seat().board, nullptr) << "of its own, for its own copies";
  EXPECT_FALSE(link.seat().shared);
  link.give_lane(1);
  EXPECT_EQ(link.take_lane(), 1U);
  EXPECT_EQ(link.take_lane(), std::nullopt);
}

TEST(LinkTime, WithoutMemoryNobodyAnnounces) {
  LinkTime link;
  const ScopedFaults faults(fail_call(FaultPoint::kPageCreate, 1));
  EXPECT_EQ(link.take_lane(), std::nullopt);
  EXPECT_EQ(link.seat().board, nullptr);
  EXPECT_EQ(link.take_lane(), 0U) << "the next time it may";
}

}  // namespace
}  // namespace terrace
