// The blocks of an exchange beside each other, as a GPU runs them: a thread each, on plain host memory.
#include "runtime/ring_exchange.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "runtime/device.hpp"
#include "runtime/emulated/host_block.hpp"
#include "runtime/fault.hpp"
#include "runtime/ring_block.hpp"

namespace terrace {
namespace {

using emulated::HostBlock;

constexpr std::uint64_t kSecond = 1'000'000'000;

std::byte content(std::uint32_t sender, std::uint32_t receiver, std::uint64_t sequence, std::uint64_t at) {
  return static_cast<std::byte>((sender * 7 + receiver * 31 + sequence * 101 + at * 13 + (at >> 11)) & 0xFF);
}

// Memory of a whole number of slots' alignment, zero at the start.
class Memory {
 public:
  explicit Memory(std::uint64_t size) : size_(ring_round_up(size, kRingSlotAlignment)) {
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kRingSlotAlignment, size_)));
    std::memset(data_.get(), 0, size_);
  }
  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::uint64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::uint64_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

// One rank: its ring memory, buffers and report.
struct Rank {
  Rank(const RingLayout& layout, std::uint64_t buffer)
      : ring(ring_memory_bytes(layout)),
        send(buffer),
        receive(buffer),
        counts(layout.ranks),
        arrived(layout.ranks),
        report(std::make_unique<RingReport>()) {}
  Memory ring;
  Memory send;
  Memory receive;
  std::vector<std::uint64_t> counts;
  std::vector<std::uint64_t> arrived;
  std::unique_ptr<RingReport> report;
};

class Ranks {
 public:
  Ranks(const RingLayout& layout, const RingShape& shape, std::uint64_t first = 0)
      : layout_(layout), shape_(shape), sequence_(first) {
    for (std::uint32_t i = 0; i < layout.ranks; ++i)
      ranks_.emplace_back(layout, layout.ranks * layout.slot_bytes);
    // As if `first` exchanges had passed.
    for (std::uint32_t at = 0; at < layout.ranks; ++at) {
      const RingExchange x = step_of(at, RingStep::kExchange);
      for (std::uint32_t of = 0; of < layout.ranks; ++of) {
        *ring_head(x, at, of) = first;
        *ring_tail(x, at, of) = first;
        RingExchange zeroth = x;
        zeroth.sequence = 0;  // the slots of a channel lie behind each other
        std::uint64_t* pieces = ring_pieces(zeroth, at, of);
        for (std::uint64_t cell = 0; cell < layout.slots * kRingMostPieces; ++cell) pieces[cell] = first;
      }
    }
  }

  [[nodiscard]] Rank& at(std::uint32_t rank) { return ranks_[rank]; }
  [[nodiscard]] std::uint64_t sequence() const { return sequence_; }
  void advance() { ++sequence_; }

  [[nodiscard]] RingExchange step_of(std::uint32_t rank, RingStep step) {
    RingExchange x;
    x.step = step;
    x.rank = rank;
    x.layout = layout_;
    x.shape = shape_;
    x.sequence = sequence_;
    x.released = sequence_;
    for (std::uint32_t i = 0; i < layout_.ranks; ++i) x.base[i] = ranks_[i].ring.data();
    Rank& mine = ranks_[rank];
    x.send = mine.send.data();
    x.send_size = mine.send.size();
    x.send_bytes = mine.counts.data();
    x.receive = mine.receive.data();
    x.receive_size = mine.receive.size();
    x.receive_bytes = mine.arrived.data();
    x.report = mine.report.get();
    x.timeout_ns = 60 * kSecond;
    return x;
  }

