#include "examples/moe_trainer/made_images.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <string>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer {

namespace {

constexpr std::int64_t kSmallestSide = 16;  // pixels
// Changes with whatever changes a pixel or a caption.
constexpr std::string_view kKind = "made images 1";

struct Colour {
  const char* name;
  std::array<std::uint8_t, kColours> rgb;
};
constexpr Colour kPalette[] = {{"red", {255, 0, 0}},      {"green", {0, 255, 0}},
                               {"blue", {0, 0, 255}},     {"yellow", {255, 255, 0}},
                               {"purple", {255, 0, 255}}, {"white", {255, 255, 255}}};
constexpr const char* kShapes[] = {"circle", "square", "triangle"};
constexpr const char* kSizes[] = {"small", "large"};
constexpr const char* kPlaces[] = {"top left", "top right", "bottom left", "bottom right"};

struct Object {
  std::size_t size, colour, shape;
  [[nodiscard]] std::string text() const {
    return std::string("a ") + kSizes[size] + " " + kPalette[colour].name + " " + kShapes[shape];
  }
};

// One number after the other of picture n.
class Dice {
 public:
  Dice(const CounterRandom& random, std::uint64_t n) : random_(random), next_(n * kMost) {}
  // From 0 to below.
  [[nodiscard]] std::uint64_t roll(std::uint64_t below) { return random_.bits(next_++) % below; }
  [[nodiscard]] Object object() {
    const std::size_t size = roll(std::size(kSizes));
    const std::size_t colour = roll(std::size(kPalette));
    return {size, colour, roll(std::size(kShapes))};
  }

 private:
  static constexpr std::uint64_t kMost = 16;  // numbers of a picture
  const CounterRandom& random_;
  std::uint64_t next_;
};

// A square of pixels; of the whole picture where it lies.
struct Box {
  std::int64_t left, top, side;
};

// Whether the pixel (x, y) of a box of that side is inside; twice the distances, so that all are whole.
bool covers(std::size_t shape, std::int64_t side, std::int64_t x, std::int64_t y) {
  const std::int64_t across = 2 * x + 1 - side;
  const std::int64_t down = 2 * y + 1 - side;
  switch (shape) {
    case 0:
      return across * across + down * down <= side * side;
    case 1:
      return true;
    default:  // point up
      return std::abs(across) <= y + 1;
  }
}

void paint(Picture& picture, const Object& object, const Box& box) {
  for (std::int64_t y = 0; y < box.side; ++y) {
    for (std::int64_t x = 0; x < box.side; ++x) {
      if (!covers(object.shape, box.side, x, y)) continue;
      const std::int64_t at = ((box.top + y) * picture.width + box.left + x) * kColours;
      std::copy_n(kPalette[object.colour].rgb.begin(), kColours, picture.rgb.begin() + at);
    }
  }
}

class MadeImages : public ImageSource {
 public:
  MadeImages(std::int64_t side, std::uint64_t seed)
      : side_(side), random_({.seed = seed, .stream = "images"}) {}

  [[nodiscard]] CaptionedPicture draw(std::uint64_t n) const override {
    Dice dice(random_, n);
    const Object object = dice.object();
    const std::size_t place = dice.roll(std::size(kPlaces));
    CaptionedPicture made;
    made.picture = {side_, side_,
                    std::vector<std::uint8_t>(static_cast<std::size_t>(side_ * side_ * kColours))};
    paint(made.picture, object, box_of(dice, object, place));
    made.caption = object.text() + " at the " + kPlaces[place] + "\n";
    return made;
  }
  [[nodiscard]] std::uint64_t fingerprint() const override { return hash_text(kKind); }
  [[nodiscard]] std::size_t longest_caption() const override {
    return std::string_view("a large yellow triangle at the bottom right\n").size();
  }

 private:
  // Anywhere in its quarter of the picture.
  [[nodiscard]] Box box_of(Dice& dice, const Object& object, std::size_t place) const {
    const std::int64_t side = object.size == 0 ? side_ * 3 / 16 : side_ * 3 / 8;
    const std::int64_t middle = side_ / 2;
    const auto within = [&](std::size_t half) {
      const auto free = static_cast<std::uint64_t>(middle - side + 1);
      return static_cast<std::int64_t>(half) * middle + static_cast<std::int64_t>(dice.roll(free));
    };
    const std::int64_t left = within(place % 2);
    return {left, within(place / 2), side};
  }

  std::int64_t side_;
  CounterRandom random_;
};

}  // namespace

std::unique_ptr<ImageSource> make_images(const Config& config, std::uint64_t seed) {
  if (config.images.size < kSmallestSide) {
    bad_input("images.size: made images need " + std::to_string(kSmallestSide) +
              " pixels or more; raise it, or give your own with --images DIR");
  }
  return std::make_unique<MadeImages>(config.images.size, seed);
}

}  // namespace terrace::trainer
