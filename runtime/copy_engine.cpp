#include "runtime/copy_engine.hpp"

#include <array>
#include <atomic>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>

#include "runtime/assert.hpp"
#include "runtime/copy_queue.hpp"
#include "runtime/thread_signals.hpp"

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
    case CopyReason::kExpert:
      return "expert";
    case CopyReason::kOptimizer:
      return "optimizer";
  }
  return "unknown";
}

namespace {
constexpr bool crosses_link(Direction direction) {
  return direction == Direction::kH2D || direction == Direction::kD2H;
}
}  // namespace

struct CopyEngine::Impl {
  Impl(Device& on, const Options& how)
      : device(on),
        options(how),
        events(on),
        bell(std::make_shared<Bell>()),
        queues{CopyQueue({on, events, bell, Direction::kH2D, options}),
               CopyQueue({on, events, bell, Direction::kD2H, options})} {}
  [[nodiscard]] CopyQueue& queue(Direction direction) {
    TERRACE_CHECK(crosses_link(direction), "the copy engine moves h2d and d2h");
    return queues[static_cast<std::size_t>(direction)];
  }
  void serve(const std::stop_token& stop);
  void start() {
    thread = std::jthread([this](const std::stop_token& stop) { serve(stop); });
  }

  Device& device;
  const Options options;
  EventPool events;
  const std::shared_ptr<Bell> bell;
  std::array<CopyQueue, 2> queues;  // by direction
  std::atomic<int> tickets{0};
  std::jthread thread;  // last: it uses all of the above
};

namespace {
void tell(std::vector<CopyQueue::Ended> ended) {
  for (CopyQueue::Ended& each : ended) {
    const auto on_done = std::exchange(each.job->on_done, nullptr);
    on_done(each.status);
  }
}
}  // namespace

void CopyEngine::Impl::serve(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "terrace-copies");
  leave_signals_to_others();
  (void)device.bind_thread();  // once, and not at every call; one that finds it unbound binds it again
  while (!stop.stop_requested()) {
    std::optional<Nanoseconds> look_at;
    for (CopyQueue& queue : queues) {
      CopyQueue::Turn turn = queue.take_turn();
      tell(std::move(turn.ended));
      if (turn.look_at && (!look_at || *turn.look_at < *look_at)) look_at = turn.look_at;
    }
    bell->wait(stop, look_at);
  }
  for (CopyQueue& queue : queues) tell(queue.close());
}

Result<std::unique_ptr<CopyEngine>> CopyEngine::create(Device& device) { return create(device, Options{}); }

Result<std::unique_ptr<CopyEngine>> CopyEngine::create(Device& device, const Options& options) {
  if (options.chunk == 0_B || options.window < options.chunk) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "copy engine: a window of " + format_bytes(options.window) + " for chunks of " +
                         format_bytes(options.chunk) +
                         "; a chunk is at least a byte, a window at least a chunk"};
  }
  auto impl = std::make_unique<Impl>(device, options);
  for (CopyQueue& queue : impl->queues) {
    if (Status opened = queue.open(); !opened.ok()) return opened.error();
  }
  try {
    impl->start();
  } catch (const std::system_error& refused) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = std::string("copy engine: no thread to send chunks: ") + refused.what()};
  }
  return std::unique_ptr<CopyEngine>(new CopyEngine(std::move(impl)));
}

CopyEngine::CopyEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

CopyEngine::~CopyEngine() {
  impl_->thread.request_stop();
  impl_->thread.join();
  TERRACE_CHECK(impl_->tickets.load() == 0, "tickets are gone before their copy engine");
}

Result<CopyEngine::Ticket> CopyEngine::submit(const Request& request, std::span<const Transfer> batch) {
  if (!crosses_link(request.direction)) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = std::string("copy engine: ") + name_of(request.direction) +
                         " does not cross the link; copy on a stream of the device"};
  }
  auto job = std::make_shared<CopyJob>();
  job->reason = request.reason;
  job->priority = request.priority;
  job->on_done = request.on_done;
  job->label = request.label;
  job->pieces.assign(batch.begin(), batch.end());
  for (const Transfer& transfer : batch) job->bytes += transfer.size;
  job->rest = job->bytes;
  if (Status sent = impl_->queue(request.direction).submit(job, request.after); !sent.ok())
    return sent.error();
  Ticket ticket;
  ticket.engine_ = this;
  ticket.queue_ = &impl_->queue(request.direction);
  ticket.job_ = std::move(job);
  impl_->tickets.fetch_add(1);
  return ticket;
}

void CopyEngine::set_cap(Direction direction, double bytes_per_second) {
  TERRACE_CHECK(bytes_per_second >= 0, "a cap is a rate, or 0 for none");
  impl_->queue(direction).set_cap(bytes_per_second);
}

double CopyEngine::cap(Direction direction) const { return impl_->queue(direction).cap(); }

Bytes CopyEngine::held_back(Direction direction) const { return impl_->queue(direction).held_back(); }

Result<double> CopyEngine::seconds(const Ticket& ticket) const {
  TERRACE_CHECK(ticket.engine_ == this, "the ticket is of this engine");
  return ticket.queue_->seconds(ticket.job_);
}

CopyEngine::Ticket::Ticket(Ticket&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)),
      queue_(std::exchange(other.queue_, nullptr)),
      job_(std::move(other.job_)) {}

CopyEngine::Ticket& CopyEngine::Ticket::operator=(Ticket&& other) noexcept {
  if (this != &other) {
    Ticket gone(std::move(*this));
    engine_ = std::exchange(other.engine_, nullptr);
    queue_ = std::exchange(other.queue_, nullptr);
    job_ = std::move(other.job_);
  }
  return *this;
}

CopyEngine::Ticket::~Ticket() {
  if (job_ == nullptr) return;
  (void)queue_->done(job_);  // counts what has arrived
  engine_->impl_->tickets.fetch_sub(1);
}

Bytes CopyEngine::Ticket::bytes() const {
  TERRACE_CHECK(valid(), "the ticket holds a copy");
  return job_->bytes;
}

bool CopyEngine::Ticket::done() const {
  TERRACE_CHECK(valid(), "the ticket holds a copy");
  return queue_->done(job_);
}

Status CopyEngine::Ticket::synchronize() const {
  TERRACE_CHECK(valid(), "the ticket holds a copy");
  return queue_->synchronize(job_);
}

Status CopyEngine::Ticket::order_before(Stream stream) const {
  TERRACE_CHECK(valid(), "the ticket holds a copy");
  return queue_->order_before(job_, stream);
}

Status CopyEngine::Ticket::promote() const {
  TERRACE_CHECK(valid(), "the ticket holds a copy");
  return queue_->promote(job_);
}

void CopyEngine::Ticket::cancel() const {
  TERRACE_CHECK(valid(), "the ticket holds a copy");
  queue_->cancel(job_);
}

}  // namespace terrace
