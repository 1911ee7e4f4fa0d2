#include "runtime/copy_queue.hpp"

#include <algorithm>
#include <system_error>

#include "runtime/assert.hpp"

namespace terrace {
namespace {
// Chunks on the device at a time in one lane of background copies, however small: queues are bounded.
constexpr std::size_t kMostChunks = 256;
// What tells the link's rate; less is mostly the start of a copy.
constexpr Bytes kTelling = 1_MiB;
// Background copies give way to collectives for so long before each chunk: a floor of several GB/s with whole
// chunks, however many collectives there are, and whether or not who announced one still lives.
constexpr Nanoseconds kLongestYield = std::chrono::milliseconds(10);
// What urgent copies beyond a lease cost background ones at most at a time: however much is urgent, some
// spills go out before somebody waits for them.
constexpr Nanoseconds kLongestDebt = std::chrono::milliseconds(50);
// Between two looks whether a collective has ended. Nobody may be asked to wake others for it.
constexpr Nanoseconds kCollectiveLook = std::chrono::microseconds(500);

Nanoseconds now() { return steady_clock().now(); }

Error closing() {
  return {.code = Errc::kCancelled, .text = "copy engine: it ends; what is held back does not move"};
}
}  // namespace

void Bell::wait(const std::stop_token& stop, std::optional<Nanoseconds> until) {
  std::unique_lock lock(mutex_);
  const auto rung = [this] { return rung_; };
  if (until) {
    const Nanoseconds left = std::max(*until - now(), Nanoseconds(0));
    (void)woken_.wait_for(lock, stop, left, rung);
  } else {
    (void)woken_.wait(lock, stop, rung);
  }
  rung_ = false;
}

CopyQueue::CopyQueue(Parts parts)
    : parts_(std::move(parts)), link_(parts_.device.link_time(), static_cast<std::size_t>(parts_.direction)) {
  const DeviceInfo& info = parts_.device.info();
  fastest_ = parts_.direction == Direction::kH2D ? info.h2d_bytes_per_second : info.d2h_bytes_per_second;
  parts_.device.link_time().count_copier();
}

CopyQueue::~CopyQueue() {
  parts_.device.link_time().discount_copier();
  for (Lane& lane : lanes_) {
    lane.watch.reset();
    if (lane.stream != Stream{}) parts_.device.destroy_stream(lane.stream);
  }
  for (GateStream& gates : gates_) {
    gates.newest.reset();
    if (gates.stream != Stream{}) parts_.device.destroy_stream(gates.stream);
  }
}

Status CopyQueue::take_stream(Stream& stream) {
  if (stream != Stream{}) return {};
  // High: a copy that waits behind compute in the queue misses its window. And a stream that waits must not
  // share a hardware queue with compute, which it would hold up: those are kept apart by priority.
  const Result<Stream> taken = parts_.device.create_stream(StreamPriority::kHigh);
  if (!taken.ok()) return taken.error();
  stream = *taken;
  return {};
}

Status CopyQueue::open() {
  for (const LaneId lane_id : {kUrgentLane, kBackgroundLane}) {
    if (Status taken = take_stream(lanes_[lane_id].stream); !taken.ok()) return taken;
  }
  return {};
}

// ---------------------------------------------------------------- what has arrived

void CopyQueue::reap() {
  for (LaneId lane_id = 0; lane_id < kLanes; ++lane_id) {
    Lane& lane = lanes_[lane_id];
    while (!lane.in_flight.empty() && parts_.device.completed(*lane.in_flight.front().arrived))
      retire(lane_id);
  }
  const auto empty = [](const Lane& lane) { return lane.in_flight.empty(); };
  if (failed_ && std::all_of(lanes_.begin(), lanes_.end(), empty)) renew_streams();
}

void CopyQueue::retire(LaneId lane_id) {
  Lane& lane = lanes_[lane_id];
  const Chunk chunk = std::move(lane.in_flight.front());
  lane.in_flight.pop_front();
  if (lane.watched > 0) --lane.watched;
  if (lane.begin_watched > 0) --lane.begin_watched;
  lane.bytes -= chunk.size;
  CopyJob& job = *chunk.job;
  --job.in_flight;
  if (last(job, lane_id) == chunk.arrived) last(job, lane_id) = nullptr;
  // It has completed: this says how, and does not wait.
  if (const Status arrived = parts_.device.synchronize(*chunk.arrived); !arrived.ok()) {
    failed_ = true;
    fail(chunk.job, arrived.error());
  } else if (const auto spent = parts_.device.seconds_between(*chunk.begun, *chunk.arrived)) {
    note_arrival(chunk, *spent);
  }
  report_if_over(chunk.job);
}

void CopyQueue::note_arrival(const Chunk& chunk, double seconds) {
  chunk.job->seconds += seconds;
  if (chunk.size >= kTelling && seconds > 0)
    fastest_ = std::max(fastest_, static_cast<double>(chunk.size.count()) / seconds);
  link_.note_spent(seconds);
  metrics().add<Metric::kTransferSeconds>(parts_.direction, chunk.job->reason, seconds);
  if (parts_.options.on_moved != nullptr) {
    parts_.options.on_moved(
        {parts_.direction, chunk.job->reason, chunk.size, *chunk.begun, *chunk.arrived, chunk.job->label});
  }
}

// A stream keeps its failure until asked for it. Nothing is in flight, so nothing is waited for; but what is
// held back may have its place among the gates.
void CopyQueue::renew_streams() {
  const auto renew = [this](Stream stream) {
    if (stream != Stream{}) (void)parts_.device.synchronize(stream);
  };
  for (const Lane& lane : lanes_) renew(lane.stream);
  const bool gated =
      std::any_of(held_.begin(), held_.end(), [](const auto& job) { return job->ready != nullptr; });
  for (const GateStream& gates : gates_)
    if (!gated) renew(gates.stream);
  failed_ = false;
}

void CopyQueue::report_if_over(const CopyJobRef& job) {
  if (!over(*job) || !job->given_out || job->on_done == nullptr) return;
  --awaited_;
  ended_.push_back(job);
  parts_.bell->ring();
}

void CopyQueue::unhold(const CopyJobRef& job) {
  job->held = false;
  if (job->priority == CopyPriority::kBackground) held_bytes_ -= job->rest;
  job->rest = {};
  job->pieces.clear();
  job->ready = nullptr;
  const auto found = std::find(held_.begin(), held_.end(), job);
  if (found != held_.end()) held_.erase(found);
  if (held_.empty() && held_for_) count_held(std::nullopt, now());
}

void CopyQueue::fail(const CopyJobRef& job, const Error& error) {
  if (!job->error) job->error = error;
  if (job->held) unhold(job);
}

// ---------------------------------------------------------------- onto the device

// Between wait and signal: begun, the pieces, arrived. What an error leaves queued is in flight, as what
// is whole is.
Status CopyQueue::queue(LaneId lane_id, const CopyJobRef& job, std::span<const Transfer> pieces, Bytes size,
                        const EventPool::Held& ready) {
  Lane& lane = lanes_[lane_id];
  Device& device = parts_.device;
  const auto begun = parts_.events.take();
  if (!begun.ok()) return begun.error();
  const auto arrived = parts_.events.take();
  if (!arrived.ok()) return arrived.error();
  if (Status recorded = device.record(lane.stream, **begun); !recorded.ok()) return recorded;
  Status copied = device.copy_batch(lane.stream, parts_.direction, pieces);
  if (Status recorded = device.record(lane.stream, **arrived); !recorded.ok()) {
    // Nothing will say when these bytes have stopped moving: see to it now.
    (void)device.synchronize(lane.stream);
    return copied.ok() ? recorded : copied;
  }
  lane.in_flight.push_back({job, size, ready, *begun, *arrived});
  lane.bytes += size;
  ++job->in_flight;
  if (job->begun == nullptr) job->begun = *begun;
  last(*job, lane_id) = *arrived;
  return copied;
}

// The next pieces of at most that many bytes, the last one cut where it must be; they are no longer the
// job's.
std::vector<Transfer> CopyQueue::next_pieces(CopyJob& job, Bytes most) const {
  std::vector<Transfer> taken;
  while (job.next < job.pieces.size() && most > 0_B) {
    Transfer& piece = job.pieces[job.next];
    const Bytes size = std::min(piece.size, most);
    if (size > 0_B) taken.push_back({piece.to, piece.from, size});
    most -= size;
    piece.to += size.count();
    piece.from += size.count();
    piece.size -= size;
    if (piece.size == 0_B) ++job.next;
  }
  return taken;
}

// One chunk of at most `most` bytes, behind an event where there is one.
Status CopyQueue::send(LaneId lane_id, const CopyJobRef& job, Bytes most, const EventPool::Held& behind) {
  const Bytes size = std::min(job->rest, most);
  const std::vector<Transfer> pieces = next_pieces(*job, most);
  Status sent;
  if (behind != nullptr) sent = parts_.device.wait(lanes_[lane_id].stream, *behind);
  if (sent.ok()) sent = queue(lane_id, job, pieces, size, behind != nullptr ? behind : job->ready);
  if (!sent.ok()) {
    fail(job, sent.error());
    report_if_over(job);
    return sent;
  }
  job->ready = nullptr;
  job->rest -= size;
  if (job->priority == CopyPriority::kBackground) held_bytes_ -= size;
  if (lease_limits_ && lane_id != kBackgroundLane)
    cap_.spend_within(size, kLongestDebt, now());
  else
    cap_.spend(size, now());
  if (job->given_out) metrics().add<Metric::kTransferBytes>(parts_.direction, job->reason, size);
  if (job->rest == 0_B) unhold(job);
  return {};
}

bool CopyQueue::room_for(const CopyJob& job) const {
  const Lane& lane = lanes_[kBackgroundLane];
  if (lane.in_flight.empty()) return true;
  if (behind_the_gate_of_another(job)) return false;
  const Bytes size = std::min(job.rest, parts_.options.chunk);
  return lane.bytes + size <= parts_.options.window && lane.in_flight.size() < kMostChunks;
}

bool CopyQueue::shut(const EventPool::Held& gate) const {
  return gate != nullptr && !parts_.device.completed(*gate);
}

// In the lane it would stay there even if promoted. Gates of one event open in order, and cost it nothing.
bool CopyQueue::behind_the_gate_of_another(const CopyJob& job) const {
  const auto& in_flight = lanes_[kBackgroundLane].in_flight;
  return std::any_of(in_flight.begin(), in_flight.end(), [&](const Chunk& chunk) {
    return chunk.job->gate != Event{} && chunk.job->gate != job.gate && shut(chunk.job->begun);
  });
}

// Of each lane the first of the urgent copies that has not begun: those behind it wait for it.
bool CopyQueue::urgent_waits() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [this](const Lane& lane) {
    if (&lane == &lanes_[kBackgroundLane]) return false;
    const auto first = std::find_if(lane.in_flight.begin(), lane.in_flight.end(),
                                    [this](const Chunk& chunk) { return shut(chunk.begun); });
    return first != lane.in_flight.end() && !shut(first->ready);
  });
}

