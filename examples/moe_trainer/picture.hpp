// Pictures of 8-bit red, green and blue, and the one file format that is read: binary PPM.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace terrace::trainer {

inline constexpr std::int64_t kColours = 3;  // numbers of a pixel

struct Picture {
  std::int64_t width = 0;
  std::int64_t height = 0;
  std::vector<std::uint8_t> rgb;  // (height, width, kColours)
};

// Reads a binary PPM (netpbm's "P6") with 8 bits a colour and one picture in it. Throws Failure (kBadInput)
// naming the file and what would be accepted: it cannot be read, is of another format or depth, is cut off,
// holds more than its header says.
[[nodiscard]] Picture read_ppm(const std::string& path);

}  // namespace terrace::trainer
