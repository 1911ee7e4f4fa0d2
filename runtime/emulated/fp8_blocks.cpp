// Numbers packed as 8-bit floats on an emulated device: a loop on the stream's thread.
#include "runtime/fp8_blocks.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "runtime/device_fault.hpp"
#include "runtime/emulated/emulated_device.hpp"

namespace terrace {
namespace {

using Numbers = std::array<float, kFp8Block>;

std::uint64_t numbers_of(const Fp8Blocks& blocks, std::uint64_t block) {
  return std::min(kFp8Block, blocks.count - block * kFp8Block);
}

void load(const Fp8Blocks& blocks, std::uint64_t block, Numbers& to) {
  const std::uint64_t count = numbers_of(blocks, block);
  if (blocks.element == Element::kF32) {
    std::memcpy(to.data(), blocks.numbers + block * kFp8Block * sizeof(float), count * sizeof(float));
    return;
  }
  std::array<std::uint16_t, kFp8Block> halves;
  std::memcpy(halves.data(), blocks.numbers + block * kFp8Block * sizeof(std::uint16_t),
              count * sizeof(std::uint16_t));
  for (std::uint64_t i = 0; i < count; ++i) to[i] = fp8_float(static_cast<std::uint32_t>(halves[i]) << 16);
}

void store(const Fp8Blocks& blocks, std::uint64_t block, const Numbers& from) {
  const std::uint64_t count = numbers_of(blocks, block);
  if (blocks.element == Element::kF32) {
    std::memcpy(blocks.numbers + block * kFp8Block * sizeof(float), from.data(), count * sizeof(float));
    return;
  }
  std::array<std::uint16_t, kFp8Block> halves;
  for (std::uint64_t i = 0; i < count; ++i) halves[i] = static_cast<std::uint16_t>(fp8_bits(from[i]) >> 16);
  std::memcpy(blocks.numbers + block * kFp8Block * sizeof(std::uint16_t), halves.data(),
              count * sizeof(std::uint16_t));
}

std::byte* codes_of(const Fp8Blocks& blocks, std::uint64_t block) {
  return blocks.packed + block * kFp8Block;
}
std::byte& exponent_of(const Fp8Blocks& blocks, std::uint64_t block) {
  return blocks.packed[fp8_code_bytes(blocks.count) + block];
}

void pack_block(const Fp8Blocks& blocks, std::uint64_t block) {
  Numbers numbers;
  load(blocks, block, numbers);
  const std::uint64_t count = numbers_of(blocks, block);
  float largest = 0;
  for (std::uint64_t i = 0; i < count; ++i)
    if (std::isfinite(numbers[i])) largest = std::max(largest, std::fabs(numbers[i]));
  const int exponent = fp8_exponent(fp8_bits(largest));
  exponent_of(blocks, block) = static_cast<std::byte>(exponent);
  const float scale = fp8_power(exponent);
  const float inverse = fp8_power(-exponent);
  float largest_error = 0;
  double error = 0, magnitude = 0;
  std::byte* const codes = codes_of(blocks, block);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint32_t code = fp8_encode(numbers[i], inverse);
    codes[i] = static_cast<std::byte>(code);
    if (!std::isfinite(numbers[i])) continue;
    const float off = std::fabs(numbers[i] - fp8_decode(code, scale));
    largest_error = std::max(largest_error, off);
    error += off;
    magnitude += std::fabs(numbers[i]);
  }
  if (blocks.error == nullptr || largest == 0) return;
  blocks.error->error_sum += error;
  blocks.error->magnitude_sum += magnitude;
  blocks.error->largest_share = std::max(blocks.error->largest_share, largest_error / largest);
}

void unpack_block(const Fp8Blocks& blocks, std::uint64_t block) {
  const auto exponent = static_cast<std::int8_t>(exponent_of(blocks, block));
  const float scale = fp8_power(exponent);
  const std::byte* const codes = codes_of(blocks, block);
  Numbers numbers;
  for (std::uint64_t i = 0; i < numbers_of(blocks, block); ++i)
    numbers[i] = fp8_decode(std::to_integer<std::uint32_t>(codes[i]), scale);
  store(blocks, block, numbers);
}

}  // namespace

Status EmulatedDevice::pack_fp8(Stream stream, const Fp8Blocks& blocks) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  stream_of(stream)->run([blocks] {
    for (std::uint64_t block = 0; block < fp8_blocks(blocks.count); ++block) pack_block(blocks, block);
  });
  return {};
}

Status EmulatedDevice::unpack_fp8(Stream stream, const Fp8Blocks& blocks) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  stream_of(stream)->run([blocks] {
    for (std::uint64_t block = 0; block < fp8_blocks(blocks.count); ++block) unpack_block(blocks, block);
  });
  return {};
}

}  // namespace terrace