// Its next chunk; the job's ticket says how that went.
void CopyQueue::send_background(const CopyJobRef& job) {
  yields_since_.reset();
  const Status sent = send(kBackgroundLane, job, parts_.options.chunk, job->ready);
  if (sent.ok() && !job->held && job->on_done != nullptr) watch(lanes_[kBackgroundLane]);
}

bool CopyQueue::may_go(const CopyJob& job) { return !failed_ && room_for(job) && !urgent_waits(); }

void CopyQueue::follow_lease(Nanoseconds at) {
  const double part = link_.usable(at);
  const double lease = part < 1 ? part * fastest_ : 0;
  lease_limits_ = lease > 0 && (wanted_cap_ <= 0 || lease < wanted_cap_);
  const double rate = lease_limits_ ? lease : wanted_cap_;
  if (rate != cap_.rate()) cap_.set_rate(rate, at);
}

bool CopyQueue::gives_way(Nanoseconds at) {
  if (!link_.collective_runs(at)) {
    yields_since_.reset();
    return false;
  }
  if (!yields_since_) yields_since_ = at;
  return at - *yields_since_ < kLongestYield;
}

// What keeps a background chunk from the link that the device could take; none: nothing does.
std::optional<LinkHold> CopyQueue::link_hold(Nanoseconds at) {
  follow_lease(at);
  if (!cap_.open(at)) {
    // What waits for compute is not kept from the link.
    if (lease_limits_ && (held_.empty() || !shut(held_.front()->ready))) link_.note_limited(at);
    return LinkHold::kLease;
  }
  if (gives_way(at)) return LinkHold::kCollective;
  return std::nullopt;
}

