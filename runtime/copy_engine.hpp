// Moves bytes between tiers, both directions at once, each with two classes of copies:
//
//   urgent      on the device at once, whole
//   background  in chunks, of which a window is on the device at a time. The rest is held back, where an
//   urgent
//               copy passes it and a bandwidth cap can make it wait.
//
// Each class of a direction has a stream of its own and keeps its order: first submitted, first moved; but an
// urgent copy passes those whose `after` has not completed. Who waits for a background copy promotes it: what
// is held back of it goes out at once, as urgent. The engine
// never waits on the host, and no thread of it spins: a completed chunk wakes one that sleeps, which sends
// the next. Why: docs/design/0009-copy-engine.md.
//
// The engine owns neither side's memory: the caller keeps both ranges alive until the ticket is done.
// Any thread may call, and on_done may too.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "runtime/device.hpp"

namespace terrace {

// Why bytes move; a label in the metrics.
enum class CopyReason : std::uint8_t { kSpill = 0, kRestore, kOffload, kFetch, kExpert, kOptimizer };
inline constexpr int kCopyReasonCount = 6;
[[nodiscard]] const char* name_of(CopyReason reason);

enum class CopyPriority : std::uint8_t { kUrgent, kBackground };

// Bytes that have crossed the link: a chunk of a copy. `begun` and `arrived` have completed; they are the
// engine's.
struct CopyMove {
  Direction direction = Direction::kH2D;
  CopyReason reason = CopyReason::kSpill;
  Bytes bytes;
  Event begun{}, arrived{};
  std::string_view label;  // of the request
};

struct CopyJob;
class CopyQueue;

class CopyEngine {
 public:
  struct Options {
    Bytes chunk = 32_MiB;    // of a background copy; its small pieces are gathered up to this
    Bytes window = 128_MiB;  // background bytes on the device at a time, each direction; at least a chunk
    // Completion wakes the engine. What never reports back (a failed stream, a lost device) is noticed by
    // looking again after this long, while something is held back or has an on_done.
    std::chrono::milliseconds look_again{20};
    // Told of every chunk once it has arrived, on whichever thread finds out. Calls nothing of the engine,
    // does not throw, and is quick: the direction waits.
    std::function<void(const CopyMove&)> on_moved{};
  };
  struct Request {
    Direction direction = Direction::kH2D;  // kH2D or kD2H
    Event after{};                          // the copy starts once this has completed; Event{}: at once
    CopyReason reason = CopyReason::kSpill;
    CopyPriority priority = CopyPriority::kUrgent;
    // Called on the engine's own thread, once for every ticket that submit() gave out: when nothing of the
    // copy moves any more, with what synchronize() would return; kCancelled where the engine was destroyed
    // first. Others wait while it runs. Does not throw.
    std::function<void(const Status&)> on_done{};
    std::string label{};  // handed on to Options::on_moved
  };

  // A copy under way. Copyable handles would hide who waits; a ticket is moved to the one who does.
  class Ticket {
   public:
    Ticket() = default;
    Ticket(Ticket&& other) noexcept;
    Ticket& operator=(Ticket&& other) noexcept;
    ~Ticket();  // the copy itself goes on
    [[nodiscard]] bool valid() const { return job_ != nullptr; }
    [[nodiscard]] Bytes bytes() const;
    // Nothing of it moves any more, or will: it has arrived or failed, and synchronize() says which.
    [[nodiscard]] bool done() const;
    // Promotes; the host waits until done(). Errors: what the device said, then or when it was sent;
    // kCancelled.
    [[nodiscard]] Status synchronize() const;
    // Promotes; later work on `stream` waits for the copy. Errors: as synchronize(), as far as it is known
    // now, and what the device says of the wait. On error the bytes may still be moving: until done().
    [[nodiscard]] Status order_before(Stream stream) const;
    // Sends what is held back, now and as urgent. Errors: what the device said; the ticket keeps it.
    [[nodiscard]] Status promote() const;
    // What is held back never moves, and the ticket fails with kCancelled. Where all has been sent this does
    // nothing.
    void cancel() const;

   private:
    friend class CopyEngine;
    CopyEngine* engine_ = nullptr;
    CopyQueue* queue_ = nullptr;  // its direction's
    std::shared_ptr<CopyJob> job_;
  };

  // Errors: kInvalidArgument (a window smaller than a chunk, an empty chunk), what the device said.
  [[nodiscard]] static Result<std::unique_ptr<CopyEngine>> create(Device& device);  // with Options{}
  [[nodiscard]] static Result<std::unique_ptr<CopyEngine>> create(Device& device, const Options& options);
  // Cancels what is held back and waits for what is in flight; every ticket is gone before.
  ~CopyEngine();

  // `request.after` may be recorded again as soon as this returns. Errors: kInvalidArgument (a direction that
  // does not cross the link), kCancelled (from on_done, while the engine ends), what the device said; then no
  // byte moves: the engine has waited for what it had started.
  [[nodiscard]] Result<Ticket> submit(const Request& request, std::span<const Transfer> batch);

  // The most bytes a second a direction moves from now on; 0: as many as it can. Urgent copies do not wait
  // for it, background ones pay for them.
  void set_cap(Direction direction, double bytes_per_second);
  [[nodiscard]] double cap(Direction direction) const;
  // Bytes of background copies that are not on the device yet.
  [[nodiscard]] Bytes held_back(Direction direction) const;

  // Seconds the ticket's copy spent on the link: the sum over its chunks, each from when its stream came to
  // it until it had arrived. Where both classes use a direction at one time, that time is counted for both.
  // Precondition: ticket.done(). Errors: those of synchronize().
  [[nodiscard]] Result<double> seconds(const Ticket& ticket) const;

 private:
  struct Impl;
  explicit CopyEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
