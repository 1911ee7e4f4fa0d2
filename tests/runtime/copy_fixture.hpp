// An emulated device with some HBM mapped and as much host memory, for tests of what copies.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <memory>
#include <vector>

#include "runtime/copy_engine.hpp"
#include "runtime/emulated/emulated_device.hpp"

namespace terrace {

// Work on a stream stops here until opened.
class Gate {
 public:
  // An event that completes once the gate is open.
  Gate(Device& device, Stream stream) : device_(device), event_(*device.create_event()) {
    EXPECT_TRUE(device.launch_host(stream, [opened = opened_.get_future().share()] { opened.wait(); }).ok());
    EXPECT_TRUE(device.record(stream, event_).ok());
  }
  ~Gate() {
    open();
    device_.destroy_event(event_);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() {
    if (!std::exchange(open_, true)) opened_.set_value();
  }
  [[nodiscard]] Event event() const { return event_; }

 private:
  Device& device_;
  std::promise<void> opened_;
  bool open_ = false;
  Event event_;
};

class CopyFixture : public testing::Test {
 protected:
  static constexpr Bytes kBlock = 64_KiB;
  static constexpr std::uint64_t kBlocks = 32;

  void SetUp() override {
    device_ = EmulatedDevice::create({.capacity = 16_MiB}).value();
    hbm_ = device_->reserve(kBlocks * kBlock).value();
    physical_ = device_->create_physical(kBlocks * kBlock).value();
    ASSERT_TRUE(device_->map(hbm_, physical_, kBlocks * kBlock).ok());
    host_.resize((kBlocks * kBlock).count());
    compute_ = *device_->create_stream(StreamPriority::kNormal);
  }
  void TearDown() override {
    device_->destroy_stream(compute_);
    ASSERT_TRUE(device_->unmap(hbm_, kBlocks * kBlock).ok());
    device_->destroy_physical(physical_);
    device_->release(hbm_, kBlocks * kBlock);
    EXPECT_EQ(device_->live_streams(), 0);
    EXPECT_EQ(device_->live_events(), 0);
  }
  [[nodiscard]] Address hbm(std::uint64_t block) const { return hbm_ + block * kBlock.count(); }
  [[nodiscard]] Address host(std::uint64_t block) { return host_.data() + block * kBlock.count(); }
  // Blocks from `first` on, to the other side: one piece.
  [[nodiscard]] Transfer up(std::uint64_t first, std::uint64_t blocks = 1) {
    return {.to = hbm(first), .from = host(first), .size = blocks * kBlock};
  }
  [[nodiscard]] Transfer down(std::uint64_t first, std::uint64_t blocks = 1) {
    return {.to = host(first), .from = hbm(first), .size = blocks * kBlock};
  }
  static void fill(Address at, int value, std::uint64_t blocks = 1) {
    std::memset(at, value, (blocks * kBlock).count());
  }
  [[nodiscard]] static bool all(const std::byte* at, int value, std::uint64_t blocks = 1) {
    for (std::uint64_t i = 0; i < (blocks * kBlock).count(); ++i) {
      if (std::to_integer<int>(at[i]) != value) return false;
    }
    return true;
  }

  std::unique_ptr<EmulatedDevice> device_;
  Address hbm_ = nullptr;
  Physical physical_;
  std::vector<std::byte> host_;
  Stream compute_;
};

}  // namespace terrace