void CopyQueue::count_held(std::optional<LinkHold> hold, Nanoseconds at) {
  if (held_for_) metrics().add<Metric::kLinkHeld>(parts_.direction, *held_for_, at - held_since_);
  held_for_ = hold;
  held_since_ = at;
}

void CopyQueue::dispatch() {
  std::optional<LinkHold> hold;
  while (!held_.empty() && may_go(*held_.front())) {
    hold = link_hold(now());
    if (hold) break;
    const CopyJobRef job = held_.front();
    send_background(job);
  }
  if (hold || held_for_) count_held(hold, now());
  if (held_.empty()) return;
  watch(lanes_[kBackgroundLane]);
  watch_urgent_begin();
}

// Everything in flight there will ring the bell. Where there is no thread for it, looking again finds out
// later.
EventWatch* CopyQueue::watch_of(Lane& lane) {
  if (lane.watch == nullptr) {
    try {
      lane.watch = std::make_unique<EventWatch>(parts_.device, [bell = parts_.bell] { bell->ring(); });
    } catch (const std::system_error&) {
      return nullptr;
    }
  }
  return lane.watch.get();
}

void CopyQueue::watch(Lane& lane) {
  if (lane.watched == lane.in_flight.size()) return;
  EventWatch* const watch = watch_of(lane);
  for (; watch != nullptr && lane.watched < lane.in_flight.size(); ++lane.watched)
    watch->add(lane.in_flight[lane.watched].arrived);
}

