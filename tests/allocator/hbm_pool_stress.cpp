// Threads take, use and free device memory of one pool on streams of their own, hand blocks to each other,
// and come and go, while the main thread walks the heap and changes budget and limits.
//
//   hbm_pool_stress [--threads 8] [--seconds 3] [--streams 2] [--seed 1]
//
// `--streams` is for each thread. Every block is tagged and checked by work on its streams, so a block that
// two owners hold at a time, or that is reused ahead of its free, shows. Ends with 0 where all was clean.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "allocator/hbm_pool.hpp"

namespace terrace {
namespace {

struct Settings {
  unsigned threads = 8;
  unsigned seconds = 3;
  unsigned streams = 2;
  unsigned seed = 1;
};

constexpr Bytes kBudget = 64_MiB;

struct Held {
  Block block;
  Stream stream;  // on which it was last used
  std::uint64_t tag = 0;
};

class Stress {
 public:
  explicit Stress(const Settings& settings)
      : settings_(settings),
        device_(std::move(open_emulated_device({.capacity = 96_MiB})).value()),
        pool_(std::move(HbmPool::create(*device_, {.budget = kBudget, .chunk = 512_KiB})).value()),
        tenant_(*pool_->tenant("stress")) {}

  int run() {
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < settings_.threads; ++t) {
      threads.emplace_back([this, t] { serve(t); });
    }
    supervise();
    stop_ = true;
    threads.clear();
    for (const Held& held : handed_) expect(pool_->free_completed(held.block).ok(), "free at the end");
    expect(pool_->usage().live == 0_B, "nothing is live at the end");
    const auto walked = pool_->walk();
    expect(walked.ok(), walked.ok() ? "" : walked.error().text.c_str());
    const auto operations = operations_.load();
    pool_.reset();
    expect(device_->memory()->free == device_->memory()->total, "the device has all its memory back");
    std::printf("%llu operations by %u threads, %llu walks, %llu blocks checked, %d failures\n",
                static_cast<unsigned long long>(operations), settings_.threads,
                static_cast<unsigned long long>(walks_), static_cast<unsigned long long>(checked_.load()),
                failures_.load());
    return failures_ == 0 ? 0 : 1;
  }

 private:
  void expect(bool held, const char* what) {
    if (held) return;
    if (failures_.fetch_add(1) < 10) std::fprintf(stderr, "failed: %s\n", what);
  }

  void supervise() {
    std::mt19937 random(settings_.seed);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(settings_.seconds);
    while (std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      const auto walked = pool_->walk();
      expect(walked.ok(), walked.ok() ? "" : walked.error().text.c_str());
      ++walks_;
      switch (random() % 8) {
        case 0:
          (void)pool_->set_budget(random() % 2 == 0 ? kBudget : 24_MiB);
          break;
        case 1:
          pool_->set_limit(Pool::kExpert, random() % 2 == 0 ? kNoLimit : 4_MiB);
          break;
        case 2:
          expect(pool_->set_limit(tenant_, random() % 2 == 0 ? kNoLimit : 2_MiB).ok(), "set_limit");
          break;
        case 3:
          (void)pool_->trim();
          break;
        default:
          (void)pool_->take_watermark();
          break;
      }
      const PoolUsage usage = pool_->usage();
      expect(usage.live_peak >= usage.live, "the peak is no less than what is live");
    }
  }

  // Some rounds, each by a fresh thread with fresh streams: threads and streams end with blocks in caches.
  void serve(unsigned number) {
    for (unsigned round = 0; !stop_; ++round) {
      std::jthread([&] { one_life(number, round); });
    }
  }

