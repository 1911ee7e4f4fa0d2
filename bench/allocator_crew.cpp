#include "bench/allocator_crew.hpp"

#include <algorithm>
#include <array>
#include <random>

namespace terrace::bench {
namespace {

constexpr std::uint64_t kSeed = 20;
// Not powers of two: requests of a training step are not.
constexpr std::array<Bytes, 16> kMixedSizes = {2_KiB,   5_KiB,   12_KiB,  24_KiB,   48_KiB, 100_KiB,
                                               192_KiB, 400_KiB, 768_KiB, 1536_KiB, 3_MiB,  6_MiB,
                                               12_MiB,  20_MiB,  40_MiB,  64_MiB};

// What a thread needs to call one system; the table's entries are loaded once, before the clock starts.
struct Caller {
  void* self;
  void* stream;
  decltype(AllocatorPlugin::allocate) allocate;
  decltype(AllocatorPlugin::release) release;
};

// Returns how many blocks were refused.
std::uint64_t pairs(const Caller& call, std::size_t bytes, std::uint64_t steps) {
  std::uint64_t refused = 0;
  for (std::uint64_t step = 0; step < steps; ++step) {
    void* block = call.allocate(call.self, bytes, call.stream);
    if (block == nullptr) {
      ++refused;
    } else {
      call.release(call.self, block, bytes, call.stream);
    }
  }
  return refused;
}

// The live blocks of one thread in the mixed case.
class LiveBlocks {
 public:
  LiveBlocks(const Caller& call, const std::vector<MixedStep>& steps) : call_(call), steps_(steps) {
    for (std::size_t slot = 0; slot < kMixedSlots; ++slot) fill(slot, steps[slot].bytes);
  }
  LiveBlocks(const LiveBlocks&) = delete;
  LiveBlocks& operator=(const LiveBlocks&) = delete;
  ~LiveBlocks() {
    for (std::size_t slot = 0; slot < kMixedSlots; ++slot) empty(slot);
  }

  // Goes on where it stopped. Returns how many blocks were refused.
  std::uint64_t run(std::uint64_t steps) {
    const std::uint64_t before = refused_;
    for (std::uint64_t step = 0; step < steps; ++step) {
      const MixedStep& next = steps_[next_++ % kMixedSteps];
      empty(next.slot);
      fill(next.slot, next.bytes);
    }
    return refused_ - before;
  }

 private:
  struct Live {
    void* address = nullptr;
    std::size_t bytes = 0;
  };
  void empty(std::size_t slot) {
    if (live_[slot].address != nullptr)
      call_.release(call_.self, live_[slot].address, live_[slot].bytes, call_.stream);
    live_[slot].address = nullptr;
  }
  void fill(std::size_t slot, std::size_t bytes) {
    live_[slot] = {call_.allocate(call_.self, bytes, call_.stream), bytes};
    if (live_[slot].address == nullptr) ++refused_;
  }

  const Caller& call_;
  const std::vector<MixedStep>& steps_;
  std::array<Live, kMixedSlots> live_{};
  std::uint64_t next_ = 0;
  std::uint64_t refused_ = 0;
};

std::string short_name(Bytes size) {
  return size < 1_MiB ? std::to_string(size / 1_KiB) + "KiB" : std::to_string(size / 1_MiB) + "MiB";
}

}  // namespace

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (Bytes size : {2_KiB, 1_MiB, 64_MiB}) {
    for (int threads : {1, 2, 4}) {
      cases.push_back(
          {short_name(size) + "/" + std::to_string(threads) + "t", Pattern::kPair, size, threads});
    }
  }
  for (int threads : {1, 4}) {
    cases.push_back({"mixed/" + std::to_string(threads) + "t", Pattern::kMixed, {}, threads});
  }
  return cases;
}

std::vector<MixedStep> mixed_steps(int thread) {
  std::mt19937_64 random(kSeed + static_cast<std::uint64_t>(thread));
  std::vector<MixedStep> steps(kMixedSteps);
  for (MixedStep& step : steps) {
    step.slot = static_cast<std::uint32_t>(random() % kMixedSlots);
    step.bytes = kMixedSizes[random() % kMixedSizes.size()].count();
  }
  return steps;
}

Crew::Crew(const std::vector<System>& systems)
    : systems_(systems), streams_(kMostThreads), outcomes_(kMostThreads) {
  for (int thread = 0; thread < kMostThreads; ++thread) mixed_.push_back(mixed_steps(thread));
  for (int thread = 0; thread < kMostThreads; ++thread) {
    threads_.emplace_back([this, thread](std::stop_token stop) { live(stop, thread); });
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return busy_ == 0; });
}

Crew::~Crew() {
  for (std::jthread& thread : threads_) thread.request_stop();  // then joined, all of them at once
}

bool Crew::has_streams(std::size_t system) const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [&](const std::vector<void*>& own) { return own[system] != nullptr; });
}

// A thread makes its streams itself: in some libraries the device is a property of the thread.
void Crew::live(std::stop_token stop, int thread) {
  const auto index = static_cast<std::size_t>(thread);
  for (const System& system : systems_) streams_[index].push_back(system.calls().new_stream(system.self()));
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  if (--busy_ == 0) changed_.notify_all();
  while (changed_.wait(lock, stop, [&] { return posted_ != seen; })) {
    seen = posted_;
    const Job job = job_;
    if (thread >= job.work->threads) continue;
    lock.unlock();
    const Outcome outcome = work_on(job, thread);
    lock.lock();
    outcomes_[index] = outcome;
    if (--busy_ == 0) changed_.notify_all();
  }
}

// All of the case's threads leave here within moments of each other.
void Crew::line_up(const Job& job) {
  ready_.fetch_add(1, std::memory_order_acq_rel);
  while (ready_.load(std::memory_order_acquire) < job.work->threads) std::this_thread::yield();
}

Crew::Outcome Crew::work_on(const Job& job, int thread) {
  const auto index = static_cast<std::size_t>(thread);
  const System& system = systems_[job.system];
  const Caller call{.self = system.self(),
                    .stream = streams_[index][job.system],
                    .allocate = system.calls().allocate,
                    .release = system.calls().release};
  const auto timed = [&](auto&& body) {
    std::uint64_t refused = body(job.steps / 10 + 1);
    line_up(job);
    const Nanoseconds began = steady_clock().now();
    refused += body(job.steps);
    return Outcome{.took = steady_clock().now() - began, .refused = refused > 0};
  };
  if (job.work->pattern == Pattern::kPair) {
    return timed([&](std::uint64_t steps) { return pairs(call, job.work->size.count(), steps); });
  }
  LiveBlocks blocks(call, mixed_[index]);
  return timed([&](std::uint64_t steps) { return blocks.run(steps); });
}

Result<Crew::Sample> Crew::run(const Case& work, std::size_t system, std::uint64_t steps) {
  std::unique_lock lock(mutex_);
  ready_ = 0;
  busy_ = work.threads;
  job_ = {.work = &work, .system = system, .steps = steps};
  ++posted_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return busy_ == 0; });
  Sample sample{};
  for (int thread = 0; thread < work.threads; ++thread) {
    const Outcome& outcome = outcomes_[static_cast<std::size_t>(thread)];
    if (outcome.refused) {
      return Error{Errc::kOutOfMemory,
                   std::string(systems_[system].name()) + " refused a block of " + work.name,
                   {},
                   {}};
    }
    sample.slowest = std::max(sample.slowest, outcome.took);
    sample.pair_ns += static_cast<double>(outcome.took.count()) / static_cast<double>(steps) / work.threads;
  }
  return sample;
}

}  // namespace terrace::bench
