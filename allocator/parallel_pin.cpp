#include "allocator/parallel_pin.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <stop_token>
#include <system_error>
#include <thread>

#include "runtime/assert.hpp"
#include "runtime/fault.hpp"
#include "runtime/pin_step.hpp"
#include "runtime/thread_signals.hpp"

namespace terrace {
namespace {

constexpr Bytes kPage = 4_KiB;
constexpr Bytes kHugePage = 2_MiB;
constexpr int kPopulateAttempts = 16;        // of a call that was interrupted
constexpr Bytes kStripe = 4_MiB;             // touched at a time: a millisecond or two
constexpr std::uint64_t kPiecesWanted = 64;  // of a large range: the last one, pinned alone, is a small part
constexpr Bytes kLarge = 2_GiB;              // a pool of terabytes is made of ranges from here on
constexpr Bytes kLargestPiece = 1_GiB;

static_assert(kPinStep.count() % kStripe.count() == 0, "a stripe lies in one piece");

struct Range {
  Address at = nullptr;
  Bytes size;
};

void write_every(Range range, Bytes stride) {
  auto* bytes = reinterpret_cast<volatile unsigned char*>(range.at);
  for (std::uint64_t at = 0; at < range.size.count(); at += stride.count()) bytes[at] = 0;
}

bool resident(Range range) {
  std::array<unsigned char, kStripe / kPage> pages;
  if (mincore(range.at, range.size.count(), pages.data()) != 0) return false;
  const auto end = pages.begin() + static_cast<std::ptrdiff_t>(round_up(range.size, kPage) / kPage);
  return std::all_of(pages.begin(), end, [](unsigned char page) { return (page & 1) != 0; });
}

// One write to a huge page brings all of it. Where the system gave small ones each wants its own.
void write_to_all(Range range) {
  write_every(range, kHugePage);
  if (!resident(range)) write_every(range, kPage);
}

int populate(Range range) {
  for (int attempt = 0; attempt < kPopulateAttempts; ++attempt) {
    if (madvise(range.at, range.size.count(), MADV_POPULATE_WRITE) == 0) return 0;
    if (errno != EINTR && errno != EAGAIN) break;
  }
  return errno;
}

Status touch(Range range, FirstTouch how) {
  int error = ENOMEM;
  if (!fault_point(FaultPoint::kHostTouch)) {
    if (how == FirstTouch::kWrite) {
      write_to_all(range);
      return {};
    }
    error = populate(range);
    if (error == 0) return {};
  }
  return Error{.code = Errc::kOutOfMemory,
               .text = "the system has no pages for " + format_bytes(range.size) +
                       " of host memory (first touch): " + std::strerror(error),
               .bytes = range.size};
}

// A request: on other processors the work is slower, not wrong.
void keep_to(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(cpu), &set);
  }
  if (CPU_COUNT(&set) > 0) (void)sched_setaffinity(0, sizeof(set), &set);
}

// One call's work, shared by its threads. Stripes are touched in order, so that pieces become complete in
// order; a complete piece is pinned before more is touched, by at most `pinning` threads.
class PinJob {
 public:
  PinJob(Device& device, Range whole, const PinPlan& plan);
  // Takes part until nothing is left to take, something failed, or it is asked to stop.
  void work(const std::stop_token& stop);
  // After every thread has left. On failure what was pinned is unpinned.
  [[nodiscard]] Status finish();

 private:
  struct Piece {
    Range range;
    std::uint64_t untouched = 0;  // stripes
    bool pinned = false;
  };
  struct Task {
    bool pin = false;
    std::size_t piece = 0;
    Range range;
  };
  [[nodiscard]] std::optional<Task> next(const std::stop_token& stop);
  void done(const Task& task, Status result);

  Device& device_;
  const Range whole_;
  const Bytes piece_size_;
  const int pinning_most_;
  const FirstTouch first_touch_;

  std::mutex mutex_;  // all below
  std::condition_variable_any changed_;
  std::vector<Piece> pieces_;
  Bytes taken_;                    // for touching, from the start
  std::deque<std::size_t> ready_;  // touched, not taken for pinning
  int pinning_ = 0;
  std::size_t pinned_ = 0;
  std::optional<Error> failure_;
};

