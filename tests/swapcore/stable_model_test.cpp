// Random guests: threads that launch, allocate and free while another orders moves, with faults. Each block
// holds a number that its launches add to; what they would add up to without any move is what must be there.
#include <atomic>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>

#include "runtime/fault.hpp"
#include "tests/swapcore/stable_rig.hpp"

namespace terrace::test {
namespace {

constexpr Bytes kBlock = StableRig::kBlock;
constexpr int kSteps = 120;
constexpr std::uint64_t kMoves = 60;

struct Guest {
  Address at = nullptr;
  std::uint64_t expected = 0;
};

// Adds one to the first and the last number of a block, which agree.
void add_one(Address at) {
  auto* const numbers = reinterpret_cast<std::uint64_t*>(at);
  const std::size_t last = kBlock.count() / sizeof(std::uint64_t) - 1;
  ++numbers[0];
  ++numbers[last];
}

std::uint64_t number_in(Address at) {
  const auto* const numbers = reinterpret_cast<const std::uint64_t*>(at);
  const std::size_t last = kBlock.count() / sizeof(std::uint64_t) - 1;
  return numbers[0] == numbers[last] ? numbers[0] : ~0ULL;
}

std::uint64_t moves_of(const StableRig& rig) {
  const StableSpace::Counters counters = rig.space->counters();
  return counters.spills + counters.restores;
}

// Else what is in DDR stays out of reach but for its uses.
bool rig_uses_everything(std::uint64_t seed) { return seed / 31 % 2 == 0; }

// One guest: its own stream and blocks. It goes on until enough has moved under it.
void run_guest(StableRig& rig, int which, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Guest> blocks;
  std::atomic<int> wrong{0};
  const auto check_all = [&] {
    ASSERT_TRUE(rig.device->synchronize(rig.streams[static_cast<std::size_t>(which)]).ok());
    for (const Guest& guest : blocks) {
      StableSpace::Uses uses(*rig.space);
      const std::array<const void*, 1> pointer = {guest.at};
      uses.begin(pointer, rig.slots[static_cast<std::size_t>(which)]);
      ASSERT_EQ(number_in(guest.at), guest.expected);
    }
  };
  for (int step = 0; step < kSteps || moves_of(rig) < kMoves; ++step) {
    const std::uint64_t what = random() % 16;
    if (what == 0 || blocks.empty()) {
      const Result<Address> at = rig.space->allocate(kBlock);
      if (!at.ok()) continue;
      rig.launch(which, {*at}, [at = *at] { std::memset(at, 0, kBlock.count()); });
      blocks.push_back({*at, 0});
    } else if (what == 1) {
      const std::size_t i = random() % blocks.size();
      ASSERT_TRUE(rig.space->free(blocks[i].at).ok());
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));
    } else if (what == 2 && rig_uses_everything(seed)) {
      for (Guest& guest : blocks) ++guest.expected;
      std::vector<Guest> all = blocks;
      rig.launch_on_everything(which, [all] {
        for (const Guest& guest : all) add_one(guest.at);
      });
    } else if (what == 3) {
      check_all();
    } else {
      Guest& one = blocks[random() % blocks.size()];
      Guest& two = blocks[random() % blocks.size()];
      ++one.expected;
      ++two.expected;
      rig.launch(which, {one.at + 8, nullptr, two.at}, [a = one.at, b = two.at] {
        add_one(a);
        add_one(b);
      });
    }
  }
  check_all();
}

void order_at_random(StableRig& rig, std::uint64_t seed, const std::atomic<bool>& done) {
  std::mt19937_64 random(seed);
  while (!done) {
    const std::vector<StableSpace::View> blocks = rig.space->blocks();
    if (blocks.empty()) continue;
    const StableSpace::View& block = blocks[random() % blocks.size()];
    (void)rig.space->order(block.at, random() % 3 == 0 ? Place::kHbm : Place::kDdr);
    if (random() % 8 == 0) (void)rig.space->show(block.at);
    if (random() % 4 == 0) std::this_thread::yield();
  }
}

TEST(StableModel, RandomGuestsSeeTheirNumbersWhateverMoves) {
  const char* const asked = std::getenv("TERRACE_SEEDS");
  const std::uint64_t seeds = asked != nullptr ? std::strtoull(asked, nullptr, 10) : 12;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    StableRig rig({.hbm = 6 * kBlock, .ddr = 40 * kBlock, .streams = 3});
    std::optional<ScopedFaults> faults;
    if (seed % 3 == 2) faults.emplace(fail_call(FaultPoint::kDeviceMap, 5 + seed));
    rig.space->let_out_of_reach();
    std::atomic<bool> done{false};
    std::jthread orders([&] { order_at_random(rig, seed * 7 + 1, done); });
    {
      std::vector<std::jthread> guests;
      for (int i = 0; i < 3; ++i) {
        guests.emplace_back(
            [&rig, i, seed] { run_guest(rig, i, seed * 31 + static_cast<std::uint64_t>(i)); });
      }
    }
    done = true;
    orders.join();
    EXPECT_LE(rig.space->counters().hbm_peak, 6 * kBlock);
    if (testing::Test::HasFailure()) {
      ADD_FAILURE() << "seed " << seed;
      break;
    }
  }
}

}  // namespace
}  // namespace terrace::test
