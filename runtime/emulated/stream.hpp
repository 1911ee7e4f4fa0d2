// A stream of the emulated device: a thread that runs operations in the order in which they were queued, and
// the recordings by which streams and the host wait for each other.
//
// When an operation fails (work that throws), the data operations behind it are dropped until synchronize()
// has reported it; recordings and waits go on, so nobody hangs, and the failure travels with the recordings.
//
// A stream keeps its own time: when its last operation ended, by the link's reckoning for a copy, else by the
// clock. Recordings carry it. So what events measure of a copy is the copy, and not how late a busy machine
// woke the thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <variant>

#include "runtime/emulated/link.hpp"
#include "runtime/result.hpp"

namespace terrace::emulated {

// One record() of an event: completes once, and is never used again. Whoever waits keeps it alive.
class Recording {
 public:
  void complete(Time at, std::optional<Error> failure);
  [[nodiscard]] bool completed() const { return completed_.load(std::memory_order_acquire); }
  void wait();
  // Precondition of both: completed().
  [[nodiscard]] Time at() const { return at_; }
  [[nodiscard]] const std::optional<Error>& failure() const { return failure_; }

 private:
  std::atomic<bool> completed_{false};
  Time at_;
  std::optional<Error> failure_;
  std::mutex mutex_;
  std::condition_variable done_;
};

class EmulatedStream {
 public:
  using Work = std::function<void()>;
  using Transfer = std::function<Time(Time ready)>;  // gives back when it ended

  EmulatedStream();
  ~EmulatedStream();  // runs what is queued, then stops the thread
  EmulatedStream(const EmulatedStream&) = delete;
  EmulatedStream& operator=(const EmulatedStream&) = delete;

  void run(Work work);
  void transfer(Transfer transfer);
  void record(std::shared_ptr<Recording> recording);
  void wait(std::shared_ptr<Recording> recording);
  // The host waits for everything queued before; gives back the failure since the last call, once.
  // Precondition: not called by work on this stream.
  [[nodiscard]] Status synchronize();

 private:
  struct Complete {
    std::shared_ptr<Recording> recording;
  };
  struct Await {
    std::shared_ptr<Recording> recording;
  };
  struct Operation {
    Time queued_at;
    std::variant<Work, Transfer, Complete, Await> step;
  };
  // Nothing is queued or being done; mutex_ held. Then what takes no time needs no thread, and is over before
  // the call returns, as a GPU with nothing to do is as good as over with it.
  [[nodiscard]] bool at_rest() const { return done_count_ == queued_count_; }
  template <typename Step>
  void enqueue(Step step);
  void serve(const std::stop_token& stop);
  [[nodiscard]] bool take(Operation& operation, const std::stop_token& stop);  // false: stopped, and all done
  void perform(Operation& operation);
  // One step each, started no sooner than ready_.
  void perform_step(const Work& work);
  void perform_step(const Transfer& transfer);
  void perform_step(const Complete& complete);
  void perform_step(const Await& await);
  template <typename Call>
  void guarded(Call&& call);
  void fail(Error failure);
  [[nodiscard]] std::optional<Error> failure() const;

  mutable std::mutex mutex_;
  std::condition_variable_any queued_;
  std::condition_variable advanced_;
  std::deque<Operation> operations_;
  std::uint64_t queued_count_ = 0;
  std::uint64_t done_count_ = 0;
  bool idle_ = false;  // the thread sleeps: only then is waking it worth a system call
  std::optional<Error> failure_;
  Time ready_;           // the stream's own time; its thread's alone, or mutex_ held and at rest
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace terrace::emulated
