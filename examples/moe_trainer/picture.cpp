#include "examples/moe_trainer/picture.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {

constexpr std::int64_t kLongestSide = 1 << 15;

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The header's numbers, after the two letters of the format: white space and comments up to the end of the
// line come between them, and one white space follows the last.
class Header {
 public:
  Header(std::string_view bytes, std::string_view path) : bytes_(bytes), path_(path) {}

  [[nodiscard]] std::int64_t number() {
    skip_gap();
    if (at_ == bytes_.size() || !is_digit(bytes_[at_])) damaged();
    std::int64_t value = 0;
    for (; at_ < bytes_.size() && is_digit(bytes_[at_]); ++at_) {
      value = value * 10 + (bytes_[at_] - '0');
      if (value > kLongestSide) {
        bad_input(std::string(path_) + ": has a number in its header above " + std::to_string(kLongestSide) +
                  "; give a smaller picture");
      }
    }
    return value;
  }
  [[nodiscard]] std::string_view pixels() const {
    if (at_ == bytes_.size() || !is_space(bytes_[at_])) damaged();
    return bytes_.substr(at_ + 1);
  }

 private:
  [[noreturn]] void damaged() const {
    bad_input(std::string(path_) + ": its header is not that of a PPM: \"P6\", width, height and 255");
  }
  void skip_gap() {
    while (at_ < bytes_.size() && (is_space(bytes_[at_]) || bytes_[at_] == '#')) {
      if (bytes_[at_] == '#') at_ = std::min(bytes_.find('\n', at_), bytes_.size() - 1);
      ++at_;
    }
  }

  std::string_view bytes_;
  std::string_view path_;
  std::size_t at_ = 2;
};

}  // namespace

Picture read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) bad_input(path + ": cannot read the picture: " + std::strerror(errno));
  if (bytes.rfind("P6", 0) != 0) {
    bad_input(path + ": not a binary PPM, which begins with \"P6\"; convert it, for instance with netpbm");
  }
  Header header(bytes, path);
  Picture picture;
  picture.width = header.number();
  picture.height = header.number();
  const std::int64_t most = header.number();
  if (picture.width == 0 || picture.height == 0) bad_input(path + ": is a picture without pixels");
  if (most != 255) {
    bad_input(path + ": has colours from 0 to " + std::to_string(most) + "; convert it to 8 bits, 0 to 255");
  }
  const std::string_view pixels = header.pixels();
  const auto needed = static_cast<std::size_t>(picture.width * picture.height * kColours);
  if (pixels.size() != needed) {
    bad_input(path + ": has " + std::to_string(pixels.size()) + " bytes of pixels, " +
              std::to_string(picture.width) + "x" + std::to_string(picture.height) + " are " +
              std::to_string(needed) + "; give a whole file with one picture in it");
  }
  picture.rgb.assign(pixels.begin(), pixels.end());
  return picture;
}

}  // namespace terrace::trainer
