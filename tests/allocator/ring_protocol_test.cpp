#include "allocator/ring/ring_protocol.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>

namespace terrace {
namespace {

constexpr RingChannel kChannel{
    .sender = 0, .receiver = 1, .slots = 4, .slot_bytes = Bytes(1ULL << 20), .first = 0};

void pass_header(RingSender& sender, RingReceiver& receiver, Bytes size) {
  const RingHeader header = sender.announce(size, 2);
  receiver.observe_head(sender.head());
  receiver.accept(header);
}

TEST(RingProtocol, CreditsAreTheSlotsThatNobodyHolds) {
  RingSender sender(kChannel);
  for (std::uint32_t left = 4; left > 0; --left) {
    EXPECT_EQ(sender.credits(), left);
    (void)sender.announce(1_KiB, 1);
  }
  EXPECT_EQ(sender.credits(), 0U);
  sender.observe_tail(3);
  sender.observe_tail(1);  // seen late: nothing is taken back
  EXPECT_EQ(sender.credits(), 3U);
}

TEST(RingProtocol, AMessageLargerThanASlotIsAnnouncedAsCut) {
  RingSender sender(kChannel);
  const RingHeader header = sender.announce(3_MiB, 1);
  EXPECT_EQ(header.wanted, (3_MiB).count());
  EXPECT_EQ(header.stored, (1_MiB).count());
  EXPECT_LE(ring_piece_count(header.stored, header.piece), kRingMostPieces);
}

TEST(RingProtocol, AMessageIsCompleteWithItsLastPieceAndOneOfNothingAtOnce) {
  RingSender sender(kChannel);
  RingReceiver receiver(kChannel);
  pass_header(sender, receiver, 64_KiB);
  EXPECT_FALSE(receiver.complete());
  receiver.observe_piece(0, 1, 1);
  receiver.observe_piece(0, 1, 1);   // twice
  receiver.observe_piece(0, 0, 99);  // of another epoch
  EXPECT_FALSE(receiver.complete());
  receiver.observe_piece(0, 0, 1);
  EXPECT_TRUE(receiver.complete());
  EXPECT_EQ(receiver.release(), 1U);
  pass_header(sender, receiver, 0_B);
  EXPECT_TRUE(receiver.complete());
}

TEST(RingProtocolDeathTest, WhatTheProtocolExcludesIsAsserted) {
  RingSender sender(kChannel);
  EXPECT_DEATH(sender.observe_tail(1), "not announced");
  for (int i = 0; i < 4; ++i) (void)sender.announce(1_B, 1);
  EXPECT_DEATH((void)sender.announce(1_B, 1), "credit");
  RingReceiver receiver(kChannel);
  EXPECT_DEATH(receiver.observe_head(5), "slots");
  EXPECT_DEATH(receiver.accept({}), "head");
  EXPECT_DEATH((void)receiver.release(), "given back");
  receiver.observe_head(1);
  EXPECT_DEATH(receiver.accept({.stamp = 7}), "next message");
  EXPECT_DEATH(receiver.accept({.stamp = 1, .wanted = 2 << 20, .stored = 2 << 20, .piece = 1 << 20}), "slot");
}

TEST(RingProtocol, AWaitThatTakesTooLongSaysForWhom) {
  constexpr RingPatience kLate{
      .now_ns = 3'000'000'000, .progress_ns = 1'000'000'000, .limit_ns = 1'000'000'000};
  constexpr RingPatience kStillTime{
      .now_ns = 2'000'000'000, .progress_ns = 1'000'000'000, .limit_ns = 1'000'000'000};
  RingReceiver receiver(kChannel);
  EXPECT_FALSE(receiver.overdue(kStillTime));
  EXPECT_EQ(describe(*receiver.overdue(kLate), 1, 4),
            "rank 1 waits for rank 0: channel 0->1, slot 0, epoch 0, head 0, tail 0: no message for 2 s");
  RingSender sender(kChannel);
  EXPECT_FALSE(sender.overdue(kLate)) << "it has credits";
  pass_header(sender, receiver, 1_MiB);
  receiver.observe_piece(0, 0, 1);
  EXPECT_EQ(describe(*receiver.overdue(kLate), 1, 4),
            "rank 1 waits for rank 0: channel 0->1, slot 0, epoch 0, head 1, tail 0: no piece 1 for 2 s");
  for (int i = 0; i < 3; ++i) (void)sender.announce(1_B, 1);
  EXPECT_EQ(describe(*sender.overdue(kLate), 0, 4),
            "rank 0 waits for rank 1: channel 0->1, slot 0, epoch 1, head 4, tail 0: no slot is given back "
            "for 2 s");
  EXPECT_EQ(
      describe(RingStop{.what = static_cast<std::uint64_t>(RingWait::kMessage),
                        .peer = 0,
                        .sequence = 139,
                        .piece = 0,
                        .head = 139,
                        .tail = 136,
                        .waited_ns = 2'000'000'000},
               1, 8),
      "rank 1 waits for rank 0: channel 0->1, slot 3, epoch 17, head 139, tail 136: no message for 2 s");
}

TEST(RingProtocol, AnOverflowSaysWhatWouldDo) {
  EXPECT_EQ(describe(RingOverflow{.stamp = 6, .wanted = 96 << 20, .stored = 64 << 20},
                     {.sender = 0, .receiver = 1, .slots = 4, .slot_bytes = 64_MiB}),
            "channel 0->1, slot 1, epoch 1: 96.0 MiB to send, 64.0 MiB fit; a slot holds 64.0 MiB: "
            "make the ring with a larger RingOptions::slot_bytes, or give a larger buffer");
}

TEST(RingProtocol, TheWindowHoldsWhatIsInPlaceUntilItIsReleased) {
  RingWindow window(2, ~0ULL);
  window.pass();
  window.hold();
  window.hold();
  EXPECT_TRUE(window.full());
  EXPECT_EQ(window.released(), 0U) << "the number has wrapped";
  window.release();
  EXPECT_FALSE(window.full());
  EXPECT_EQ(window.held(), 1U);
}

// --- The model: two ends that know each other by words in memory alone, and a network that delays them ---

// What one write does to the memory of the other end, once it gets there: behind the writes it releases.
struct Write {
  std::function<void()> land;
  std::vector<int> after;
};

class Network {
 public:
  int send(std::function<void()> land, std::vector<int> after = {}) {
    pending_.emplace(++last_, Write{std::move(land), std::move(after)});
    return last_;
  }
  // Any write whose predecessors have landed, in no order otherwise.
  void deliver(std::mt19937_64& random) {
    if (pending_.empty()) return;
    auto at = pending_.begin();
    std::advance(at, static_cast<long>(random() % pending_.size()));
    for (auto before = first_pending(at->second); before != pending_.end();
         before = first_pending(at->second)) {
      at = before;
    }
    at->second.land();
    pending_.erase(at);
  }
  [[nodiscard]] bool empty() const { return pending_.empty(); }

 private:
  std::map<int, Write>::iterator first_pending(const Write& write) {
    for (const int before : write.after) {
      if (const auto found = pending_.find(before); found != pending_.end()) return found;
    }
    return pending_.end();
  }
  std::map<int, Write> pending_;
  int last_ = 0;
};

class Model {
 public:
  Model(std::uint64_t seed, std::uint64_t first)
      : random_(seed),
        channel_{.sender = 0,
                 .receiver = 1,
                 .slots = 1U << (seed % 4),
                 .slot_bytes = Bytes(kRingSmallestPiece * 6),
                 .first = first},
        sender_(channel_),
        receiver_(channel_),
        head_(first),
        tail_(first),
        seen_tail_(first),
        headers_(channel_.slots),
        stamps_(channel_.slots, std::vector<std::uint64_t>(8)),
        data_(channel_.slots, std::vector<std::uint64_t>(8)) {}

  void run(std::uint64_t messages) {
    const std::uint64_t end = channel_.first + messages;
    for (std::uint64_t steps = 0; receiver_.tail() != end; ++steps) {
      ASSERT_LT(steps, messages * 4000)
          << "stuck at head " << sender_.head() << ", tail " << receiver_.tail();
      switch (random_() % 4) {
        case 0:
          if (sender_.head() != end && sender_.credits() > 0) announce();
          break;
        case 1:
          network_.deliver(random_);
          break;
        case 2:
          look_as_sender();
          break;
        case 3:
          look_as_receiver();
          break;
      }
    }
    while (!network_.empty()) network_.deliver(random_);
    sender_.observe_tail(tail_);
    EXPECT_EQ(sender_.credits(), channel_.slots) << "every slot came back";
  }

 private:
  static std::uint64_t payload(std::uint64_t sequence, std::uint64_t piece) { return sequence * 31 + piece; }

  void announce() {
    const std::uint64_t sequence = sender_.head();
    const std::uint64_t slot = ring_slot(sequence, channel_.slots);
    const RingHeader header = sender_.announce(Bytes(random_() % (8 * kRingSmallestPiece)), 1);
    const int there = network_.send([=, this] { headers_[slot] = header; });
    // One thread writes header and head, and the heads in order.
    last_head_ = network_.send([=, this] { head_ = sequence + 1; }, {there, last_head_});
    for (std::uint64_t piece = 0; piece < ring_piece_count(header.stored, header.piece); ++piece) {
      const int bytes = network_.send([=, this] { data_[slot][piece] = payload(sequence, piece); });
      network_.send([=, this] { stamps_[slot][piece] = ring_stamp(sequence); }, {bytes});
    }
  }
  void look_as_sender() {
    sender_.observe_tail(random_() % 3 == 0 ? seen_tail_ : tail_);  // sometimes what was seen before
    seen_tail_ = sender_.tail();
  }

  void look_as_receiver() {
    receiver_.observe_head(head_);
    if (receiver_.announced()) {
      receiver_.accept(headers_[ring_slot(accepted_ + channel_.first, channel_.slots)]);
      ++accepted_;
    }
    const std::uint64_t slot = random_() % channel_.slots;
    for (int looks = 0; looks < 4; ++looks) {
      const std::uint64_t piece = random_() % 8;
      receiver_.observe_piece(slot, piece, stamps_[slot][piece]);
    }
    if (receiver_.complete() && random_() % 2 == 0) release();
  }

  void release() {
    const std::uint64_t sequence = receiver_.tail();
    const std::uint64_t slot = ring_slot(sequence, channel_.slots);
    const RingHeader& header = headers_[slot];
    for (std::uint64_t piece = 0; piece < ring_piece_count(header.stored, header.piece); ++piece) {
      ASSERT_EQ(data_[slot][piece], payload(sequence, piece))
          << "message " << sequence << ", piece " << piece;
    }
    const std::uint64_t tail = receiver_.release();
    network_.send([=, this] {
      if (ring_reached(tail, tail_)) tail_ = tail;
    });
  }

  std::mt19937_64 random_;
  const RingChannel channel_;
  RingSender sender_;
  RingReceiver receiver_;
  Network network_;
  // The words, as they have landed.
  std::uint64_t head_;
  std::uint64_t tail_;
  std::uint64_t seen_tail_;  // by the sender
  std::vector<RingHeader> headers_;
  std::vector<std::vector<std::uint64_t>> stamps_;
  std::vector<std::vector<std::uint64_t>> data_;
  std::uint64_t accepted_ = 0;
  int last_head_ = -1;
};

TEST(RingProtocolModel, EveryMessageArrivesWholeHoweverLateAndInWhateverOrder) {
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Model(seed, 0).run(200);
  }
}

TEST(RingProtocolModel, NumbersWrapAroundTheEndOf64Bits) {
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Model(seed, ~0ULL - 40).run(200);
  }
}

}  // namespace
}  // namespace terrace