  // New counts and contents for every part.
  void fill(std::mt19937_64& random, std::uint64_t most) {
    for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
      std::uint64_t at = 0;
      for (std::uint32_t peer = 0; peer < layout_.ranks; ++peer) {
        const std::uint64_t count = random() % 4 == 0 ? 0 : random() % (most + 1);
        ranks_[rank].counts[peer] = random() % 2 == 0 ? count : count / 16 * 16;
        for (std::uint64_t i = 0; i < ranks_[rank].counts[peer]; ++i)
          ranks_[rank].send.data()[at++] = content(rank, peer, sequence_, i);
      }
    }
  }

  // Equal parts of one rank.
  void fill_equal(std::uint32_t rank, std::uint64_t each) {
    for (std::uint32_t peer = 0; peer < layout_.ranks; ++peer) {
      ranks_[rank].counts[peer] = each;
      for (std::uint64_t i = 0; i < each; ++i)
        ranks_[rank].send.data()[peer * each + i] = content(rank, peer, sequence_, i);
    }
  }

  void expect_parts(std::uint32_t receiver) {
    const std::byte* data = ranks_[receiver].receive.data();
    for (std::uint32_t sender = 0; sender < layout_.ranks; ++sender) {
      const std::uint64_t count = ranks_[sender].counts[receiver];
      ASSERT_EQ(ranks_[receiver].arrived[sender], count) << "from " << sender << " to " << receiver;
      for (std::uint64_t i = 0; i < count; ++i) {
        ASSERT_EQ(data[i], content(sender, receiver, sequence_, i))
            << "byte " << i << " from " << sender << " to " << receiver << " of exchange " << sequence_;
      }
      data += count;
    }
  }

 private:
  const RingLayout layout_;
  const RingShape shape_;
  std::uint64_t sequence_;
  std::vector<Rank> ranks_;
};

// Every block of every given exchange from `first` on, on a thread of its own, started in any order.
void run_together(const std::vector<RingExchange>& exchanges, std::mt19937_64& random,
                  std::uint32_t first = 0) {
  std::vector<std::pair<const RingExchange*, std::uint32_t>> blocks;
  for (const RingExchange& x : exchanges) {
    for (std::uint32_t i = first; i < ring_block_count(x); ++i) blocks.emplace_back(&x, i);
  }
  std::shuffle(blocks.begin(), blocks.end(), random);
  std::vector<std::jthread> threads;
  threads.reserve(blocks.size());
  for (const auto& [x, index] : blocks) {
    threads.emplace_back([x = x, index = index] {
      HostBlock block;
      ring_run(*x, block, index);
    });
  }
}

std::vector<RingExchange> all_ranks(Ranks& ranks, std::uint32_t count, RingStep step) {
  std::vector<RingExchange> exchanges;
  for (std::uint32_t rank = 0; rank < count; ++rank) exchanges.push_back(ranks.step_of(rank, step));
  return exchanges;
}

TEST(RingLayout, NothingOverlapsAndAllFits) {
  const RingLayout layout{.ranks = 4, .slots = 2, .slot_bytes = 1024};
  Ranks ranks(layout, {.senders = 1, .receivers = 1, .copiers = 1});
  RingExchange x = ranks.step_of(1, RingStep::kExchange);
  std::vector<std::pair<const void*, std::uint64_t>> parts;
  for (std::uint32_t of = 0; of < layout.ranks; ++of) {
    for (std::uint64_t* word :
         {ring_head(x, 1, of), ring_tail(x, 1, of), ring_grant(x, 1, of), ring_counter(x, 1, of)})
      parts.emplace_back(word, kRingLine);
    for (x.sequence = 0; x.sequence < layout.slots; ++x.sequence) {
      parts.emplace_back(ring_header(x, 1, of), sizeof(RingHeader));
      parts.emplace_back(ring_pieces(x, 1, of), kRingMostPieces * sizeof(std::uint64_t));
      if (of != 1) parts.emplace_back(ring_slot_data(x, 1, of), layout.slot_bytes);
    }
  }
  parts.emplace_back(ring_stop_word(x, 1), kRingLine);
  std::sort(parts.begin(), parts.end());
  for (std::size_t i = 1; i < parts.size(); ++i) {
    EXPECT_LE(static_cast<const std::byte*>(parts[i - 1].first) + parts[i - 1].second, parts[i].first);
  }
  EXPECT_EQ(parts.front().first, x.base[1]);
  EXPECT_LE(static_cast<const std::byte*>(parts.back().first) + parts.back().second,
            x.base[1] + ring_memory_bytes(layout));
  x.sequence = 0;
  EXPECT_EQ(ring_slot_data(x, 1, 0) - x.base[1], static_cast<std::ptrdiff_t>(ring_data_offset(layout)));
}