PinJob::PinJob(Device& device, Range whole, const PinPlan& plan)
    : device_(device),
      whole_(whole),
      piece_size_(pin_piece(whole.size)),
      pinning_most_(std::max(plan.pinning, 1)),
      first_touch_(plan.first_touch) {
  for (Bytes at; at < whole.size; at += piece_size_) {
    const Bytes size = std::min(piece_size_, whole.size - at);
    pieces_.push_back(
        {.range = {whole.at + at.count(), size}, .untouched = round_up(size, kStripe) / kStripe});
  }
}

std::optional<PinJob::Task> PinJob::next(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (failure_ || pinned_ == pieces_.size() || stop.stop_requested()) return std::nullopt;
    if (!ready_.empty() && pinning_ < pinning_most_) {
      const std::size_t piece = ready_.front();
      ready_.pop_front();
      ++pinning_;
      return Task{.pin = true, .piece = piece, .range = pieces_[piece].range};
    }
    if (taken_ < whole_.size) {
      const Range stripe{whole_.at + taken_.count(), std::min(kStripe, whole_.size - taken_)};
      const auto piece = static_cast<std::size_t>(taken_ / piece_size_);
      taken_ += stripe.size;
      return Task{.pin = false, .piece = piece, .range = stripe};
    }
    const auto more = [this] {
      return failure_ || pinned_ == pieces_.size() || (!ready_.empty() && pinning_ < pinning_most_);
    };
    if (!changed_.wait(lock, stop, more)) return std::nullopt;
  }
}

void PinJob::done(const Task& task, Status result) {
  const std::lock_guard lock(mutex_);
  Piece& piece = pieces_[task.piece];
  if (task.pin) --pinning_;
  if (!result.ok()) {
    if (!failure_) failure_ = result.error();
  } else if (task.pin) {
    piece.pinned = true;
    ++pinned_;
  } else if (--piece.untouched == 0) {
    ready_.push_back(task.piece);
  } else {
    return;  // nobody waits for one stripe
  }
  changed_.notify_all();
}

void PinJob::work(const std::stop_token& stop) {
  while (const auto task = next(stop)) {
    done(*task, task->pin ? device_.pin(task->range.at, task->range.size) : touch(task->range, first_touch_));
  }
}

Status PinJob::finish() {
  const std::lock_guard lock(mutex_);
  if (!failure_) return {};
  for (const Piece& piece : pieces_) {
    if (piece.pinned) device_.unpin(piece.range.at, piece.range.size);
  }
  return *failure_;
}

int threads_for(Bytes size, const PinPlan& plan) {
  const int wanted = plan.touching > 0 ? plan.touching : plan.cpus.threads;
  const std::uint64_t stripes = round_up(size, kStripe) / kStripe;
  return static_cast<int>(
      std::min<std::uint64_t>(static_cast<std::uint64_t>(std::clamp(wanted, 1, kMostTouching)), stripes));
}

}  // namespace

Bytes pin_piece(Bytes size) {
  const Bytes least = size < kLarge ? kPinStep : 4 * kPinStep;
  return std::clamp(round_up(size / kPiecesWanted, kPinStep), least, kLargestPiece);
}

Status touch_and_pin(Device& device, Address base, Bytes size, const PinPlan& plan) {
  TERRACE_CHECK(reinterpret_cast<std::uintptr_t>(base) % kPinStep.count() == 0,
                "pieces meet at multiples of the pin step");
  PinJob job(device, {base, size}, plan);
  const int threads = threads_for(size, plan);
  if (threads == 1) {
    job.work({});
    return job.finish();
  }
  std::vector<std::jthread> workers;
  workers.reserve(static_cast<std::size_t>(threads));
  try {
    const SignalsBlocked blocked;  // inherited by the threads
    for (int i = 0; i < threads; ++i) {
      workers.emplace_back([&job, &plan](const std::stop_token& stop) {
        keep_to(plan.cpus.cpus);
        job.work(stop);
      });
    }
  } catch (const std::system_error&) {
    // Fewer threads do; with none at all the caller does it alone.
    if (workers.empty()) job.work({});
  }
  for (std::jthread& worker : workers) worker.join();
  return job.finish();
}

void unpin_pieces(Device& device, Address base, Bytes size) {
  const Bytes piece = pin_piece(size);
  for (Bytes at; at < size; at += piece) device.unpin(base + at.count(), std::min(piece, size - at));
}

}  // namespace terrace
