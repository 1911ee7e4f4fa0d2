#include "allocator/ring/ring_buffers.hpp"

#include <bit>

#include "runtime/assert.hpp"

namespace terrace {

namespace {

Error refuse(std::string text) { return {.code = Errc::kInvalidArgument, .text = "ring buffers: " + text}; }

Status check_options(std::size_t ranks, const RingOptions& options) {
  if (ranks < 2 || ranks > kRingMostRanks) {
    return refuse(std::to_string(ranks) + " ranks; a ring joins 2 to " + std::to_string(kRingMostRanks));
  }
  if (options.slots < 2 || !std::has_single_bit(options.slots)) {
    return refuse(std::to_string(options.slots) + " slots; use a power of two from 2 on, such as 8");
  }
  if (options.slot_bytes == 0_B || options.slot_bytes.count() % kRingSlotAlignment != 0) {
    return refuse("slots of " + format_bytes(options.slot_bytes) + "; use a multiple of " +
                  format_bytes(Bytes(kRingSlotAlignment)));
  }
  if (options.timeout <= Nanoseconds::zero()) return refuse("a time-out of nothing; use at least a second");
  const RingShape& shape = options.shape;
  const bool chosen = shape.senders == 0 && shape.receivers == 0 && shape.copiers == 0;
  if (!chosen && (shape.senders == 0 || shape.receivers == 0 || shape.copiers == 0)) {
    return refuse("a shape without senders, receivers or copiers; give all three, or none");
  }
  return {};
}

Status open_to_each_other(std::span<const RingBuffers::Member> members) {
  for (const RingBuffers::Member& owner : members) {
    for (const RingBuffers::Member& guest : members) {
      if (owner.device == guest.device) continue;
      if (Status granted = owner.device->grant_access_to(*guest.device); !granted.ok()) return granted;
    }
  }
  return {};
}

RingLayout layout_of(const RingOptions& options, std::size_t ranks) {
  return {.ranks = static_cast<std::uint32_t>(ranks),
          .slots = options.slots,
          .slot_bytes = options.slot_bytes.count()};
}

}  // namespace

Bytes RingBuffers::bytes_per_rank(const RingOptions& options, std::uint32_t ranks) {
  return Bytes(ring_memory_bytes(layout_of(options, ranks)));
}

Result<std::unique_ptr<RingBuffers>> RingBuffers::create(std::span<const Member> members,
                                                         const RingOptions& options) {
  if (Status checked = check_options(members.size(), options); !checked.ok()) return checked.error();
  for (const Member& member : members) {
    TERRACE_CHECK(member.device != nullptr && member.pool != nullptr, "a member has a device and its pool");
  }
  if (Status opened = open_to_each_other(members); !opened.ok()) return opened.error();
  std::unique_ptr<RingBuffers> ring(new RingBuffers());
  if (Status reserved = ring->reserve(members, options); !reserved.ok()) return reserved.error();
  return ring;
}

Status RingBuffers::reserve(std::span<const Member> members, const RingOptions& options) {
  const RingLayout layout = layout_of(options, members.size());
  const auto direct = std::make_shared<RingRank::Direct>();
  for (const Member& member : members) {
    std::unique_ptr<RingRank> rank(new RingRank(*member.device, *member.pool, options, ranks(), layout));
    rank->direct_ = direct;
    ranks_.push_back(std::move(rank));
    if (Status reserved = ranks_.back()->reserve(member.stream); !reserved.ok()) return reserved;
  }
  for (const auto& rank : ranks_) {
    for (const auto& other : ranks_) rank->base_[other->rank_] = other->block_->address;
  }
  // Every rank's words are zero before any rank may write into them.
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (Status ready = members[i].device->synchronize(members[i].stream); !ready.ok()) return ready;
  }
  return {};
}

RingBuffers::~RingBuffers() {
  // All of them before any memory goes: each writes into that of the others.
  for (const auto& rank : ranks_) rank->finish();
}

}  // namespace terrace
