#include "allocator/tiers/thread_engine.hpp"

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "allocator/tiers/io_thread.hpp"
#include "allocator/tiers/wake_fd.hpp"
#include "runtime/assert.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr int kThreads = 4;  // a drive's queue is deeper; a pool that has to sleep and wake gains no more

std::int64_t attempt(const IoRequest& request) {
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t moved = request.kind == IoRequest::Kind::kRead
                            ? pread(request.file, request.buffer, request.size.count(), offset)
                            : pwrite(request.file, request.buffer, request.size.count(), offset);
  return moved < 0 ? -errno : moved;
}

class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(WakeFd wake) : wake_(std::move(wake)) {}
  ~ThreadEngine() override {
    TERRACE_CHECK(in_flight_ == 0, "nothing is in flight when an I/O engine goes");
    for (std::jthread& thread : threads_) thread.request_stop();
  }
  void start() {  // throws std::system_error where there is no thread left
    for (int i = 0; i < kThreads; ++i) {
      threads_.emplace_back([this](const std::stop_token& stop) { serve(stop); });
    }
  }

  [[nodiscard]] const char* name() const override { return "threads"; }
  [[nodiscard]] Status submit(const IoRequest& request) override;
  void wait(std::optional<Nanoseconds> most, std::vector<IoOutcome>& ended) override;
  void wake() override { wake_.raise(); }

 private:
  void serve(const std::stop_token& stop);
  void reap(std::vector<IoOutcome>& ended);

  const WakeFd wake_;
  std::size_t in_flight_ = 0;  // the submitting thread's alone
  std::mutex mutex_;
  std::condition_variable_any asked_;
  std::deque<IoRequest> requests_;
  std::vector<IoOutcome> ended_;
  std::vector<std::jthread> threads_;  // last: they use all of the above
};

Status ThreadEngine::submit(const IoRequest& request) {
  if (fault_point(FaultPoint::kNvmeSubmit)) {
    return Error{.code = Errc::kIo, .text = "nvme.submit failed by a fault plan"};
  }
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(request);
  }
  ++in_flight_;
  asked_.notify_one();
  return {};
}

void ThreadEngine::serve(const std::stop_token& stop) {
  prepare_io_thread("terrace-nvme-io");
  std::unique_lock lock(mutex_);
  while (asked_.wait(lock, stop, [this] { return !requests_.empty(); })) {
    IoProgress progress(requests_.front());
    requests_.pop_front();
    lock.unlock();
    while (progress.take(attempt(progress.rest())) == IoProgress::Next::kAskAgain) {
    }
    lock.lock();
    ended_.push_back(progress.outcome());
    wake_.raise();
  }
}

void ThreadEngine::reap(std::vector<IoOutcome>& ended) {
  const std::lock_guard lock(mutex_);
  in_flight_ -= ended_.size();
  ended.insert(ended.end(), ended_.begin(), ended_.end());
  ended_.clear();
}

void ThreadEngine::wait(std::optional<Nanoseconds> most, std::vector<IoOutcome>& ended) {
  reap(ended);
  if (!ended.empty()) return;
  wake_.sleep(most);
  reap(ended);
}

}  // namespace

Result<std::unique_ptr<IoEngine>> open_thread_engine() {
  auto wake = WakeFd::create();
  if (!wake) return std::move(wake).error();
  auto engine = std::make_unique<ThreadEngine>(std::move(wake).value());
  try {
    engine->start();
  } catch (const std::system_error& refused) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = std::string("nvme tier: no thread for its reads and writes: ") + refused.what()};
  }
  return std::unique_ptr<IoEngine>(std::move(engine));
}

}  // namespace terrace