TEST(RingPieces, CoverEveryMessageInFewEnoughPieces) {
  for (const std::uint64_t message : {1ULL, 100ULL, 1ULL << 15, (1ULL << 22) + 1, 1ULL << 28, 1ULL << 40}) {
    for (const std::uint32_t senders : {1U, 16U, 64U}) {
      const std::uint64_t piece = ring_piece_bytes(message, senders);
      const std::uint64_t count = ring_piece_count(message, piece);
      EXPECT_LE(count, kRingMostPieces);
      EXPECT_GE(count * piece, message);
      EXPECT_LT((count - 1) * piece, message);
      EXPECT_EQ(piece % kRingSmallestPiece, 0U);
    }
  }
  EXPECT_GE(ring_piece_count(4 << 20, ring_piece_bytes(4 << 20, 32)), 64U) << "two pieces a block";
  EXPECT_EQ(ring_piece_count(0, 0), 0U);
  EXPECT_EQ(ring_piece_count(4096, 0), 0U) << "nothing goes through the slot";
}

class RingBlocks : public testing::TestWithParam<std::uint32_t> {};

TEST_P(RingBlocks, DeliverEveryPartWhateverTheCounts) {
  const std::uint32_t count = GetParam();
  std::mt19937_64 random(count);
  Ranks ranks({.ranks = count, .slots = 2, .slot_bytes = 128 << 10},
              {.senders = 3, .receivers = 2, .copiers = 2});
  for (int round = 0; round < 12; ++round, ranks.advance()) {
    ranks.fill(random, 128 << 10);
    run_together(all_ranks(ranks, count, RingStep::kExchange), random);
    for (std::uint32_t rank = 0; rank < count; ++rank) ranks.expect_parts(rank);
  }
  const RingExchange x = ranks.step_of(0, RingStep::kExchange);
  EXPECT_EQ(*ring_head(x, 0, 1), ranks.sequence());
  EXPECT_EQ(*ring_tail(x, 0, 1), ranks.sequence());
  EXPECT_EQ(*ring_counter(x, 0, 1), 0U);
}
INSTANTIATE_TEST_SUITE_P(Ranks, RingBlocks, testing::Values(2U, 3U, 4U));

TEST(RingBlocksAcrossTheWrap, NumbersMayPassTheEndOf64Bits) {
  std::mt19937_64 random(7);
  Ranks ranks({.ranks = 2, .slots = 4, .slot_bytes = 64 << 10}, {.senders = 2, .receivers = 2, .copiers = 1},
              ~0ULL - 9);
  for (int round = 0; round < 20; ++round, ranks.advance()) {
    ranks.fill(random, 64 << 10);
    run_together(all_ranks(ranks, 2, RingStep::kExchange), random);
    ranks.expect_parts(0);
    ranks.expect_parts(1);
  }
  EXPECT_EQ(ranks.sequence(), 10U);
}

// A rank may run ahead by as many exchanges as there are slots, and no further.
TEST(RingBlocks, ARankRunsAheadByItsSlotsAndNoFurther) {
  std::mt19937_64 random(3);
  Ranks ranks({.ranks = 2, .slots = 2, .slot_bytes = 32 << 10}, {.senders = 1, .receivers = 1, .copiers = 1});
  ranks.at(0).counts = {0, 100};
  for (int ahead = 0; ahead < 2; ++ahead, ranks.advance()) {
    RingExchange x = ranks.step_of(0, RingStep::kExchange);
    HostBlock block;
    ring_run(x, block, 0);  // its sender alone
  }
  RingExchange third = ranks.step_of(0, RingStep::kExchange);
  third.timeout_ns = 1'000'000;
  HostBlock block;
  ring_run(third, block, 0);
  const RingStop& stop = ranks.at(0).report->stop;
  EXPECT_EQ(stop.what, static_cast<std::uint64_t>(RingWait::kCredit));
  EXPECT_EQ(stop.peer, 1U);
  EXPECT_EQ(stop.sequence, 2U);
  EXPECT_EQ(stop.head, 2U);
  EXPECT_EQ(stop.tail, 0U);
  EXPECT_GT(stop.waited_ns, 1'000'000U);
}

