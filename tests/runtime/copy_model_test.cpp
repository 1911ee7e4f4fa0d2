// Random copies of both classes and directions, promoted, cancelled, capped, dropped and waited for at
// random, with and without failing calls: whoever is told that a copy has arrived finds its bytes, whoever is
// told that it has not sees them move no more, everybody is told once, and no window is exceeded.
#include <algorithm>
#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "runtime/fault.hpp"
#include "tests/runtime/copy_counting_device.hpp"
#include "tests/runtime/copy_fixture.hpp"

namespace terrace {
namespace {

constexpr Bytes kSlot = 128_KiB;  // what one copy moves; two blocks of the fixture
constexpr std::uint64_t kSlots = 16;
constexpr Bytes kChunk = 32_KiB;

class Model {
 public:
  struct Memory {
    Address hbm;
    Address host;
  };
  Model(Device& device, Stream compute, Memory memory, unsigned seed)
      : device_(device), compute_(compute), memory_(memory), random_(seed), slots_(kSlots), told_(4096) {
    auto engine = CopyEngine::create(
        device, {.chunk = kChunk, .window = 2 * kChunk, .look_again = std::chrono::milliseconds(1)});
    if (engine.ok()) engine_ = std::move(engine).value();
  }
  void run(int steps) {
    if (engine_ == nullptr) return;
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) step();
    const bool wait = random_() % 2 == 0;
    for (Slot& slot : slots_) {
      if (slot.ticket && wait) finish(slot);
      slot.ticket.reset();
    }
    engine_.reset();  // or with everything in flight
    for (std::size_t copy = 0; copy < copies_; ++copy) EXPECT_EQ(told_[copy], 1) << "copy " << copy;
  }

 private:
  struct Slot {
    std::optional<CopyEngine::Ticket> ticket;
    Direction direction = Direction::kH2D;
    std::uint8_t value = 0;
  };

  [[nodiscard]] Address at(std::size_t slot, Direction side) const {  // where copies of that direction end
    return (side == Direction::kH2D ? memory_.hbm : memory_.host) + slot * kSlot.count();
  }
  [[nodiscard]] static Direction other(Direction direction) {
    return direction == Direction::kH2D ? Direction::kD2H : Direction::kH2D;
  }
  static bool holds(const std::byte* from, std::uint8_t value) {
    return std::all_of(from, from + kSlot.count(),
                       [value](std::byte each) { return std::to_integer<std::uint8_t>(each) == value; });
  }

  void step() {
    Slot& slot = slots_[random_() % kSlots];
    if (!slot.ticket) return submit(slot);
    switch (random_() % 8) {
      case 0:
        (void)slot.ticket->promote();
        break;
      case 1:
        slot.ticket->cancel();
        break;
      case 2:
        return order(slot);
      case 3:
      case 4:
        return finish(slot);
      case 5:
        engine_->set_cap(slot.direction, random_() % 2 == 0 ? 0 : 1e6 * static_cast<double>(random_() % 200));
        break;
      default:
        (void)slot.ticket->done();
    }
  }

  // The slot in pieces of random sizes, in random order.
  std::vector<Transfer> pieces_of(std::size_t slot, Direction direction) {
    std::vector<Transfer> pieces;
    const std::uint64_t most = random_() % 2 == 0 ? kSlot.count() : 5000;
    for (std::uint64_t from = 0; from < kSlot.count();) {
      const std::uint64_t size = std::min<std::uint64_t>(kSlot.count() - from, random_() % most);
      pieces.push_back({at(slot, direction) + from, at(slot, other(direction)) + from, Bytes(size)});
      from += size;
    }
    std::shuffle(pieces.begin(), pieces.end(), random_);
    return pieces;
  }

