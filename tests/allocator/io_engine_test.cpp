#include "allocator/tiers/io_engine.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <set>
#include <thread>

#include "allocator/tiers/io_thread.hpp"
#include "allocator/tiers/nvme_file.hpp"
#include "allocator/tiers/ring_engine.hpp"
#include "allocator/tiers/thread_engine.hpp"
#include "allocator/tiers/wake_fd.hpp"
#include "runtime/fault.hpp"
#include "tests/allocator/tier_rig.hpp"

namespace terrace {
namespace {

using Next = IoProgress::Next;

IoProgress reading(Bytes size) {
  return IoProgress({.kind = IoRequest::Kind::kRead, .file = 3, .size = size, .offset = 8192, .tag = 5});
}

TEST(IoProgress, AShortTransferGoesOnAtTheBlockWhereItEnded) {
  IoProgress progress = reading(64_KiB);
  EXPECT_EQ(progress.take(20'000), Next::kAskAgain);
  EXPECT_EQ(progress.rest().offset, 8192U + 16'384U);
  EXPECT_EQ(progress.rest().size, 48_KiB);
  EXPECT_EQ(progress.take(48 << 10), Next::kDone);
  EXPECT_EQ(progress.outcome().error, 0);
  EXPECT_EQ(progress.outcome().tag, 5U);
}

TEST(IoProgress, InterruptionsAreBounded) {
  IoProgress progress = reading(64_KiB);
  int tries = 0;
  while (progress.take(tries % 2 == 0 ? -EINTR : -EAGAIN) == Next::kAskAgain) ASSERT_LT(++tries, 1000);
  EXPECT_GT(tries, 10);
  EXPECT_NE(progress.outcome().error, 0);
}

TEST(IoProgress, ShortTransfersThatGetNowhereAreBounded) {
  IoProgress progress = reading(64_KiB);
  int tries = 0;
  while (progress.take(100) == Next::kAskAgain) ASSERT_LT(++tries, 1000);
  EXPECT_EQ(progress.outcome().error, EIO);
}

TEST(IoProgress, ErrorsAndTheEndOfTheFileFail) {
  IoProgress refused = reading(64_KiB);
  EXPECT_EQ(refused.take(-ENOSPC), Next::kFailed);
  EXPECT_EQ(refused.outcome().error, ENOSPC);
  IoProgress ended = reading(64_KiB);
  EXPECT_EQ(ended.take(4096), Next::kAskAgain);
  EXPECT_EQ(ended.take(0), Next::kFailed);
  EXPECT_EQ(ended.outcome().error, ENODATA);
}

constexpr unsigned kDepth = 8;
constexpr Bytes kSize = 16_KiB;

class IoEngineTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    auto engine = GetParam() ? open_ring_engine(kDepth) : open_thread_engine();
    if (!engine && engine.error().code == Errc::kNotSupported) GTEST_SKIP() << engine.error().text;
    engine_ = std::move(engine).value();
    file_.emplace(std::move(NvmeFile::create({.folder = folder_.path(), .size = kSize * 64})).value());
    memory_ = static_cast<Address>(aligned_alloc(kFileAlignment.count(), (kSize * kDepth).count()));
  }
  void TearDown() override {
    engine_.reset();
    free(memory_);
  }
  IoRequest request(IoRequest::Kind kind, std::uint64_t slot, std::uint64_t place) {
    return {.kind = kind,
            .file = file_->fd(),
            .buffer = memory_ + slot * kSize.count(),
            .size = kSize,
            .offset = place * kSize.count(),
            .tag = slot};
  }
  // All that is in flight, by tag.
  std::map<std::uint64_t, int> finish(std::size_t count) {
    std::map<std::uint64_t, int> errors;
    std::vector<IoOutcome> ended;
    while (errors.size() < count) {
      engine_->wait(std::nullopt, ended);
      for (const IoOutcome& outcome : ended) {
        EXPECT_TRUE(errors.emplace(outcome.tag, outcome.error).second) << "ended twice";
      }
      ended.clear();
    }
    return errors;
  }

  ScratchFolder folder_;
  std::unique_ptr<IoEngine> engine_;
  std::optional<NvmeFile> file_;
  Address memory_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(Both, IoEngineTest, testing::Bool(),
                         [](const auto& param) { return param.param ? "ring" : "threads"; });

TEST_P(IoEngineTest, AFullDepthOfRequestsEndsEachOnce) {
  for (std::uint64_t round = 0; round < 8; ++round) {
    for (std::uint64_t slot = 0; slot < kDepth; ++slot) {
      write_pattern(memory_ + slot * kSize.count(), kSize, round * kDepth + slot + 1);
      ASSERT_TRUE(engine_->submit(request(IoRequest::Kind::kWrite, slot, round * kDepth + slot)));
    }
    for (const auto& [tag, error] : finish(kDepth)) EXPECT_EQ(error, 0);
  }
  for (std::uint64_t round = 8; round-- > 0;) {
    std::memset(memory_, 0, (kSize * kDepth).count());
    for (std::uint64_t slot = 0; slot < kDepth; ++slot) {
      ASSERT_TRUE(engine_->submit(request(IoRequest::Kind::kRead, slot, round * kDepth + slot)));
    }
    for (const auto& [tag, error] : finish(kDepth)) EXPECT_EQ(error, 0);
    for (std::uint64_t slot = 0; slot < kDepth; ++slot) {
      EXPECT_TRUE(has_pattern(memory_ + slot * kSize.count(), kSize, round * kDepth + slot + 1));
    }
  }
}

TEST_P(IoEngineTest, TheKernelsErrorsComeBackWithTheirTag) {
  IoRequest closed = request(IoRequest::Kind::kRead, 1, 0);
  closed.file = 1 << 20;
  ASSERT_TRUE(engine_->submit(closed));
  ASSERT_TRUE(engine_->submit(request(IoRequest::Kind::kRead, 2, 64)));  // past the end
  ASSERT_TRUE(engine_->submit(request(IoRequest::Kind::kRead, 3, 0)));
  const auto errors = finish(3);
  EXPECT_EQ(errors.at(1), EBADF);
  EXPECT_EQ(errors.at(2), ENODATA);
  EXPECT_EQ(errors.at(3), 0);
}

TEST_P(IoEngineTest, ARequestNotTakenIsAnErrorAndNothingElseSuffers) {
  ScopedFaults faults(fail_call(FaultPoint::kNvmeSubmit, 2));
  ASSERT_TRUE(engine_->submit(request(IoRequest::Kind::kRead, 0, 0)));
  const Status refused = engine_->submit(request(IoRequest::Kind::kRead, 1, 1));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kIo);
  ASSERT_TRUE(engine_->submit(request(IoRequest::Kind::kRead, 1, 1)));
  EXPECT_EQ(finish(2).size(), 2U);
}

TEST_P(IoEngineTest, ASleeperIsWokenAndATimeEnds) {
  std::vector<IoOutcome> ended;
  engine_->wait(std::chrono::milliseconds(1), ended);
  EXPECT_TRUE(ended.empty());
  engine_->wake();
  engine_->wait(std::nullopt, ended);  // woken before it slept
  std::jthread waker([this] { engine_->wake(); });
  engine_->wait(std::nullopt, ended);
  EXPECT_TRUE(ended.empty());
}

TEST(IoEngine, ThreadsServeWhereNothingElseMay) {
  EXPECT_STREQ((*open_io_engine(IoChoice::kThreads, kDepth))->name(), "threads");
  ScopedFaults faults(fail_call(FaultPoint::kNvmeSetup, 1));
  EXPECT_STREQ((*open_io_engine(IoChoice::kAuto, kDepth))->name(), "threads");
  EXPECT_TRUE(faults.fired());
}

TEST(WakeFd, OneRaiseEndsOneSleep) {
  const auto wake = WakeFd::create();
  ASSERT_TRUE(wake);
  wake->raise();
  wake->raise();
  wake->sleep(std::nullopt);
  wake->sleep(std::chrono::milliseconds(1));  // nothing left: only the time ends it
}

TEST(IoThread, HasItsNameAndLeavesSignalsToOthers) {
  std::array<char, 16> name{};
  bool blocked = false;
  bool faults_open = false;
  std::jthread([&] {
    prepare_io_thread("terrace-test");
    pthread_getname_np(pthread_self(), name.data(), name.size());
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    blocked = sigismember(&mask, SIGTERM) == 1;
    faults_open = sigismember(&mask, SIGSEGV) == 0;
  }).join();
  EXPECT_STREQ(name.data(), "terrace-test");
  EXPECT_TRUE(blocked);
  EXPECT_TRUE(faults_open);
}

}  // namespace
}  // namespace terrace