  void one_life(unsigned number, unsigned round) {
    std::vector<Stream> streams;
    for (unsigned i = 0; i < settings_.streams; ++i) {
      auto stream = device_->create_stream(StreamPriority::kNormal);
      expect(stream.ok(), "create_stream");
      if (stream) streams.push_back(*stream);
    }
    std::mt19937 random(settings_.seed * 1000 + number * 100 + round);
    std::vector<Held> mine;
    for (int i = 0; i < 4000 && !stop_; ++i) {
      operations_.fetch_add(1, std::memory_order_relaxed);
      const Stream stream = streams[random() % streams.size()];
      if (mine.size() < 40 && random() % 2 == 0) {
        take(random, stream, mine);
      } else if (!mine.empty()) {
        std::swap(mine[random() % mine.size()], mine.back());
        const Held held = mine.back();
        mine.pop_back();
        if (random() % 8 == 0) {
          hand_over(held);
        } else {
          check_and_free(held, held.stream);
        }
      }
      if (random() % 16 == 0) adopt(mine);
    }
    for (const Held& held : mine) check_and_free(held, held.stream);
    for (const Stream stream : streams) device_->destroy_stream(stream);
  }

  void take(std::mt19937& random, Stream stream, std::vector<Held>& mine) {
    const Bytes size(8 + random() % (random() % 6 == 0 ? 600'000 : 12'000));
    const auto pool = static_cast<Pool>(random() % kPoolCount);
    const auto block = random() % 8 == 0 ? pool_->allocate(stream, size, pool, {.tenant = tenant_})
                                         : pool_->allocate(stream, size, pool);
    if (!block) {
      expect(block.error().code == Errc::kOutOfBudget || block.error().code == Errc::kOutOfMemory,
             block.error().text.c_str());
      return;
    }
    const Held held{*block, stream, ++tags_};
    expect(device_
               ->launch_host(stream,
                             [held] {
                               std::memcpy(held.block.address, &held.tag, 8);
                               std::memcpy(held.block.address + held.block.size.count() - 8, &held.tag, 8);
                             })
               .ok(),
           "launch");
    mine.push_back(held);
  }

  void check_and_free(const Held& held, Stream stream) {
    expect(device_->launch_host(stream, [this, held] { check(held); }).ok(), "launch");
    expect(pool_->free(stream, held.block).ok(), "free");
  }
  void check(const Held& held) {
    std::uint64_t first = 0, last = 0;
    std::memcpy(&last, held.block.address + held.block.size.count() - 8, 8);
    std::memcpy(&first, held.block.address, 8);
    if (held.block.size >= 16_B) expect(first == held.tag, "a block keeps its first bytes");
    expect(last == held.tag, "a block keeps its last bytes");
    checked_.fetch_add(1, std::memory_order_relaxed);
  }

  // To another thread, with all work on it done.
  void hand_over(const Held& held) {
    expect(device_->synchronize(held.stream).ok(), "synchronize");
    const std::lock_guard lock(handed_mutex_);
    handed_.push_back(held);
  }
  void adopt(std::vector<Held>& mine) {
    const std::lock_guard lock(handed_mutex_);
    if (handed_.empty() || mine.empty()) return;
    Held held = handed_.front();
    handed_.pop_front();
    held.stream = mine.back().stream;
    mine.push_back(held);
  }

  const Settings settings_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<HbmPool> pool_;
  TenantId tenant_;
  std::mutex handed_mutex_;
  std::deque<Held> handed_;
  std::atomic<bool> stop_{false};
  std::atomic<int> failures_{0};
  std::atomic<std::uint64_t> operations_{0}, checked_{0}, tags_{0};
  std::uint64_t walks_ = 0;
};

bool read(int count, char** words, Settings& settings) {
  for (int i = 1; i < count; i += 2) {
    const std::string_view name = words[i];
    const long value = i + 1 < count ? std::strtol(words[i + 1], nullptr, 10) : 0;
    unsigned* setting = name == "--threads"   ? &settings.threads
                        : name == "--seconds" ? &settings.seconds
                        : name == "--streams" ? &settings.streams
                        : name == "--seed"    ? &settings.seed
                                              : nullptr;
    if (setting == nullptr || value < 1 || value > 10'000) return false;
    *setting = static_cast<unsigned>(value);
  }
  return true;
}

}  // namespace
}  // namespace terrace

int main(int count, char** words) {
  terrace::Settings settings;
  if (!terrace::read(count, words, settings)) {
    std::fprintf(stderr, "usage: hbm_pool_stress [--threads N] [--seconds N] [--streams N] [--seed N]\n");
    return 2;
  }
  return terrace::Stress(settings).run();
}