TEST(RingBlocks, WhoeverWaitsForARankThatNeverCameSaysSoOnce) {
  constexpr std::uint32_t kSending = 4;  // blocks that send: two for each peer
  std::mt19937_64 random(3);
  Ranks ranks({.ranks = 3, .slots = 2, .slot_bytes = 32 << 10}, {.senders = 2, .receivers = 3, .copiers = 2});
  auto exchanges = all_ranks(ranks, 2, RingStep::kExchange);  // rank 2 is missing
  for (RingExchange& x : exchanges) {
    for (std::uint32_t index = 0; index < kSending; ++index) {  // what these two have for others is there
      HostBlock block;
      ring_run(x, block, index);
    }
    x.timeout_ns = 5'000'000;
  }
  run_together(exchanges, random, kSending);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const RingStop& stop = ranks.at(rank).report->stop;
    EXPECT_EQ(stop.what, static_cast<std::uint64_t>(RingWait::kMessage)) << "rank " << rank;
    EXPECT_EQ(stop.peer, 2U);
  }
}

// What a piece that never lands leads to: only its own stamp is missing.
TEST(RingBlocks, AMissingPieceIsNamed) {
  std::mt19937_64 random(5);
  Ranks ranks({.ranks = 2, .slots = 2, .slot_bytes = 128 << 10},
              {.senders = 4, .receivers = 1, .copiers = 1});
  ranks.at(0).counts = {0, 128 << 10};
  RingExchange x = ranks.step_of(0, RingStep::kExchange);
  for (const std::uint32_t lane : {0U, 1U, 3U}) {
    HostBlock block;
    ring_run(x, block, lane);
  }
  RingExchange receiving = ranks.step_of(1, RingStep::kExchange);
  receiving.timeout_ns = 2'000'000;
  HostBlock block;
  ring_run(receiving, block, ring_block_count(receiving) - 1);
  const RingStop& stop = ranks.at(1).report->stop;
  EXPECT_EQ(stop.what, static_cast<std::uint64_t>(RingWait::kPiece));
  EXPECT_EQ(stop.peer, 0U);
  EXPECT_EQ(stop.piece, 2U);
  EXPECT_EQ(stop.head, 1U);
}

TEST(RingBlocks, AnOverflowIsCutAtTheSlotAndToldToBoth) {
  std::mt19937_64 random(9);
  constexpr std::uint64_t kSlot = 32 << 10;
  Ranks ranks({.ranks = 2, .slots = 2, .slot_bytes = kSlot}, {.senders = 2, .receivers = 2, .copiers = 1});
  ranks.at(0).counts = {16, kSlot + 4096};
  ranks.at(1).counts = {64, 0};
  std::memset(ranks.at(0).send.data(), 0x5A, ranks.at(0).send.size());
  const auto exchanges = all_ranks(ranks, 2, RingStep::kExchange);
  const RingExchange& x = exchanges[1];
  std::byte* behind = ring_slot_data(x, 1, 0) + kSlot;
  std::memset(behind, 0x11, 64);
  run_together(exchanges, random);
  EXPECT_EQ(behind[0], std::byte{0x11}) << "the next slot is untouched";
  EXPECT_EQ(ranks.at(1).arrived[0], kSlot);
  EXPECT_EQ(ranks.at(0).report->sent[1].wanted, kSlot + 4096);
  EXPECT_EQ(ranks.at(1).report->received[0].wanted, kSlot + 4096);
  EXPECT_EQ(ranks.at(1).report->received[0].stored, kSlot);
  EXPECT_EQ(ranks.at(1).report->received[0].stamp, 1U);
  EXPECT_EQ(ranks.at(1).report->sent[0].stamp, 0U) << "rank 1 sent what fits";
  EXPECT_EQ(ranks.at(1).report->stop.what, 0U) << "and the ring goes on";
}

