#include "allocator/tiers/nvme_mover.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "allocator/tiers/nvme_transfer.hpp"
#include "tests/allocator/tier_rig.hpp"

namespace terrace {
namespace {

constexpr Bytes kPiece = 16_KiB;

// Work on the compute stream that ends when the test says so, and an event behind it.
class Gate {
 public:
  Gate(TierRig& rig, EventPool& events) : event_(*events.take()) {
    EXPECT_TRUE(rig.device->launch_host(rig.compute, [open = open_] { open->wait(false); }));
    EXPECT_TRUE(rig.device->record(rig.compute, *event_));
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  [[nodiscard]] EventPool::Held event() const { return event_; }
  void open() {
    *open_ = true;
    open_->notify_all();
  }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
  EventPool::Held event_;
};

class NvmeMoverTest : public testing::Test {
 protected:
  NvmeMoverTest()
      : file_(std::move(NvmeFile::create({.folder = rig_.folder.path(), .size = 4_MiB})).value()),
        mover_(std::move(NvmeMover::create({*rig_.device, *rig_.ddr, *rig_.copies, file_},
                                           {.piece = kPiece, .pieces = 2, .io = IoChoice::kAuto}))
                   .value()) {}

  std::shared_ptr<NvmeTransfer> transfer(NvmeTransfer::Kind kind, std::uint64_t place, Bytes size,
                                         std::shared_ptr<StoredBytes> stored) {
    const Address at = rig_.hbm + place * (1_MiB).count();
    return std::make_shared<NvmeTransfer>(NvmeTransfer::Request{.kind = kind,
                                                                .block = place,
                                                                .size = size,
                                                                .offset = place * (1_MiB).count(),
                                                                .from = at,
                                                                .to = at,
                                                                .stored = std::move(stored)});
  }
  static std::shared_ptr<StoredBytes> stored_of(Bytes size) {
    auto stored = std::make_shared<StoredBytes>();
    stored->generation = 1;
    stored->checksums.resize(round_up(size, kPiece) / kPiece);
    return stored;
  }

  TierRig rig_;
  NvmeFile file_;
  std::unique_ptr<NvmeMover> mover_;
};

TEST_F(NvmeMoverTest, ALoadPassesStoresThatCameBefore) {
  const auto small = stored_of(kPiece);
  write_pattern(rig_.hbm, kPiece, 1);
  auto first = transfer(NvmeTransfer::Kind::kStore, 0, kPiece, small);
  mover_->submit(first, nullptr);
  ASSERT_TRUE(first->synchronize());
  // Both begin at one time, the store first in line; no second piece of it leaves HBM before the cap is
  // lifted.
  rig_.copies->set_cap(Direction::kD2H, 1);
  EventPool events(*rig_.device);
  Gate gate(rig_, events);
  auto store = transfer(NvmeTransfer::Kind::kStore, 1, 1_MiB, stored_of(1_MiB));
  auto load = transfer(NvmeTransfer::Kind::kLoad, 0, kPiece, small);
  mover_->submit(store, gate.event());
  mover_->submit(load, gate.event());
  gate.open();
  for (int i = 0; i < 2000 && !load->done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(load->done());
  EXPECT_FALSE(store->done());
  rig_.copies->set_cap(Direction::kD2H, 0);
  EXPECT_TRUE(store->synchronize());
  EXPECT_TRUE(load->synchronize());
  EXPECT_TRUE(has_pattern(rig_.hbm, kPiece, 1));
}

TEST_F(NvmeMoverTest, WhatMustWaitHoldsNoBuffer) {
  EventPool events(*rig_.device);
  Gate gate(rig_, events);
  auto later = transfer(NvmeTransfer::Kind::kStore, 1, 1_MiB, stored_of(1_MiB));
  auto now = transfer(NvmeTransfer::Kind::kStore, 2, 1_MiB, stored_of(1_MiB));
  mover_->submit(later, gate.event());
  mover_->submit(now, nullptr);
  EXPECT_TRUE(now->synchronize());
  EXPECT_FALSE(later->done());
  gate.open();
  EXPECT_TRUE(later->synchronize());
}

TEST_F(NvmeMoverTest, WhatWasHandedInIsFinishedBeforeItGoes) {
  std::vector<std::shared_ptr<NvmeTransfer>> transfers;
  for (std::uint64_t place = 0; place < 4; ++place) {
    transfers.push_back(transfer(NvmeTransfer::Kind::kStore, place, 1_MiB, stored_of(1_MiB)));
    mover_->submit(transfers.back(), nullptr);
  }
  mover_.reset();
  for (const auto& each : transfers) {
    EXPECT_TRUE(each->done());
    EXPECT_TRUE(each->synchronize());
  }
}

TEST(NvmeTransfer, IsDoneOnceItHasEndedAndSaysHow) {
  NvmeTransfer transfer(NvmeTransfer::Request{.block = 1, .size = 1_B, .stored = nullptr});
  EXPECT_FALSE(transfer.done());
  transfer.finish(Error{.code = Errc::kIo, .text = "gone"});
  EXPECT_TRUE(transfer.done());
  EXPECT_EQ(transfer.synchronize().error().text, "gone");
  EXPECT_EQ(transfer.wait_on(Stream{}).error().code, Errc::kIo);
}

}  // namespace
}  // namespace terrace
