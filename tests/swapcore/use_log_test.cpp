#include "swapcore/stable/use_log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

namespace terrace {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(UseLog, IsReadInTheOrderOfTurnsUpToWhatIsNotWrittenYet) {
  UseLog log;
  std::vector<std::uint32_t> read;
  const std::uint64_t first = log.reserve(2), second = log.reserve(1);
  log.write(second, 9);
  std::uint64_t at = log.read(0, read);
  EXPECT_THAT(read, IsEmpty());
  log.write(first, 0);
  log.write(first + 1, 8);
  at = log.read(at, read);
  EXPECT_THAT(read, ElementsAre(0, 8, 9));
  EXPECT_EQ(log.read(at, read), at);
}

TEST(UseLog, AReaderThatFallsBehindMissesUsesAndReadsNoneTwice) {
  UseLog log;
  for (std::uint32_t i = 0; i < 300000; ++i) log.write(log.reserve(1), i);
  std::vector<std::uint32_t> read;
  const std::uint64_t at = log.read(5, read);
  EXPECT_EQ(at, log.now());
  log.write(log.reserve(1), 77);
  read.clear();
  (void)log.read(at, read);
  EXPECT_THAT(read, ElementsAre(77));
}

TEST(UseLog, ManyWritersOneReader) {
  UseLog log;
  std::vector<std::uint32_t> read;
  std::uint64_t at = 0;
  {
    std::vector<std::jthread> writers;
    for (std::uint32_t who = 0; who < 3; ++who) {
      writers.emplace_back([&log, who] {
        for (std::uint32_t i = 0; i < 5000; ++i) log.write(log.reserve(1), who * 10000 + i);
      });
    }
    for (int i = 0; i < 1000; ++i) at = log.read(at, read);
  }
  (void)log.read(at, read);
  ASSERT_EQ(read.size(), 15000U);
  std::array<std::uint32_t, 3> next{};
  for (const std::uint32_t use : read) ASSERT_EQ(use % 10000, next[use / 10000]++);
}

}  // namespace
}  // namespace terrace
