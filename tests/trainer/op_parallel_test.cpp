#include "examples/moe_trainer/ops/cpu/parallel.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace terrace::trainer::cpu {
namespace {

TEST(Parallel, RunsEveryChunkOnce) {
  for (const std::int64_t chunks : {0, 1, 2, 3, 1000}) {
    std::vector<int> runs(static_cast<std::size_t>(chunks), 0);
    parallel_for(chunks, [&](std::int64_t chunk, std::int64_t worker) {
      ++runs[static_cast<std::size_t>(chunk)];
      EXPECT_GE(worker, 0);
      EXPECT_LT(worker, worker_count());
    });
    for (const int n : runs) EXPECT_EQ(n, 1);
  }
}

TEST(Parallel, RangesCoverTheCountWhateverTheGrain) {
  for (const std::int64_t grain : {1, 7, 100, 1000}) {
    std::vector<int> seen(100, 0);
    parallel_ranges(100, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
    });
    for (const int n : seen) EXPECT_EQ(n, 1);
  }
}

// No two chunks that run at the same time share a worker's scratch.
TEST(Parallel, AWorkerRunsOneChunkAtATime) {
  std::vector<std::atomic<int>> busy(static_cast<std::size_t>(worker_count()));
  for (int round = 0; round < 200; ++round) {
    parallel_for(8, [&](std::int64_t, std::int64_t worker) {
      EXPECT_EQ(busy[static_cast<std::size_t>(worker)].fetch_add(1), 0);
      busy[static_cast<std::size_t>(worker)].fetch_sub(1);
    });
  }
}

TEST(Parallel, CallsInsideAChunkStayOnItsWorker) {
  std::atomic<int> inner{0};
  parallel_for(16, [&](std::int64_t, std::int64_t outer) {
    parallel_for(4, [&](std::int64_t, std::int64_t worker) {
      EXPECT_EQ(worker, outer);
      ++inner;
    });
  });
  EXPECT_EQ(inner, 64);
}

TEST(Parallel, CallersFromSeveralThreadsTakeTurns) {
  std::vector<std::int64_t> sums(3, 0);
  {
    std::vector<std::jthread> callers;
    for (std::size_t c = 0; c < sums.size(); ++c) {
      callers.emplace_back([&sums, c] {
        for (int round = 0; round < 100; ++round) {
          std::vector<std::int64_t> parts(10, 0);
          parallel_for(
              10, [&](std::int64_t chunk, std::int64_t) { parts[static_cast<std::size_t>(chunk)] = chunk; });
          for (const std::int64_t part : parts) sums[c] += part;
        }
      });
    }
  }
  for (const std::int64_t sum : sums) EXPECT_EQ(sum, 4500);
}

}  // namespace
}  // namespace terrace::trainer::cpu
