// Numbers packed as 8-bit floats on the emulated device, against the bound that the header states.
#include "runtime/fp8_blocks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "runtime/device.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class Fp8BlocksTest : public testing::Test {
 protected:
  Fp8BlocksTest()
      : device_(std::move(open_emulated_device({.capacity = 1_MiB})).value()),
        stream_(*device_->create_stream(StreamPriority::kNormal)) {}
  ~Fp8BlocksTest() override { device_->destroy_stream(stream_); }

  // There and back; what is behind the last number stays as it was.
  std::vector<float> round_trip(const std::vector<float>& numbers, Element element) {
    const std::size_t unit = element == Element::kF32 ? 4 : 2;
    std::vector<std::byte> source(numbers.size() * unit + 16, std::byte{0x55});
    std::vector<std::byte> target = source;
    std::vector<std::byte> packed(fp8_bytes(numbers.size()) + 16, std::byte{0x55});
    for (std::size_t i = 0; i < numbers.size(); ++i) put(source, element, i, numbers[i]);
    error_ = {};
    EXPECT_TRUE(device_->pack_fp8(stream_, {element, numbers.size(), source.data(), packed.data(), &error_}));
    EXPECT_TRUE(
        device_->unpack_fp8(stream_, {element, numbers.size(), target.data(), packed.data(), nullptr}));
    EXPECT_TRUE(device_->synchronize(stream_));
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(packed[packed.size() - 1 - i], std::byte{0x55}) << "written behind its end";
      EXPECT_EQ(target[target.size() - 1 - i], std::byte{0x55}) << "written behind its end";
    }
    std::vector<float> back;
    for (std::size_t i = 0; i < numbers.size(); ++i) back.push_back(get(target, element, i));
    return back;
  }
  static void put(std::vector<std::byte>& to, Element element, std::size_t i, float number) {
    const std::uint32_t bits = fp8_bits(number);
    if (element == Element::kF32) {
      std::memcpy(to.data() + 4 * i, &bits, 4);
    } else {
      const auto half = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(to.data() + 2 * i, &half, 2);
    }
  }
  static float get(const std::vector<std::byte>& from, Element element, std::size_t i) {
    std::uint32_t bits = 0;
    std::uint16_t half = 0;
    if (element == Element::kF32) {
      std::memcpy(&bits, from.data() + 4 * i, 4);
    } else {
      std::memcpy(&half, from.data() + 2 * i, 2);
      bits = static_cast<std::uint32_t>(half) << 16;
    }
    return fp8_float(bits);
  }
  // Numbers that either element holds.
  static float bf16(float number) { return fp8_float(fp8_bits(number) & 0xFFFF0000U); }

  void expect_within_bound(const std::vector<float>& numbers, Element element) {
    const std::vector<float> back = round_trip(numbers, element);
    double error = 0, magnitude = 0, largest_share = 0;
    for (std::size_t first = 0; first < numbers.size(); first += kFp8Block) {
      const std::size_t end = std::min<std::size_t>(numbers.size(), first + kFp8Block);
      double largest = 0, largest_error = 0;
      for (std::size_t i = first; i < end; ++i) largest = std::max<double>(largest, std::fabs(numbers[i]));
      // From the statement, not from the code: the least power of two.
      double scale = std::ldexp(1.0, -124);
      while (scale * 416 < largest) scale *= 2;
      for (std::size_t i = first; i < end; ++i) {
        const double off = std::fabs(static_cast<double>(numbers[i]) - back[i]);
        ASSERT_LE(off, std::max(std::fabs(numbers[i]) / 16.0, scale / 1024)) << numbers[i] << " at " << i;
        largest_error = std::max(largest_error, off);
        error += off;
        magnitude += std::fabs(numbers[i]);
      }
      if (largest > 0) largest_share = std::max(largest_share, largest_error / largest);
    }
    EXPECT_NEAR(error_.error_sum, error, 1e-6 * magnitude);
    EXPECT_NEAR(error_.magnitude_sum, magnitude, 1e-6 * magnitude);
    EXPECT_NEAR(error_.largest_share, largest_share, 1e-6);
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  Fp8Error error_{};
};

