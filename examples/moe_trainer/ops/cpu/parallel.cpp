#include "examples/moe_trainer/ops/cpu/parallel.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

namespace terrace::trainer::cpu {
namespace {

using detail::ChunkBody;

struct Job {
  std::int64_t chunks = 0;
  ChunkBody body = nullptr;
  void* context = nullptr;
};

thread_local std::int64_t inside_worker = -1;  // this thread's worker number while it runs chunks

// A round is one job. Its number is published together with the job under the lock, so a worker that wakes
// late sees either a round it may join or none; the caller leaves only when everyone who joined has left.
class ThreadPool {
 public:
  static ThreadPool& instance() {
    static ThreadPool pool;
    return pool;
  }

  [[nodiscard]] std::int64_t workers() const { return workers_; }

  void run(const Job& job) {
    std::unique_lock<std::mutex> next(next_);
    const std::lock_guard<std::mutex> turn(turn_);
    next.unlock();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      next_chunk_.store(0, std::memory_order_relaxed);
      open_ = true;
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    inside_worker = 0;
    take_chunks(job, 0);
    inside_worker = -1;
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;
    left_.wait(lock, [&] { return joined_ == 0; });
    if (const std::exception_ptr thrown = std::exchange(thrown_, nullptr)) std::rethrow_exception(thrown);
  }

 private:
  ThreadPool() : workers_(std::max<std::int64_t>(1, std::thread::hardware_concurrency())) {
    for (std::int64_t w = 1; w < workers_; ++w) {
      threads_.emplace_back([this, w](const std::stop_token& stop) { serve(stop, w); });
    }
  }
  ~ThreadPool() = default;  // jthreads ask to stop, wake and join

  void take_chunks(const Job& job, std::int64_t worker) {
    for (;;) {
      const std::int64_t chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= job.chunks) return;
      try {
        job.body(job.context, chunk, worker);
      } catch (...) {  // for the caller; the other chunks run
        const std::lock_guard<std::mutex> lock(mutex_);
        if (thrown_ == nullptr) thrown_ = std::current_exception();
      }
    }
  }

  // Operators follow one another within microseconds: a short spin saves the wake-up.
  void spin_for_round_after(std::uint64_t seen) const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
    while (round_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until) {
    }
  }

  void serve(const std::stop_token& stop, std::int64_t worker) {
    std::uint64_t seen = 0;
    inside_worker = worker;
    while (!stop.stop_requested()) {
      spin_for_round_after(seen);
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, stop, [&] { return round_.load(std::memory_order_relaxed) != seen; });
        seen = round_.load(std::memory_order_relaxed);
        if (stop.stop_requested()) return;
        if (!open_) continue;
        job = job_;
        ++joined_;
      }
      take_chunks(job, worker);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--joined_ == 0) left_.notify_one();
    }
  }

  const std::int64_t workers_;
  // One caller at a time, and who came first is next: streams whose operators follow one another closely
  // would otherwise keep a second stream's out.
  std::mutex next_, turn_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::condition_variable left_;
  Job job_;
  bool open_ = false;
  std::int64_t joined_ = 0;
  std::exception_ptr thrown_;  // the round's first
  std::atomic<std::int64_t> next_chunk_{0};
  std::atomic<std::uint64_t> round_{0};
  std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace

std::int64_t worker_count() { return ThreadPool::instance().workers(); }

namespace detail {

void run_chunks(std::int64_t chunks, ChunkBody body, void* context) {
  if (chunks <= 0) return;
  if (inside_worker >= 0 || chunks == 1) {
    const std::int64_t worker = std::max<std::int64_t>(inside_worker, 0);
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) body(context, chunk, worker);
    return;
  }
  ThreadPool::instance().run({.chunks = chunks, .body = body, .context = context});
}

}  // namespace detail
}  // namespace terrace::trainer::cpu
