// Random copies behind the gates of two streams, which open at random: whatever is urgent, or was promoted in
// order of its stream's gates, arrives once its own gate is open, whichever others stay shut; and with the
// bytes that its stream wrote before the gate.
#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "tests/runtime/copy_fixture.hpp"

namespace terrace {
namespace {

constexpr int kSources = 2;

class GatesModel {
 public:
  struct Memory {
    Address hbm, host;
    Bytes slot;
    std::size_t slots;
  };
  GatesModel(Device& device, const Memory& memory, unsigned seed)
      : device_(device), memory_(memory), random_(seed), slots_(memory.slots) {
    for (Source& source : sources_) {
      source.stream = *device.create_stream(StreamPriority::kNormal);
      source.fence = *device.create_event();
    }
    engine_ = CopyEngine::create(device, {.chunk = memory.slot / 2, .window = memory.slot}).value();
  }
  ~GatesModel() {
    for (Source& source : sources_) {
      while (!source.shut.empty()) open_one(source);
      device_.destroy_stream(source.stream);
      device_.destroy_event(source.fence);
    }
  }

  void run(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) step();
    for (Source& source : sources_) {
      while (!source.shut.empty()) open_one(source);
    }
    for (Slot& slot : slots_)
      if (slot.ticket) finish(slot);
    engine_.reset();
  }

 private:
  struct Source {
    Stream stream;
    Event fence{};  // recorded over and over, as the store's is
    std::deque<std::unique_ptr<Gate>> shut;
    std::uint64_t gates = 0, opened = 0;
    std::deque<std::size_t> to_promote;  // slots, in order
  };
  struct Slot {
    std::optional<CopyEngine::Ticket> ticket;
    Source* source = nullptr;
    std::uint64_t gate = 0;  // it may start once so many of its source are open
    bool urgent = false;
    std::uint8_t value = 0;
  };

  void step() {
    Source& source = sources_[random_() % kSources];
    switch (random_() % 6) {
      case 0:
        if (source.shut.size() > 3) break;
        source.shut.push_back(std::make_unique<Gate>(device_, source.stream));
        ++source.gates;
        break;
      case 1:
        if (!source.shut.empty()) open_one(source);
        break;
      case 2:
        if (!source.to_promote.empty()) promote_next(source);
        break;
      case 3:
        return finish_what_can();
      default: {
        Slot& slot = slots_[random_() % slots_.size()];
        if (!slot.ticket) submit(slot, source);
      }
    }
  }
  static void open_one(Source& source) {
    source.shut.front()->open();
    source.shut.pop_front();
    ++source.opened;
  }
  [[nodiscard]] Address at(const Slot& slot, Address side) const {
    return side + static_cast<std::uint64_t>(&slot - slots_.data()) * memory_.slot.count();
  }

  // A third of them wait for nothing.
  void submit(Slot& slot, Source& source) {
    slot.source = random_() % 3 == 0 ? nullptr : &source;
    slot.value = static_cast<std::uint8_t>(random_() % 255 + 1);
    slot.urgent = random_() % 2 == 0;
    CopyEngine::Request request{.direction = Direction::kD2H,
                                .reason = CopyReason::kFetch,
                                .priority = slot.urgent ? CopyPriority::kUrgent : CopyPriority::kBackground};
    std::memset(at(slot, memory_.host), 0, memory_.slot.count());
    if (slot.source != nullptr) {
      ASSERT_TRUE(device_.fill(source.stream, at(slot, memory_.hbm), slot.value, memory_.slot).ok());
      ASSERT_TRUE(device_.record(source.stream, source.fence).ok());
      request.after = source.fence;
      slot.gate = source.gates;
      if (!slot.urgent) source.to_promote.push_back(static_cast<std::size_t>(&slot - slots_.data()));
    } else {
      std::memset(at(slot, memory_.hbm), slot.value, memory_.slot.count());
    }
    const Transfer piece{at(slot, memory_.host), at(slot, memory_.hbm), memory_.slot};
    if (slot.urgent) promote_before(slot);
    slot.ticket = engine_->submit(request, {&piece, 1}).value();
  }
  // What was submitted before is asked for before it: that is in order.
  void promote_before(const Slot& slot) {
    if (slot.source == nullptr) return;
    while (!slot.source->to_promote.empty()) promote_next(*slot.source);
  }
  void promote_next(Source& source) {
    Slot& slot = slots_[source.to_promote.front()];
    source.to_promote.pop_front();
    ASSERT_TRUE(slot.ticket->promote().ok());
    slot.urgent = true;
  }

  void finish_what_can() {
    for (Slot& slot : slots_) {
      if (!slot.ticket) continue;
      if (slot.source == nullptr && !slot.urgent) {
        ASSERT_TRUE(slot.ticket->promote().ok());
        slot.urgent = true;
      }
      const bool open = slot.source == nullptr || slot.source->opened >= slot.gate;
      if (slot.urgent && open) finish(slot);
    }
  }
  void finish(Slot& slot) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    if (!slot.urgent) {
      ASSERT_TRUE(slot.ticket->promote().ok());
    }
    while (!slot.ticket->done()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "it waits for another's gate";
      std::this_thread::yield();
    }
    ASSERT_TRUE(slot.ticket->synchronize().ok());
    for (const std::uint64_t i : {std::uint64_t{0}, memory_.slot.count() - 1})
      ASSERT_EQ(std::to_integer<std::uint8_t>(at(slot, memory_.host)[i]), slot.value);
    slot.ticket.reset();
  }

  Device& device_;
  const Memory memory_;
  std::mt19937 random_;
  std::array<Source, kSources> sources_;
  std::unique_ptr<CopyEngine> engine_;
  std::vector<Slot> slots_;  // after the engine: tickets go first
};

class CopyGatesModelTest : public CopyFixture {};

TEST_F(CopyGatesModelTest, NoUrgentCopyWaitsForTheGateOfAnother) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    GatesModel(*device_, {hbm_, host_.data(), kBlock, kBlocks}, seed).run(400);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
}  // namespace terrace
