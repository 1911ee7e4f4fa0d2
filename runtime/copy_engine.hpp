// Moves bytes between tiers: one stream a direction, so that both directions run at once, transfers of one
// submit() batched behind one event.
//
// A transfer starts when `after` has completed and is done when its ticket's event has. The engine never
// waits on the host. It owns neither side's memory: the caller keeps both ranges alive until the ticket is
// done.
#pragma once

#include <memory>
#include <span>

#include "runtime/device.hpp"

namespace terrace {

// Why bytes move; a label in the metrics.
enum class CopyReason : std::uint8_t { kSpill = 0, kRestore = 1, kOffload = 2, kFetch = 3 };
inline constexpr int kCopyReasonCount = 4;
[[nodiscard]] const char* name_of(CopyReason reason);

class CopyEngine {
 public:
  // A completion mark. Copyable handles would hide who waits; a ticket is moved to the one who does.
  class Ticket {
   public:
    Ticket() = default;
    Ticket(Ticket&& other) noexcept;
    Ticket& operator=(Ticket&& other) noexcept;
    ~Ticket();  // gives the events back; the transfer itself goes on, its time counted if it is done
    [[nodiscard]] bool valid() const { return engine_ != nullptr; }
    [[nodiscard]] bool done() const;
    [[nodiscard]] Status synchronize() const;  // the host waits
    [[nodiscard]] Event finished() const { return finished_; }
    [[nodiscard]] Bytes bytes() const { return bytes_; }

   private:
    friend class CopyEngine;
    CopyEngine* engine_ = nullptr;
    Event started_, finished_;
    Bytes bytes_;
    Direction direction_ = Direction::kH2D;
    CopyReason reason_ = CopyReason::kSpill;
  };

  [[nodiscard]] static Result<std::unique_ptr<CopyEngine>> create(Device& device);
  ~CopyEngine();  // waits for what is in flight; every ticket is gone before

  // Starts a batch once `after` has completed on the device; Event{}: at once. Direction: kH2D or kD2H.
  // Errors: what the device said; then no byte moves whose ticket is held: the engine has waited for what it
  // had started.
  [[nodiscard]] Result<Ticket> submit(Direction direction, Event after, std::span<const Transfer> batch,
                                      CopyReason reason);
  [[nodiscard]] Stream stream(Direction direction) const;  // kH2D or kD2H
  // Seconds the ticket's batch spent on the link. Precondition: ticket.done().
  [[nodiscard]] Result<double> seconds(const Ticket& ticket) const;

 private:
  struct Impl;
  explicit CopyEngine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