TEST(RingBlocks, CountsOutOfTheirSensesNeverLeaveTheBuffers) {
  std::mt19937_64 random(9);
  Ranks ranks({.ranks = 2, .slots = 2, .slot_bytes = 32 << 10}, {.senders = 1, .receivers = 1, .copiers = 1});
  ranks.at(0).counts = {static_cast<std::uint64_t>(-5), static_cast<std::uint64_t>(-1)};
  ranks.at(1).counts = {100, 200};
  auto exchanges = all_ranks(ranks, 2, RingStep::kExchange);
  exchanges[1].receive_size = 128;
  run_together(exchanges, random);
  EXPECT_EQ(ranks.at(1).arrived[0], 0U) << "the first part took the whole send buffer";
  EXPECT_EQ(ranks.at(1).arrived[1], 128U);
  EXPECT_EQ(ranks.at(1).report->received[1].wanted, 200U);
  EXPECT_NE(ranks.at(0).report->received[0].stamp, 0U);
}

TEST(RingBlocks, InPlaceThePartsStayUntilTheRelease) {
  std::mt19937_64 random(11);
  Ranks ranks({.ranks = 3, .slots = 2, .slot_bytes = 64 << 10}, {.senders = 2, .receivers = 2, .copiers = 1});
  for (int round = 0; round < 6; ++round, ranks.advance()) {
    ranks.fill(random, 64 << 10);
    auto exchanges = all_ranks(ranks, 3, RingStep::kExchange);
    for (RingExchange& x : exchanges) x.receive = nullptr;
    run_together(exchanges, random);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      for (std::uint32_t sender = 0; sender < 3; ++sender) {
        const std::uint64_t count = ranks.at(sender).counts[rank];
        ASSERT_EQ(ranks.at(rank).arrived[sender], count);
        if (sender == rank) continue;
        const std::byte* slot = ring_slot_data(exchanges[rank], rank, sender);
        for (std::uint64_t i = 0; i < count; ++i)
          ASSERT_EQ(slot[i], content(sender, rank, ranks.sequence(), i));
        EXPECT_EQ(*ring_tail(exchanges[sender], sender, rank), ranks.sequence()) << "still held";
      }
    }
    run_together(all_ranks(ranks, 3, RingStep::kRelease), random);
    EXPECT_EQ(*ring_tail(exchanges[0], 0, 1), ranks.sequence() + 1);
  }
}

TEST(RingBlocks, OpenWaitsForEveryBufferAndCloseForEveryPart) {
  std::mt19937_64 random(13);
  Ranks ranks({.ranks = 3, .slots = 2, .slot_bytes = 32 << 10}, {.senders = 1, .receivers = 1, .copiers = 1});
  for (int round = 0; round < 5; ++round, ranks.advance()) {
    run_together(all_ranks(ranks, 3, RingStep::kOpen), random);
    auto closing = all_ranks(ranks, 3, RingStep::kClose);
    for (RingExchange& x : closing) x.equal_bytes = 777;
    run_together(closing, random);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ranks.at(rank).arrived, std::vector<std::uint64_t>(3, 777));
      EXPECT_EQ(ranks.at(rank).report->stop.what, 0U);
    }
  }
  RingExchange alone = ranks.step_of(0, RingStep::kOpen);
  alone.timeout_ns = 1'000'000;
  run_together({alone}, random);
  EXPECT_EQ(ranks.at(0).report->stop.what, static_cast<std::uint64_t>(RingWait::kGrant));
}

