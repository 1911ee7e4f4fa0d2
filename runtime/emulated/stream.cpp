#include "runtime/emulated/stream.hpp"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <exception>

#include "runtime/thread_signals.hpp"

namespace terrace::emulated {

void Recording::complete(Time at, std::optional<Error> failure) {
  {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    at_ = at;
    completed_.store(true, std::memory_order_release);
  }
  done_.notify_all();
}

void Recording::wait() {
  if (completed()) return;
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return completed(); });
}

namespace {

// How far a stream's own time may lag the clock: longer than a busy machine leaves a thread unwoken, as a
// rule; short enough that copies too small for this machine's threads do not pass for fast.
constexpr std::chrono::milliseconds kMostLag{5};

Time now() { return std::chrono::steady_clock::now(); }

}  // namespace

EmulatedStream::EmulatedStream() : thread_([this](const std::stop_token& stop) { serve(stop); }) {}

EmulatedStream::~EmulatedStream() {
  TERRACE_CHECK(thread_.get_id() != std::this_thread::get_id(), "a stream is not destroyed by its own work");
  thread_.request_stop();
  thread_.join();
}

void EmulatedStream::run(Work work) { enqueue(std::move(work)); }

void EmulatedStream::transfer(Transfer transfer) { enqueue(std::move(transfer)); }

void EmulatedStream::record(std::shared_ptr<Recording> recording) {
  {
    const std::lock_guard lock(mutex_);
    if (at_rest()) {
      ready_ = std::max(ready_, now());
      recording->complete(ready_, failure_);
      return;
    }
  }
  enqueue(Complete{std::move(recording)});
}

void EmulatedStream::wait(std::shared_ptr<Recording> recording) {
  {
    const std::lock_guard lock(mutex_);
    if (at_rest() && recording->completed()) {
      ready_ = std::max(ready_, recording->at());
      if (recording->failure() && !failure_) failure_ = recording->failure();
      return;
    }
  }
  enqueue(Await{std::move(recording)});
}

template <typename Step>
void EmulatedStream::enqueue(Step step) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    operations_.push_back({.queued_at = now(), .step = std::move(step)});
    ++queued_count_;
    wake = std::exchange(idle_, false);
  }
  if (wake) queued_.notify_one();
}

Status EmulatedStream::synchronize() {
  TERRACE_CHECK(thread_.get_id() != std::this_thread::get_id(),
                "work on a stream does not wait for its own stream");
  std::unique_lock lock(mutex_);
  const std::uint64_t target = queued_count_;
  advanced_.wait(lock, [&] { return done_count_ >= target; });
  std::optional<Error> failure = std::exchange(failure_, std::nullopt);
  if (failure) return *std::move(failure);
  return {};
}

void EmulatedStream::serve(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "terrace-stream");
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);  // the link's sleeps end when they are due
  leave_signals_to_others();
  Operation operation;
  while (take(operation, stop)) {
    perform(operation);
    operation = {};  // what the work holds goes before it counts as done
    {
      const std::lock_guard lock(mutex_);
      ++done_count_;
    }
    advanced_.notify_all();
  }
}

bool EmulatedStream::take(Operation& operation, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  idle_ = operations_.empty();
  queued_.wait(lock, stop, [&] { return !operations_.empty(); });
  idle_ = false;
  if (operations_.empty()) return false;
  operation = std::move(operations_.front());
  operations_.pop_front();
  return true;
}

void EmulatedStream::perform(Operation& operation) {
  ready_ = std::max({ready_, operation.queued_at, now() - kMostLag});
  std::visit([this](const auto& step) { perform_step(step); }, operation.step);
}

void EmulatedStream::perform_step(const Work& work) {
  if (failure()) return;
  guarded([&] { work(); });
  ready_ = now();
}

void EmulatedStream::perform_step(const Transfer& transfer) {
  if (failure()) return;
  guarded([&] { ready_ = transfer(ready_); });
}

void EmulatedStream::perform_step(const Complete& complete) {
  complete.recording->complete(ready_, failure());
}

void EmulatedStream::perform_step(const Await& await) {
  await.recording->wait();
  ready_ = std::max(ready_, await.recording->at());
  if (await.recording->failure()) fail(*await.recording->failure());
}

template <typename Call>
void EmulatedStream::guarded(Call&& call) {
  try {
    call();
  } catch (const std::exception& thrown) {
    fail(Error{.code = Errc::kIo, .text = std::string("work on a stream threw: ") + thrown.what()});
  } catch (...) {
    fail(Error{.code = Errc::kIo, .text = "work on a stream threw what is no std::exception"});
  }
}

void EmulatedStream::fail(Error failure) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
}

std::optional<Error> EmulatedStream::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace terrace::emulated