  void submit(Slot& slot) {
    const auto index = static_cast<std::size_t>(&slot - slots_.data());
    slot.direction = random_() % 2 == 0 ? Direction::kH2D : Direction::kD2H;
    slot.value = static_cast<std::uint8_t>(random_() % 255 + 1);
    std::memset(at(index, slot.direction), 0, kSlot.count());
    std::memset(at(index, other(slot.direction)), 0, kSlot.count());
    // The source gets its bytes on the compute stream: a copy that does not wait for it moves zeros.
    const auto produced = device_.create_event();
    if (!produced.ok()) return;
    const bool filled = device_.fill(compute_, at(index, other(slot.direction)), slot.value, kSlot).ok();
    const bool recorded = filled && device_.record(compute_, *produced).ok();
    // Without its event nobody waits for the fill, and the slot is used again.
    if (filled && !recorded) (void)device_.synchronize(compute_);
    if (recorded) {
      CopyEngine::Request request{
          .direction = slot.direction,
          .after = *produced,
          .reason = CopyReason::kFetch,
          .priority = random_() % 4 == 0 ? CopyPriority::kUrgent : CopyPriority::kBackground};
      const std::size_t copy = copies_;
      request.on_done = [this, copy](const Status&) { ++told_[copy]; };
      auto ticket = engine_->submit(request, pieces_of(index, slot.direction));
      if (ticket.ok()) {
        slot.ticket = std::move(ticket).value();
        ++copies_;
      } else {
        nothing_moves_any_more(index, slot.direction);
      }
    }
    // Now and then the host waits; else it runs ahead of the device.
    if (random_() % 4 == 0) (void)device_.synchronize(compute_);
    device_.destroy_event(*produced);
  }
  void nothing_moves_any_more(std::size_t index, Direction direction) {
    std::memset(at(index, direction), 0xAB, kSlot.count());
    std::this_thread::yield();
    EXPECT_TRUE(holds(at(index, direction), 0xAB));
  }

  void finish(Slot& slot) {
    const auto index = static_cast<std::size_t>(&slot - slots_.data());
    const Status arrived = slot.ticket->synchronize();
    EXPECT_TRUE(slot.ticket->done());
    if (arrived.ok()) {
      EXPECT_TRUE(holds(at(index, slot.direction), slot.value));
    } else {
      nothing_moves_any_more(index, slot.direction);
    }
    slot.ticket.reset();
  }

  void order(Slot& slot) {
    if (!slot.ticket->order_before(compute_).ok()) return finish(slot);
    const auto index = static_cast<std::size_t>(&slot - slots_.data());
    bool arrived = true;  // where the look itself fails there is nothing to say
    (void)device_.launch_host(compute_, [&, from = at(index, slot.direction), value = slot.value] {
      arrived = holds(from, value);
    });
    EXPECT_TRUE(device_.synchronize(compute_).ok());
    EXPECT_TRUE(arrived);
    finish(slot);
  }

  Device& device_;
  const Stream compute_;
  const Memory memory_;
  std::mt19937 random_;
  std::vector<Slot> slots_;
  std::vector<std::atomic<int>> told_;  // by copy, how often
  std::size_t copies_ = 0;
  std::unique_ptr<CopyEngine> engine_;
};

class CopyModelTest : public CopyFixture {};

TEST_F(CopyModelTest, EveryCopyArrivesOrSaysThatItDidNot) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    CopyCountingDevice counting(*device_);
    Model(counting, compute_, {hbm_, host_.data()}, seed).run(200);
    const auto streams = counting.created();
    ASSERT_GE(streams.size(), 4U);
    for (const std::size_t background : {1U, 3U}) {
      EXPECT_LE(counting.most_under_way(streams[background]), 2 * kChunk);
      EXPECT_GT(counting.most_under_way(streams[background]), 0_B);
    }
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST_F(CopyModelTest, WhicheverCallFails) {
  for (const FaultPoint point :
       {FaultPoint::kDeviceCreateStream, FaultPoint::kDeviceCreateEvent, FaultPoint::kDeviceRecord,
        FaultPoint::kDeviceWait, FaultPoint::kDeviceCopy, FaultPoint::kDeviceLaunch}) {
    bool fired = true;
    for (std::uint64_t nth = 1; fired && nth < 300; nth += 1 + nth / 4) {
      const ScopedFaults faults(fail_call(point, nth));
      Model(*device_, compute_, {hbm_, host_.data()}, 7).run(60);
      fired = faults.fired();
      (void)device_->synchronize(compute_);
      if (HasFailure()) FAIL() << name_of(point) << " call " << nth;
    }
  }
}

}  // namespace
}  // namespace terrace
