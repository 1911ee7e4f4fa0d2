#include "allocator/ring/ring_rank.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "runtime/assert.hpp"
#include "runtime/metrics.hpp"

namespace terrace {

namespace {

constexpr std::size_t kPage = 4096;
static_assert(sizeof(RingReport) <= kPage);

// Of a device that does nothing else, all peers together: senders enough to fill the links, as many
// receivers, so that the last piece of every sender is copied at once, and few for the rank's own part, whose
// copy takes memory from the others and need not end before them.
constexpr RingShape kFullShape{.senders = 96, .receivers = 96, .copiers = 32};

// The device may be writing it: another processor's words, so atomic.
std::uint64_t read(std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

Error refuse(std::uint32_t rank, std::string text) {
  return {.code = Errc::kInvalidArgument,
          .text = "ring buffers, rank " + std::to_string(rank) + ": " + std::move(text)};
}

}  // namespace

void RingRank::FreePages::operator()(void* pages) const { std::free(pages); }

RingRank::RingRank(Device& device, HbmPool& pool, const RingOptions& options, std::uint32_t rank,
                   const RingLayout& layout)
    : device_(device),
      pool_(pool),
      options_(options),
      rank_(rank),
      layout_(layout),
      shape_(options.shape),
      window_(options.slots),
      collectives_(device) {}

RingRank::~RingRank() {
  finish();
  if (joined_) device_.destroy_event(*joined_);
  if (forked_) device_.destroy_event(*forked_);
  if (side_) device_.destroy_stream(*side_);
  if (pinned_) device_.unpin(reinterpret_cast<Address>(report_.get()), Bytes(kPage));
  if (!block_) return;
  metrics().subtract<Metric::kRingSlots>(RingSlotState::kHeld, window_.held() * peers());
  metrics().subtract<Metric::kRingSlots>(RingSlotState::kFree, (layout_.slots - window_.held()) * peers());
  (void)pool_.free_completed(*block_);  // refused in a forked child alone, which has no device
}

void RingRank::pass() {
  window_.pass();
  metrics().add<Metric::kRingExchanges>(1);
}

void RingRank::hold() {
  window_.hold();
  metrics().add<Metric::kRingExchanges>(1);
  metrics().subtract<Metric::kRingSlots>(RingSlotState::kFree, peers());
  metrics().add<Metric::kRingSlots>(RingSlotState::kHeld, peers());
}

void RingRank::give_back() {
  window_.release();
  metrics().subtract<Metric::kRingSlots>(RingSlotState::kHeld, peers());
  metrics().add<Metric::kRingSlots>(RingSlotState::kFree, peers());
}

Status RingRank::choose_shape() {
  const Result<std::uint32_t> blocks = device_.exchange_blocks();
  if (!blocks.ok()) return blocks.error();
  const std::uint32_t peers = layout_.ranks - 1;
  const auto total = [&] { return peers * (shape_.senders + shape_.receivers) + shape_.copiers; };
  if (options_.shape.senders == 0) {
    for (std::uint32_t part = 1;; part *= 2) {
      shape_ = {.senders = std::max(kFullShape.senders / peers / part, 1U),
                .receivers = std::max(kFullShape.receivers / peers / part, 1U),
                .copiers = std::max(kFullShape.copiers / part, 1U)};
      if (total() <= *blocks || part > kFullShape.senders) break;
    }
  }
  if (total() <= *blocks) return {};
  return refuse(rank_, std::to_string(total()) + " blocks for " + std::to_string(peers) + " peers; " +
                           std::to_string(*blocks) + " run at once on " + device_.info().name);
}

Status RingRank::reserve(Stream stream) {
  if (Status chosen = choose_shape(); !chosen.ok()) return chosen;
  auto block = pool_.allocate(stream, memory_size(), Pool::kComm);
  if (!block.ok()) return std::move(block).error();
  block_ = *block;
  metrics().add<Metric::kRingSlots>(RingSlotState::kFree, layout_.slots * peers());
  note(stream);
  report_.reset(static_cast<RingReport*>(std::aligned_alloc(kPage, kPage)));
  if (report_ == nullptr) {
    return Error{.code = Errc::kOutOfMemory, .text = "ring buffers: no host page for the report"};
  }
  new (report_.get()) RingReport();
  Status done = device_.pin(reinterpret_cast<Address>(report_.get()), Bytes(kPage));
  if (!done.ok()) return done;
  pinned_ = true;
  auto side = device_.create_stream(StreamPriority::kNormal);
  if (!side.ok()) return std::move(side).error();
  side_ = *side;
  for (std::optional<Event>* event : {&forked_, &joined_}) {
    auto created = device_.create_event();
    if (!created.ok()) return std::move(created).error();
    *event = *created;
  }
  collectives_.prepare();
  done = device_.fill(stream, block_->address, 0, Bytes(ring_data_offset(layout_)));
  if (!done.ok()) return done;
  // A first launch may load code, for which a device may have to come to rest: not among waiting kernels.
  return device_.exchange(stream, RingExchange{});
}

void RingRank::finish() {
  for (const Stream stream : streams_) {
    if (device_.alive(stream)) (void)device_.synchronize(stream);
  }
}

void RingRank::note(Stream stream) {
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

void RingRank::register_receive(Address data, Bytes size) {
  direct_->size[rank_].store(0, std::memory_order_release);
  direct_->data[rank_].store(data, std::memory_order_release);
  direct_->size[rank_].store(size.count(), std::memory_order_release);
}

const std::byte* RingRank::part(RingTicket ticket, std::uint32_t sender) const {
  TERRACE_CHECK(sender != rank_ && sender < layout_.ranks, "a slot is another rank's");
  TERRACE_CHECK(ticket.sequence - window_.released() < window_.held(), "a part is read before its release");
  RingExchange exchange = prepare(RingStep::kExchange);
  exchange.sequence = ticket.sequence;
  return ring_slot_data(exchange, rank_, sender);
}

RingExchange RingRank::prepare(RingStep step) const {
  RingExchange exchange;
  exchange.step = step;
  exchange.rank = rank_;
  exchange.layout = layout_;
  exchange.shape = shape_;
  exchange.sequence = window_.next();
  exchange.released = window_.released();
  std::copy(base_.begin(), base_.end(), exchange.base);
  exchange.report = report_.get();
  exchange.timeout_ns = static_cast<std::uint64_t>(options_.timeout.count());
  return exchange;
}

Status RingRank::usable() const {
  if (!failed_.ok()) return failed_;
  if (read(report_->stop.what) == 0) return {};
  return Error{.code = Errc::kTimeout, .text = describe(report_->stop, rank_, layout_.slots)};
}

Status RingRank::queue(Stream stream, const RingExchange& exchange) {
  note(stream);
  if (exchange.step == RingStep::kRelease) return device_.exchange(stream, exchange);
  const Collectives::Announced announced = collectives_.announce(stream);
  return device_.exchange(stream, exchange);
}

Status RingRank::exchange(Stream stream, const RingParts& parts, const RingRoom& room) {
  if (Status fit = usable(); !fit.ok()) return fit;
  if (window_.held() > 0) return refuse(rank_, "exchanges in place are held; release them first");
  if (room.data == nullptr) return refuse(rank_, "no receive buffer; exchange in place, or give one");
  RingExchange exchange = prepare(RingStep::kExchange);
  exchange.send = parts.data;
  exchange.send_size = parts.size.count();
  exchange.send_bytes = parts.counts;
  exchange.receive = room.data;
  exchange.receive_size = room.size.count();
  exchange.receive_bytes = room.counts;
  Status queued = queue(stream, exchange);
  if (queued.ok()) pass();
  return queued;
}

Result<RingTicket> RingRank::exchange_in_place(Stream stream, const RingParts& parts, std::uint64_t* counts) {
  if (Status fit = usable(); !fit.ok()) return fit.error();
  if (window_.full()) {
    return refuse(rank_, "all " + std::to_string(layout_.slots) + " slots are held; release one first");
  }
  RingExchange exchange = prepare(RingStep::kExchange);
  exchange.send = parts.data;
  exchange.send_size = parts.size.count();
  exchange.send_bytes = parts.counts;
  exchange.receive_bytes = counts;
  if (Status queued = queue(stream, exchange); !queued.ok()) return queued.error();
  const RingTicket ticket{.sequence = window_.next()};
  hold();
  return ticket;
}

Status RingRank::release(Stream stream, RingTicket ticket) {
  if (Status fit = usable(); !fit.ok()) return fit;
  if (window_.held() == 0 || ticket.sequence != window_.released()) {
    return refuse(rank_, "release of exchange " + std::to_string(ticket.sequence) + ": " +
                             (window_.held() == 0
                                  ? std::string("none is held")
                                  : "the oldest held is exchange " + std::to_string(window_.released())));
  }
  RingExchange exchange = prepare(RingStep::kRelease);
  exchange.sequence = ticket.sequence;
  Status queued = queue(stream, exchange);
  if (queued.ok()) give_back();
  return queued;
}

bool RingRank::direct_possible(const RingEqualParts& parts) const {
  const std::uint64_t needed = parts.each.count() * layout_.ranks;
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (direct_->size[rank].load(std::memory_order_acquire) < needed) return false;
  }
  return direct_->data[rank_].load(std::memory_order_acquire) == parts.receive;
}

Status RingRank::exchange_equal(Stream stream, const RingEqualParts& parts) {
  if (Status fit = usable(); !fit.ok()) return fit;
  if (window_.held() > 0) return refuse(rank_, "exchanges in place are held; release them first");
  const bool direct = direct_possible(parts);
  RingPath path = parts.path;
  if (path == RingPath::kFastest) path = direct ? RingPath::kDirect : RingPath::kSlots;
  if (path == RingPath::kSlots) return exchange_slots(stream, parts);
  if (!direct) {
    return refuse(rank_, "exchange straight into receive buffers: every rank registers one of " +
                             format_bytes(parts.each * layout_.ranks) +
                             " with register_receive() before, and receives there");
  }
  return path == RingPath::kDirect ? exchange_direct(stream, parts) : exchange_by_engines(stream, parts);
}

Status RingRank::exchange_slots(Stream stream, const RingEqualParts& parts) {
  if (parts.each > options_.slot_bytes) {
    return refuse(rank_, "parts of " + format_bytes(parts.each) + ", slots of " +
                             format_bytes(options_.slot_bytes) +
                             ": make the ring with a larger RingOptions::slot_bytes, or register_receive() " +
                             "on every rank");
  }
  RingExchange exchange = prepare(RingStep::kExchange);
  exchange.send = parts.send;
  exchange.send_size = parts.each.count() * layout_.ranks;
  exchange.equal_bytes = parts.each.count();
  exchange.receive = parts.receive;
  exchange.receive_size = exchange.send_size;
  Status queued = queue(stream, exchange);
  if (queued.ok()) pass();
  return queued;
}

Status RingRank::exchange_direct(Stream stream, const RingEqualParts& parts) {
  RingExchange exchange = prepare(RingStep::kDirect);
  exchange.send = parts.send;
  exchange.equal_bytes = parts.each.count();
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank)
    exchange.direct[rank] = direct_->data[rank].load(std::memory_order_acquire);
  Status queued = queue(stream, exchange);
  if (queued.ok()) pass();
  return queued;
}

Status RingRank::exchange_by_engines(Stream stream, const RingEqualParts& parts) {
  RingExchange exchange = prepare(RingStep::kOpen);
  exchange.equal_bytes = parts.each.count();
  note(stream);
  note(*side_);
  const Collectives::Announced announced = collectives_.announce(stream);
  Status done = device_.record(stream, *forked_);
  if (done.ok()) done = device_.wait(*side_, *forked_);
  if (done.ok()) done = device_.exchange(stream, exchange);
  if (!done.ok()) return done;  // nothing has been told to anybody
  done = copy_parts(stream, parts);
  exchange.step = RingStep::kClose;
  if (done.ok()) done = device_.exchange(stream, exchange);
  if (done.ok()) {
    pass();
    return {};
  }
  failed_ = done;
  // The caller may free its buffers, and nothing has made `stream` wait for the side copy.
  for (const Stream used : {*side_, stream}) (void)device_.synchronize(used);
  return done;
}

// Each rank begins with another peer, so that no link is shared.
Status RingRank::copy_parts(Stream stream, const RingEqualParts& parts) {
  const std::uint64_t each = parts.each.count();
  Status done = device_.copy(*side_, Direction::kD2D, parts.receive + rank_ * each, parts.send + rank_ * each,
                             parts.each);
  if (done.ok()) done = device_.record(*side_, *joined_);
  for (std::uint32_t step = 1; done.ok() && step < layout_.ranks; ++step) {
    const std::uint32_t peer = (rank_ + step) % layout_.ranks;
    const Address there = direct_->data[peer].load(std::memory_order_acquire) + rank_ * each;
    done = device_.copy(stream, Direction::kPeer, there, parts.send + peer * each, parts.each);
  }
  if (done.ok()) done = device_.wait(stream, *joined_);
  return done;
}

std::optional<Error> RingRank::take_overflow(std::uint32_t peer) {
  const auto look = [&](RingOverflow& overflow, std::uint64_t& told,
                        const RingChannel& channel) -> std::optional<Error> {
    const std::uint64_t stamp = read(overflow.stamp);
    if (stamp == told) return std::nullopt;
    told = stamp;
    return Error{.code = Errc::kInvalidArgument,
                 .text = "ring buffers, rank " + std::to_string(rank_) + ": " + describe(overflow, channel),
                 .bytes = Bytes(overflow.wanted)};
  };
  RingChannel channel{
      .sender = rank_, .receiver = peer, .slots = layout_.slots, .slot_bytes = Bytes(layout_.slot_bytes)};
  if (auto found = look(report_->sent[peer], told_sent_[peer], channel)) return found;
  std::swap(channel.sender, channel.receiver);
  return look(report_->received[peer], told_received_[peer], channel);
}

Status RingRank::check() {
  if (Status fit = usable(); !fit.ok()) return fit;
  for (std::uint32_t peer = 0; peer < layout_.ranks; ++peer) {
    if (auto overflow = take_overflow(peer)) return *std::move(overflow);
  }
  return {};
}

}  // namespace terrace
