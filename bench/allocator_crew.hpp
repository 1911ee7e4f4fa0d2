// The threads that measure, and what they do: a case is run by 1, 2 or 4 of them at once on one system.
//
// The blocks are not touched: what is timed is the allocator, not the page faults or caches of its memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bench/allocator_systems.hpp"
#include "runtime/clock.hpp"

namespace terrace::bench {

inline constexpr int kMostThreads = 4;

// How a thread uses its allocator in one step.
enum class Pattern : std::uint8_t {
  kPair,   // allocates a block of `size` and releases it
  kMixed,  // releases a random one of its 64 live blocks and allocates another, of one of 16 sizes from 2 KiB
           // to 64 MiB
};

struct Case {
  std::string name;  // "1MiB/2t", "mixed/4t"
  Pattern pattern = Pattern::kPair;
  Bytes size;  // kPair
  int threads = 1;
};
// 2 KiB, 1 MiB and 64 MiB at 1, 2 and 4 threads, then mixed at 1 and 4.
[[nodiscard]] std::vector<Case> all_cases();

// What one thread does before the next one is released: sizes and slots, drawn once from a seed, the same for
// every system.
struct MixedStep {
  std::uint32_t slot;
  std::size_t bytes;
};
inline constexpr std::size_t kMixedSlots = 64;
inline constexpr std::size_t kMixedSteps = 4096;  // a power of two: a longer run goes around
[[nodiscard]] std::vector<MixedStep> mixed_steps(int thread);

class Crew {
 public:
  // The threads live as long as the crew, each with a stream of its own in every system that has streams.
  // `systems` outlive it.
  explicit Crew(const std::vector<System>& systems);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Whether every thread got a stream there, as it does on a GPU that works.
  [[nodiscard]] bool has_streams(std::size_t system) const;

  struct Sample {
    double pair_ns;       // nanoseconds a step, the mean over the threads
    Nanoseconds slowest;  // what the slowest thread took for all of its steps
  };
  // Runs `steps` steps on each thread of the case, after an untimed tenth of them.
  // Errors: kOutOfMemory where the system refused a block.
  [[nodiscard]] Result<Sample> run(const Case& work, std::size_t system, std::uint64_t steps);

 private:
  struct Job {
    const Case* work = nullptr;
    std::size_t system = 0;
    std::uint64_t steps = 0;
  };
  struct Outcome {
    Nanoseconds took{};
    bool refused = false;
  };
  void live(std::stop_token stop, int thread);
  Outcome work_on(const Job& job, int thread);
  void line_up(const Job& job);

  const std::vector<System>& systems_;
  std::vector<std::vector<void*>> streams_;    // by thread, by system
  std::vector<std::vector<MixedStep>> mixed_;  // by thread

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::uint64_t posted_ = 0;  // jobs so far
  int busy_ = kMostThreads;   // threads that are not done with the last one, or with making their streams
  Job job_;
  std::vector<Outcome> outcomes_;  // by thread
  std::atomic<int> ready_{0};
  std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace terrace::bench
