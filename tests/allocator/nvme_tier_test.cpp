// What the NVMe tier alone promises: wrong bytes never come back, whatever the file system does.
#include "allocator/tiers/nvme_tier.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>

#include "allocator/tiers/checksum.hpp"
#include "runtime/fault.hpp"
#include "tests/allocator/tier_rig.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;

constexpr Bytes kPiece = 16_KiB;

// The file a tier has open, by its descriptor: it has no name any more.
OwnedFd file_beneath() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    if (!gone && target.string().find("terrace-nvme-") != std::string::npos) {
      return OwnedFd(open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
    }
  }
  return {};
}

class NvmeTierTest : public testing::TestWithParam<IoChoice> {
 protected:
  std::unique_ptr<NvmeTier> open(Bytes size = 2_MiB) {
    return std::move(rig_.open_nvme({.folder = rig_.folder.path(),
                                     .size = size,
                                     .piece = kPiece,
                                     .pieces = 4,
                                     .io = GetParam()}))
        .value();
  }
  Status store(NvmeTier& tier, const TierBlock& block, std::uint64_t tag) {
    write_pattern(rig_.hbm, block.size, tag);
    return tier.store(block, rig_.hbm, {})->synchronize();
  }
  Status load(NvmeTier& tier, const TierBlock& block) {
    std::memset(rig_.hbm, 0, block.size.count());
    return tier.load(rig_.hbm, block, {})->synchronize();
  }
  TierRig rig_;
};

INSTANTIATE_TEST_SUITE_P(Engines, NvmeTierTest, testing::Values(IoChoice::kAuto, IoChoice::kThreads),
                         [](const auto& param) {
                           return param.param == IoChoice::kThreads ? std::string("threads")
                                                                    : std::string("automatic");
                         });

TEST_P(NvmeTierTest, ItSaysHowItReachesTheFile) {
  auto tier = open();
  const TierInfo before = tier->info();
  EXPECT_FALSE(before.device_addressable);
  EXPECT_FALSE(before.stream_ordered);
  EXPECT_TRUE(before.needs_pinning);
  EXPECT_EQ(before.store_bytes_per_second, 0);
  if (GetParam() == IoChoice::kThreads) {
    EXPECT_THAT(before.how, HasSubstr("threads"));
  }
  const OwnedFd probe(::open(rig_.folder.path().c_str(), O_TMPFILE | O_RDWR | O_DIRECT, 0600));
  if (probe.valid()) {
    EXPECT_THAT(before.how, HasSubstr("O_DIRECT"));
  }
  const TierBlock block = *tier->allocate(200_KiB, Pool::kOptimizer);
  ASSERT_TRUE(store(*tier, block, 1));
  ASSERT_TRUE(load(*tier, block));
  EXPECT_GT(tier->info().store_bytes_per_second, 0);
  EXPECT_GT(tier->info().load_bytes_per_second, 0);
  EXPECT_TRUE(tier->free(block));
}

TEST_P(NvmeTierTest, NothingIsLeftInTheFolder) {
  auto tier = open();
  EXPECT_TRUE(std::filesystem::is_empty(rig_.folder.path())) << "not even while it is used";
}

TEST_P(NvmeTierTest, ATornWriteIsFound) {
  auto tier = open();
  const TierBlock first = *tier->allocate(5 * kPiece, Pool::kActivation);
  const TierBlock second = *tier->allocate(5 * kPiece, Pool::kActivation);
  ASSERT_TRUE(store(*tier, first, 1));
  ASSERT_TRUE(store(*tier, second, 2));
  // The second half of a piece of the first block is what it was before: zeros.
  const OwnedFd file = file_beneath();
  ASSERT_TRUE(file.valid());
  const std::vector<char> zeros(kPiece.count() / 2, 0);
  ASSERT_EQ(pwrite(file.get(), zeros.data(), zeros.size(), 2 * kPiece.count() + kPiece.count() / 2),
            static_cast<ssize_t>(zeros.size()));
  const Status torn = load(*tier, first);
  ASSERT_FALSE(torn);
  EXPECT_EQ(torn.error().code, Errc::kIo);
  EXPECT_THAT(torn.error().text, HasSubstr("torn or stale"));
  EXPECT_THAT(torn.error().text, HasSubstr("at 32768 of 81920"));
  EXPECT_TRUE(load(*tier, second));
  EXPECT_TRUE(has_pattern(rig_.hbm, second.size, 2));
  // The block serves again.
  ASSERT_TRUE(store(*tier, first, 3));
  EXPECT_TRUE(load(*tier, first));
  EXPECT_TRUE(has_pattern(rig_.hbm, first.size, 3));
  EXPECT_TRUE(tier->free(first));
  EXPECT_TRUE(tier->free(second));
}