void CopyQueue::watch_begin(Lane& lane) {
  if (lane.begin_watched == lane.in_flight.size()) return;
  EventWatch* const watch = watch_of(lane);
  for (; watch != nullptr && lane.begin_watched < lane.in_flight.size(); ++lane.begin_watched)
    watch->add(lane.in_flight[lane.begin_watched].begun);
}

void CopyQueue::watch_urgent_begin() {
  for (Lane& lane : lanes_)
    if (&lane != &lanes_[kBackgroundLane]) watch_begin(lane);
}

// ---------------------------------------------------------------- from the caller

// That of the same event, where the gates before this one open before it; else one whose gates are open; else
// one not made yet. Where there is none, it may open late.
CopyQueue::GateStream& CopyQueue::gates_for(Event after) {
  GateStream* best = nullptr;
  for (GateStream& gates : gates_) {
    if (gates.stream != Stream{} && gates.source == after) return gates;
    if (best == nullptr || (shut(best->newest) && !shut(gates.newest))) best = &gates;
  }
  return *best;
}

Status CopyQueue::gate(CopyJob& job, Event after) {
  GateStream& gates = gates_for(after);
  if (Status taken = take_stream(gates.stream); !taken.ok()) return taken;
  const auto ready = parts_.events.take();
  if (!ready.ok()) return ready.error();
  if (Status waits = parts_.device.wait(gates.stream, after); !waits.ok()) return waits;
  if (Status recorded = parts_.device.record(gates.stream, **ready); !recorded.ok()) return recorded;
  gates.source = after;
  gates.newest = *ready;
  job.ready = *ready;
  return {};
}