// Every part straight into the receive buffer of its rank; only whoever opened its buffer is written to.
TEST_P(RingBlocks, DirectEveryPartIsInPlace) {
  const std::uint32_t count = GetParam();
  std::mt19937_64 random(count);
  Ranks ranks({.ranks = count, .slots = 2, .slot_bytes = 128 << 10},
              {.senders = 3, .receivers = 1, .copiers = 2});
  for (const std::uint64_t each : {0ULL, 1ULL, 777ULL, 4096ULL, 50'000ULL, 128ULL << 10}) {
    for (std::uint32_t rank = 0; rank < count; ++rank) ranks.fill_equal(rank, each);
    auto exchanges = all_ranks(ranks, count, RingStep::kDirect);
    for (RingExchange& x : exchanges) {
      x.equal_bytes = each;
      for (std::uint32_t rank = 0; rank < count; ++rank) x.direct[rank] = ranks.at(rank).receive.data();
    }
    run_together(exchanges, random);
    for (std::uint32_t rank = 0; rank < count; ++rank) ranks.expect_parts(rank);
    ranks.advance();
  }
  const RingExchange x = ranks.step_of(0, RingStep::kDirect);
  EXPECT_EQ(*ring_head(x, 0, 1), ranks.sequence());
  EXPECT_EQ(*ring_tail(x, 0, 1), ranks.sequence());
  EXPECT_EQ(*ring_counter(x, 0, 1), 0U);
}

TEST(RingBlocks, DirectNothingIsWrittenBeforeTheBufferIsOpen) {
  std::mt19937_64 random(3);
  Ranks ranks({.ranks = 2, .slots = 2, .slot_bytes = 32 << 10}, {.senders = 2, .receivers = 1, .copiers = 1});
  RingExchange x = ranks.step_of(0, RingStep::kDirect);
  x.equal_bytes = 4096;
  for (std::uint32_t rank = 0; rank < 2; ++rank) x.direct[rank] = ranks.at(rank).receive.data();
  x.timeout_ns = 2'000'000;
  std::memset(ranks.at(0).send.data(), 0x5A, ranks.at(0).send.size());
  run_together({x}, random);
  EXPECT_EQ(ranks.at(1).receive.data()[0], std::byte{0});
  const std::uint64_t what = ranks.at(0).report->stop.what;
  EXPECT_TRUE(what == static_cast<std::uint64_t>(RingWait::kGrant) ||
              what == static_cast<std::uint64_t>(RingWait::kMessage))
      << what;
  EXPECT_EQ(*ring_head(x, 1, 0), 0U) << "nor announced";
}

// Rank 0 sends through the slots while rank 1 waits for an open buffer: in every order both find out.
TEST(RingBlocks, RanksOnDifferentPathsSaySo) {
  const auto kPath = static_cast<std::uint64_t>(RingWait::kPath);
  for (const bool waits_for_grant : {false, true}) {
    std::mt19937_64 random(3);
    Ranks ranks({.ranks = 2, .slots = 2, .slot_bytes = 32 << 10},
                {.senders = 1, .receivers = 1, .copiers = 1});
    for (std::uint32_t rank = 0; rank < 2; ++rank) ranks.fill_equal(rank, 4096);
    RingExchange slots = ranks.step_of(0, RingStep::kExchange);
    RingExchange direct = ranks.step_of(1, RingStep::kDirect);
    direct.equal_bytes = 4096;
    for (std::uint32_t rank = 0; rank < 2; ++rank) direct.direct[rank] = ranks.at(rank).receive.data();
    slots.timeout_ns = direct.timeout_ns = 2'000'000;
    HostBlock block;
    ring_run(slots, block, 0);  // the sender
    if (!waits_for_grant) direct.timeout_ns = 60 * kSecond;
    if (!waits_for_grant) ring_open_own(direct, block);
    ring_run(direct, block, waits_for_grant ? 0 : ring_block_count(direct) - 1);
    EXPECT_EQ(ranks.at(1).report->stop.what, kPath);
    ring_run(slots, block, ring_block_count(slots) - 1);  // the receiver
    EXPECT_EQ(ranks.at(0).report->stop.what, kPath);
    EXPECT_EQ(ranks.at(0).report->stop.peer, 1U);
  }
}

TEST(EmulatedExchange, RunsOnTheStreamAndFailsAsTold) {
  auto device = std::move(open_emulated_device({.capacity = 1_MiB})).value();
  const Stream stream = *device->create_stream(StreamPriority::kNormal);
  EXPECT_TRUE(device->exchange(stream, RingExchange{}).ok());
  RingExchange large;
  large.step = RingStep::kExchange;
  large.layout = {.ranks = 64, .slots = 2, .slot_bytes = 512};
  large.shape = {.senders = 1000, .receivers = 1, .copiers = 1};
  EXPECT_EQ(device->exchange(stream, large).error().code, Errc::kInvalidArgument);
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceLaunch, 1));
    EXPECT_EQ(device->exchange(stream, RingExchange{}).error().code, Errc::kIo);
  }
  EXPECT_TRUE(device->synchronize(stream).ok());
  device->destroy_stream(stream);
}

}  // namespace
}  // namespace terrace