TEST_P(NvmeTierTest, OneBitIsFound) {
  auto tier = open();
  const TierBlock block = *tier->allocate(kPiece + 5_B, Pool::kActivation);
  ASSERT_TRUE(store(*tier, block, 1));
  const OwnedFd file = file_beneath();
  const auto last = static_cast<off_t>(kPiece.count() + 4);
  std::array<unsigned char, 1> byte{};
  ASSERT_EQ(pread(file.get(), byte.data(), 1, last), 1);
  byte[0] ^= 1U;
  ASSERT_EQ(pwrite(file.get(), byte.data(), 1, last), 1);
  EXPECT_FALSE(load(*tier, block));
  EXPECT_TRUE(tier->free(block));
}

// A drive that acknowledges a write and loses it gives back the bytes of the store before.
TEST_P(NvmeTierTest, AStaleWriteIsFound) {
  auto tier = open();
  const TierBlock block = *tier->allocate(3 * kPiece, Pool::kActivation);
  ASSERT_TRUE(store(*tier, block, 1));
  const OwnedFd file = file_beneath();
  std::vector<char> old(kPiece.count());
  const auto at = static_cast<off_t>(kPiece.count());
  ASSERT_EQ(pread(file.get(), old.data(), old.size(), at), static_cast<ssize_t>(old.size()));
  ASSERT_TRUE(store(*tier, block, 2));
  ASSERT_EQ(pwrite(file.get(), old.data(), old.size(), at), static_cast<ssize_t>(old.size()));
  const Status stale = load(*tier, block);
  ASSERT_FALSE(stale);
  EXPECT_THAT(stale.error().text, HasSubstr("torn or stale"));
  EXPECT_TRUE(tier->free(block));
}

TEST_P(NvmeTierTest, ATruncatedFileIsFound) {
  auto tier = open(128_KiB);
  const TierBlock block = *tier->allocate(128_KiB, Pool::kActivation);
  ASSERT_TRUE(store(*tier, block, 1));
  const OwnedFd file = file_beneath();
  ASSERT_EQ(ftruncate(file.get(), 100 << 10), 0);
  const Status cut = load(*tier, block);
  ASSERT_FALSE(cut);
  EXPECT_EQ(cut.error().code, Errc::kIo);
  EXPECT_THAT(cut.error().text, HasSubstr("ends before"));
  EXPECT_TRUE(tier->free(block));
}

TEST_P(NvmeTierTest, AFailedWriteOrReadIsAnErrorAndTheBlockServesAgain) {
  auto tier = open();
  const TierBlock block = *tier->allocate(6 * kPiece, Pool::kActivation);
  for (const FaultPoint point : {FaultPoint::kNvmeSubmit, FaultPoint::kNvmeComplete}) {
    {
      ScopedFaults faults(fail_call(point, 3));
      const Status failed = store(*tier, block, 1);
      ASSERT_FALSE(failed);
      EXPECT_EQ(failed.error().code, Errc::kIo);
      EXPECT_THAT(failed.error().text, HasSubstr("block " + std::to_string(block.id)));
    }
    EXPECT_TRUE(has_pattern(rig_.hbm, block.size, 1)) << "the HBM copy is the truth";
    EXPECT_EQ(tier->load(rig_.hbm, block, {}).error().code, Errc::kInvalidArgument);
    ASSERT_TRUE(store(*tier, block, 2));
    {
      ScopedFaults faults(fail_call(point, 2));
      EXPECT_FALSE(load(*tier, block));
    }
    EXPECT_TRUE(load(*tier, block)) << "a failed load leaves the block as it was";
    EXPECT_TRUE(has_pattern(rig_.hbm, block.size, 2));
  }
  EXPECT_TRUE(tier->free(block));
}