// Where the job's gate, now shut, keeps nobody else waiting: the lane of its event, if it comes in order
// there; else an empty one; else the shortest.
Result<CopyQueue::LaneId> CopyQueue::gated_lane(const CopyJob& job) {
  LaneId best = kFirstGatedLane;
  for (LaneId lane_id = kFirstGatedLane; lane_id < kLanes; ++lane_id) {
    const auto& in_flight = lanes_[lane_id].in_flight;
    if (in_flight.size() < lanes_[best].in_flight.size()) best = lane_id;
    if (in_flight.empty()) continue;
    const CopyJob& before = *in_flight.back().job;
    if (before.gate != job.gate || before.order > job.order) continue;
    best = lane_id;
    break;
  }
  if (Status taken = take_stream(lanes_[best].stream); !taken.ok()) return taken.error();
  return best;
}

Status CopyQueue::submit_urgent(const CopyJobRef& job, Event after) {
  LaneId lane_id = kUrgentLane;
  if (job->gate != Event{}) {
    if (const Result<LaneId> gated = gated_lane(*job); gated.ok())
      lane_id = *gated;  // else it holds others up
  }
  Lane& lane = lanes_[lane_id];
  Status sent;
  if (after != Event{}) sent = parts_.device.wait(lane.stream, after);
  // In the lane it waits for `after` itself; this one says when it could start.
  if (sent.ok() && job->gate != Event{}) sent = gate(*job, after);
  if (sent.ok()) sent = send(lane_id, job, job->rest, nullptr);
  if (sent.ok() && !held_.empty()) watch_begin(lane);
  if (sent.ok() && job->on_done != nullptr) watch(lane);
  return sent;
}

Status CopyQueue::submit_background(const CopyJobRef& job, Event after) {
  held_bytes_ += job->rest;
  const bool first = held_.empty();
  const bool at_once = first && may_go(*job) && !link_hold(now());
  if (after != Event{}) {
    Status behind = at_once ? parts_.device.wait(lanes_[kBackgroundLane].stream, after) : gate(*job, after);
    if (!behind.ok()) return behind;
  }
  held_.push_back(job);
  // Not asked again whether it may go out: the lane waits for `after` already, and must not do so with
  // nothing of the job in it, where others would take it for free.
  if (at_once) send_background(job);
  dispatch();
  if (job->error) return *job->error;
  if (first && !held_.empty()) parts_.bell->ring();  // from now on it is the thread's to send the rest
  return {};
}

Status CopyQueue::submit(const CopyJobRef& job, Event after) {
  std::unique_lock lock(mutex_);
  if (closed_) return closing();
  reap();
  job->order = ++submitted_;
  if (after != Event{} && !parts_.device.completed(after)) job->gate = after;
  const Status sent =
      job->priority == CopyPriority::kBackground ? submit_background(job, after) : submit_urgent(job, after);
  if (sent.ok()) {
    job->given_out = true;
    metrics().add<Metric::kTransfers>(parts_.direction, job->reason, 1);
    metrics().add<Metric::kTransferBytes>(parts_.direction, job->reason, job->bytes - job->rest);
    if (job->on_done != nullptr) ++awaited_;
    report_if_over(job);
    return {};
  }
  fail(job, sent.error());
  // Part of it may be on its way into memory that the caller is about to reuse. What the wait reports adds
  // nothing to the error in hand.
  const auto all = job->last;
  lock.unlock();
  for (const auto& arrived : all) {
    if (arrived != nullptr) (void)parts_.device.synchronize(*arrived);
  }
  return sent;
}

bool CopyQueue::done(const CopyJobRef& job) {
  const std::lock_guard lock(mutex_);
  if (job->in_flight > 0) reap();
  return over(*job);
}

// As urgent, behind what of it is in flight already: that has waited for the job's `after`, where a job of
// which nothing has gone out waits for itself. Those held back behind it find the room as it was.
Status CopyQueue::send_rest(const CopyJobRef& job) {
  if (!job->held) return {};
  const EventPool::Held started = last(*job, kBackgroundLane);
  const EventPool::Held behind = started != nullptr ? started : job->ready;
  LaneId lane_id = kUrgentLane;
  if (job->gate != Event{} && shut(started != nullptr ? job->begun : job->ready)) {
    if (const Result<LaneId> gated = gated_lane(*job); gated.ok())
      lane_id = *gated;  // else it holds others up
  }
  Status sent = send(lane_id, job, job->rest, behind);
  if (sent.ok() && job->on_done != nullptr) watch(lanes_[lane_id]);
  return sent;
}