TEST_F(Fp8BlocksTest, EveryNumberComesBackWithinTheBoundOfItsBlock) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const Element element : {Element::kF32, Element::kBf16}) {
    for (const int exponent : {-130, -120, -30, 0, 20, 125}) {
      for (const std::size_t count : {0, 1, 15, 16, 17, 127, 128, 129, 1000, 4096}) {
        std::vector<float> numbers;
        for (std::size_t i = 0; i < count; ++i) {
          // Far smaller ones too, down to where they vanish beside the largest.
          const float size = std::ldexp(normal(random), exponent - static_cast<int>(random() % 24));
          numbers.push_back(bf16(std::isfinite(size) ? size : 1.0F));
        }
        expect_within_bound(numbers, element);
      }
    }
  }
}

TEST_F(Fp8BlocksTest, ZerosInfinitiesAndNansComeBackAsTheyWent) {
  for (const Element element : {Element::kF32, Element::kBf16}) {
    std::vector<float> numbers(200, 3.0F);
    numbers[0] = 0.0F;
    numbers[1] = -0.0F;
    numbers[2] = kInfinity;
    numbers[3] = -kInfinity;
    numbers[4] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> back = round_trip(numbers, element);
    EXPECT_EQ(fp8_bits(back[0]), fp8_bits(0.0F));
    EXPECT_EQ(fp8_bits(back[1]), fp8_bits(-0.0F));
    EXPECT_EQ(back[2], kInfinity);
    EXPECT_EQ(back[3], -kInfinity);
    EXPECT_TRUE(std::isnan(back[4]));
    for (std::size_t i = 5; i < back.size(); ++i)
      ASSERT_EQ(back[i], 3.0F) << "their block's scale is its own";
    EXPECT_EQ(error_.error_sum, 0);
    EXPECT_NEAR(error_.magnitude_sum, 3.0 * 195, 1e-9);
  }
  const std::vector<float> nothing(300, 0.0F);
  EXPECT_EQ(round_trip(nothing, Element::kF32), nothing);
  EXPECT_EQ(error_.largest_share, 0);
}

TEST_F(Fp8BlocksTest, TheLeastAndTheLargestNumbers) {
  const float least = std::numeric_limits<float>::denorm_min();
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(round_trip({least}, Element::kF32)[0], 0.0F) << "below half of the least code";
  const float denormal = std::ldexp(1.0F, -130);
  EXPECT_EQ(round_trip({denormal}, Element::kF32)[0], denormal);
  EXPECT_EQ(round_trip({denormal}, Element::kBf16)[0], denormal);
  EXPECT_EQ(round_trip({largest}, Element::kF32)[0], std::ldexp(1.625F, 127)) << "no infinity";
  EXPECT_EQ(round_trip({416, -416}, Element::kF32), (std::vector<float>{416, -416}));
  EXPECT_EQ(round_trip({432, 1}, Element::kF32), (std::vector<float>{448, 1})) << "the next scale";
}

TEST_F(Fp8BlocksTest, EveryCodeIsItself) {
  for (std::uint32_t code = 0; code < 256; ++code) {
    const float number = fp8_decode(code, 1.0F);
    EXPECT_EQ(fp8_encode(number, 1.0F), code);
  }
  EXPECT_EQ(fp8_encode(1.0625F, 1.0F), fp8_encode(1.0F, 1.0F)) << "halfway: to the even one";
  EXPECT_EQ(fp8_encode(1.1875F, 1.0F), fp8_encode(1.25F, 1.0F)) << "halfway: to the even one";
}

TEST_F(Fp8BlocksTest, ALaunchThatFailsIsAnError) {
  std::vector<std::byte> memory(512);
  const Fp8Blocks blocks{Element::kF32, 16, memory.data(), memory.data() + 256, nullptr};
  for (std::uint64_t nth = 1; nth <= 2; ++nth) {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceLaunch, nth));
    EXPECT_EQ(device_->pack_fp8(stream_, blocks).ok(), nth != 1);
    EXPECT_EQ(device_->unpack_fp8(stream_, blocks).ok(), nth != 2);
  }
  EXPECT_TRUE(device_->synchronize(stream_)) << "what was queued uses the memory";
}

}  // namespace
}  // namespace terrace