TEST_P(NvmeTierTest, ABlockDoesNotReachIntoItsNeighbour) {
  auto tier = open();
  // Neighbours in the file, of sizes that end within a block of it.
  const TierBlock first = *tier->allocate(kPiece + 1_B, Pool::kActivation);
  const TierBlock second = *tier->allocate(4095_B, Pool::kActivation);
  const TierBlock third = *tier->allocate(3 * kPiece - 7_B, Pool::kActivation);
  for (const TierBlock& block : {first, third, second, first}) ASSERT_TRUE(store(*tier, block, block.id));
  for (const TierBlock& block : {first, second, third}) {
    EXPECT_TRUE(load(*tier, block));
    EXPECT_TRUE(has_pattern(rig_.hbm, block.size, block.id));
    EXPECT_TRUE(tier->free(block));
  }
}

TEST_P(NvmeTierTest, FreedExtentsAreJoined) {
  auto tier = open(1_MiB);
  std::vector<TierBlock> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(*tier->allocate(128_KiB, Pool::kActivation));
  EXPECT_FALSE(tier->allocate(1_B, Pool::kActivation));
  for (const int i : {1, 3, 2, 0, 7, 5, 6, 4}) EXPECT_TRUE(tier->free(blocks[static_cast<std::size_t>(i)]));
  const auto whole = tier->allocate(1_MiB, Pool::kActivation);
  ASSERT_TRUE(whole);
  EXPECT_TRUE(tier->free(*whole));
}

TEST(NvmeTierOptions, OptionsOutOfRangeAreRefused) {
  TierRig rig;
  const auto code = [&](Bytes piece, unsigned pieces) {
    return rig.open_nvme({.folder = rig.folder.path(), .size = 1_MiB, .piece = piece, .pieces = pieces})
        .error()
        .code;
  };
  EXPECT_EQ(code(5000_B, 4), Errc::kInvalidArgument);
  EXPECT_EQ(code(0_B, 4), Errc::kInvalidArgument);
  EXPECT_EQ(code(2_GiB, 4), Errc::kInvalidArgument);
  EXPECT_EQ(code(16_KiB, 1), Errc::kInvalidArgument);
  EXPECT_EQ(code(16_KiB, 2000), Errc::kInvalidArgument);
}

TEST(NvmeTierOptions, NoPinnedMemoryForTheBouncesIsOutOfBudget) {
  TierRig rig;
  rig.ddr->set_budget(64_KiB);
  const auto refused = rig.open_nvme({.folder = rig.folder.path(), .size = 1_MiB});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
}

TEST(NvmeTierOptions, WhereTheSystemRefusesIoUringThreadsServe) {
  TierRig rig;
  ScopedFaults faults(fail_call(FaultPoint::kNvmeSetup, 1));
  const auto tier = rig.open_nvme({.folder = rig.folder.path(), .size = 1_MiB, .piece = kPiece, .pieces = 3});
  ASSERT_TRUE(tier);
  EXPECT_TRUE(faults.fired());
  EXPECT_THAT((*tier)->info().how, HasSubstr("threads"));
}

TEST(Checksum, DiffersByBytesAndBySeed) {
  std::array<std::byte, 100> bytes{};
  const std::uint64_t zeros = checksum(bytes, 1);
  EXPECT_EQ(checksum(bytes, 1), zeros);
  EXPECT_NE(checksum(bytes, 2), zeros);
  EXPECT_NE(checksum(std::span(bytes).first(99), 1), zeros);
  bytes[50] = std::byte{1};
  EXPECT_NE(checksum(bytes, 1), zeros);
}

}  // namespace
}  // namespace terrace