Status CopyQueue::promote(const CopyJobRef& job) {
  const std::lock_guard lock(mutex_);
  return send_rest(job);
}

Status CopyQueue::order_before(const CopyJobRef& job, Stream stream) {
  const std::lock_guard lock(mutex_);
  if (Status sent = send_rest(job); !sent.ok()) return sent;
  reap();
  if (job->error) return *job->error;
  for (const auto& arrived : job->last) {
    if (arrived == nullptr) continue;
    if (Status waits = parts_.device.wait(stream, *arrived); !waits.ok()) return waits;
  }
  return {};
}

Status CopyQueue::synchronize(const CopyJobRef& job) {
  std::unique_lock lock(mutex_);
  (void)send_rest(job);  // the job keeps its error, and what of it is in flight is waited for all the same
  const auto all = job->last;  // held, so that nobody records them anew meanwhile
  lock.unlock();
  Status waited;
  for (const auto& arrived : all) {
    if (arrived == nullptr) continue;
    Status each = parts_.device.synchronize(*arrived);
    if (waited.ok()) waited = std::move(each);
  }
  lock.lock();
  reap();
  if (job->error) return *job->error;
  return waited;
}

void CopyQueue::cancel(const CopyJobRef& job) {
  const std::lock_guard lock(mutex_);
  if (!job->held) return;
  fail(job, {.code = Errc::kCancelled, .text = "copy engine: cancelled while part of it was held back"});
  report_if_over(job);
}

Result<double> CopyQueue::seconds(const CopyJobRef& job) {
  const std::lock_guard lock(mutex_);
  reap();
  TERRACE_CHECK(over(*job), "a copy's time is known when it is done");
  if (job->error) return *job->error;
  return job->seconds;
}

void CopyQueue::set_cap(double bytes_per_second) {
  {
    const std::lock_guard lock(mutex_);
    wanted_cap_ = bytes_per_second;
    follow_lease(now());
  }
  parts_.bell->ring();
}

double CopyQueue::cap() const {
  const std::lock_guard lock(mutex_);
  return cap_.rate();
}

Bytes CopyQueue::held_back() const {
  const std::lock_guard lock(mutex_);
  return held_bytes_;
}

// ---------------------------------------------------------------- from the engine's thread

namespace {
std::vector<CopyQueue::Ended> with_status(std::vector<CopyJobRef>& ended) {
  std::vector<CopyQueue::Ended> told;
  for (CopyJobRef& job : ended) {
    Status status = job->error ? Status(*job->error) : Status();
    told.push_back({std::move(job), std::move(status)});
  }
  ended.clear();
  return told;
}
}  // namespace

CopyQueue::Turn CopyQueue::take_turn() {
  const std::lock_guard lock(mutex_);
  reap();
  dispatch();
  Turn turn{.ended = with_status(ended_), .look_at = {}};
  if (!held_.empty() || awaited_ > 0) turn.look_at = now() + parts_.options.look_again;
  if (held_for_) {
    const Nanoseconds at = now();
    const Nanoseconds next = *held_for_ == LinkHold::kLease ? cap_.opens_at(at) : at + kCollectiveLook;
    turn.look_at = std::min(*turn.look_at, next);
  }
  return turn;
}

std::vector<CopyQueue::Ended> CopyQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    while (!held_.empty()) {
      const CopyJobRef job = held_.front();
      fail(job, closing());
      report_if_over(job);
    }
  }
  for (const Lane& lane : lanes_) {
    if (lane.stream != Stream{}) (void)parts_.device.synchronize(lane.stream);
  }
  const std::lock_guard lock(mutex_);
  reap();
  return with_status(ended_);
}

}  // namespace terrace
