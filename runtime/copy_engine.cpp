#include "runtime/copy_engine.hpp"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/assert.hpp"
#include "runtime/metrics.hpp"

namespace terrace {

const char* name_of(CopyReason reason) {
  switch (reason) {
    case CopyReason::kSpill:
      return "spill";
    case CopyReason::kRestore:
      return "restore";
    case CopyReason::kOffload:
      return "offload";
    case CopyReason::kFetch:
      return "fetch";
  }
  return "unknown";
}

namespace {
constexpr int kLinkDirections = 2;  // kH2D and kD2H
constexpr bool crosses_link(Direction direction) { return direction != Direction::kD2D; }
}  // namespace

struct CopyEngine::Impl {
  struct Lane {
    Stream stream;
    std::mutex
        submitting;  // a batch is one run of operations on the stream, so that its events time it alone
  };

  explicit Impl(Device& on) : device(on) {}
  ~Impl();
  [[nodiscard]] Lane& lane(Direction direction) { return lanes[static_cast<std::size_t>(direction)]; }
  [[nodiscard]] Result<Event> take_event();
  void give_back(Event event);
  // Everything between the batch's two events. An error leaves a part of it queued.
  [[nodiscard]] Status queue(Direction direction, Event after, std::span<const Transfer> batch, Event started,
                             Event finished);

  Device& device;
  std::array<Lane, kLinkDirections> lanes;
  std::mutex events_mutex;
  std::vector<Event> idle_events;
  std::atomic<int> tickets{0};
};

CopyEngine::Impl::~Impl() {
  for (const Lane& each : lanes) {
    if (each.stream != Stream{}) device.destroy_stream(each.stream);
  }
  for (const Event event : idle_events) device.destroy_event(event);
}

Result<Event> CopyEngine::Impl::take_event() {
  {
    const std::lock_guard lock(events_mutex);
    if (!idle_events.empty()) {
      const Event event = idle_events.back();
      idle_events.pop_back();
      return event;
    }
  }
  return device.create_event();
}

void CopyEngine::Impl::give_back(Event event) {
  const std::lock_guard lock(events_mutex);
  idle_events.push_back(event);
}

Status CopyEngine::Impl::queue(Direction direction, Event after, std::span<const Transfer> batch,
                               Event started, Event finished) {
  const Stream stream = lane(direction).stream;
  if (after != Event{}) {
    if (Status waits = device.wait(stream, after); !waits.ok()) return waits;
  }
  if (Status recorded = device.record(stream, started); !recorded.ok()) return recorded;
  for (const Transfer& transfer : batch) {
    Status copied = device.copy(stream, direction, transfer.to, transfer.from, transfer.size);
    if (!copied.ok()) return copied;
  }
  return device.record(stream, finished);
}

Result<std::unique_ptr<CopyEngine>> CopyEngine::create(Device& device) {
  auto impl = std::make_unique<Impl>(device);
  for (Impl::Lane& lane : impl->lanes) {
    // High: a copy that waits behind compute in the queue misses its window.
    const Result<Stream> stream = device.create_stream(StreamPriority::kHigh);
    if (!stream.ok()) return stream.error();
    lane.stream = *stream;
  }
  return std::unique_ptr<CopyEngine>(new CopyEngine(std::move(impl)));
}

CopyEngine::CopyEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

CopyEngine::~CopyEngine() {
  TERRACE_CHECK(impl_->tickets.load() == 0, "tickets are gone before their copy engine");
}

Result<CopyEngine::Ticket> CopyEngine::submit(Direction direction, Event after,
                                              std::span<const Transfer> batch, CopyReason reason) {
  if (!crosses_link(direction)) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "copy engine: d2d does not cross the link; copy on a stream of the device"};
  }
  const Result<Event> started = impl_->take_event();
  if (!started.ok()) return started.error();
  const Result<Event> finished = impl_->take_event();
  if (!finished.ok()) {
    impl_->give_back(*started);
    return finished.error();
  }
  Impl::Lane& lane = impl_->lane(direction);
  Status queued;
  {
    const std::lock_guard lock(lane.submitting);
    queued = impl_->queue(direction, after, batch, *started, *finished);
  }
  if (!queued.ok()) {
    // Part of the batch may be on its way into memory that the caller is about to reuse. What the wait
    // reports adds nothing to the error in hand.
    (void)impl_->device.synchronize(lane.stream);
    impl_->give_back(*started);
    impl_->give_back(*finished);
    return queued.error();
  }
  Ticket ticket;
  ticket.engine_ = this;
  ticket.started_ = *started;
  ticket.finished_ = *finished;
  for (const Transfer& transfer : batch) ticket.bytes_ += transfer.size;
  ticket.direction_ = direction;
  ticket.reason_ = reason;
  metrics().add<Metric::kTransferBytes>(direction, reason, ticket.bytes_);
  impl_->tickets.fetch_add(1);
  return ticket;
}

Stream CopyEngine::stream(Direction direction) const {
  TERRACE_CHECK(crosses_link(direction), "the copy engine has a stream for h2d and one for d2h");
  return impl_->lane(direction).stream;
}

Result<double> CopyEngine::seconds(const Ticket& ticket) const {
  TERRACE_CHECK(ticket.engine_ == this, "the ticket is of this engine");
  return impl_->device.seconds_between(ticket.started_, ticket.finished_);
}

CopyEngine::Ticket::Ticket(Ticket&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)),
      started_(other.started_),
      finished_(other.finished_),
      bytes_(other.bytes_),
      direction_(other.direction_),
      reason_(other.reason_) {}

CopyEngine::Ticket& CopyEngine::Ticket::operator=(Ticket&& other) noexcept {
  if (this != &other) {
    Ticket gone(std::move(*this));
    engine_ = std::exchange(other.engine_, nullptr);
    started_ = other.started_;
    finished_ = other.finished_;
    bytes_ = other.bytes_;
    direction_ = other.direction_;
    reason_ = other.reason_;
  }
  return *this;
}

CopyEngine::Ticket::~Ticket() {
  if (engine_ == nullptr) return;
  Impl& impl = *engine_->impl_;
  if (done()) {
    if (const auto spent = engine_->seconds(*this)) {
      metrics().add<Metric::kTransferSeconds>(direction_, reason_, *spent);
    }
  }
  impl.give_back(started_);
  impl.give_back(finished_);
  impl.tickets.fetch_sub(1);
}

bool CopyEngine::Ticket::done() const {
  TERRACE_CHECK(valid(), "the ticket holds a transfer");
  return engine_->impl_->device.completed(finished_);
}

Status CopyEngine::Ticket::synchronize() const {
  TERRACE_CHECK(valid(), "the ticket holds a transfer");
  return engine_->impl_->device.synchronize(finished_);
}

}  // namespace terrace
