// Where pictures with captions come from: made by the program, or read from a folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "examples/moe_trainer/config.hpp"
#include "examples/moe_trainer/picture.hpp"

namespace terrace::trainer {

struct CaptionedPicture {
  Picture picture;
  std::string caption;  // its last byte is a line feed
};

class ImageSource {
 public:
  virtual ~ImageSource() = default;
  // The n-th of an endless row, the same in every run of a seed. Square, of the size that was asked for.
  [[nodiscard]] virtual CaptionedPicture draw(std::uint64_t n) const = 0;
  // The same for the same pictures and captions.
  [[nodiscard]] virtual std::uint64_t fingerprint() const = 0;
  // In bytes, the line feed included.
  [[nodiscard]] virtual std::size_t longest_caption() const = 0;
};

// The source of a run: the folder, or made ones (made_images.hpp) where it is empty. Of a folder every `.ppm`
// is taken, in order of names, with the caption in the `.txt` of the same name; other files are left alone.
// All is read at once and kept. Throws Failure (kBadInput) naming file, fault and remedy: no picture there,
// not a PPM, of another size than images.size, no caption or an empty one, not UTF-8, too long for a sequence
// of train.length.
[[nodiscard]] std::unique_ptr<ImageSource> open_images(const std::string& folder, const Config& config,
                                                       std::uint64_t seed);

}  // namespace terrace::trainer
