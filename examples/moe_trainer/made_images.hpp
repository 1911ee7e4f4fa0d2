// Pictures that the program makes, with captions that only the picture can tell: an object on black, as in
// "a large red circle at the top left". Two sizes, six colours, three shapes and four quarters, all chosen
// apart from each other, are 7.2 bits a caption; where in its quarter the object lies is not told.
#pragma once

#include <cstdint>
#include <memory>

#include "examples/moe_trainer/images.hpp"

namespace terrace::trainer {

// Integer arithmetic alone: the same pixels on every machine. Throws Failure (kBadInput) where images.size is
// too small to tell shapes apart.
[[nodiscard]] std::unique_ptr<ImageSource> make_images(const Config& config, std::uint64_t seed);

}  // namespace terrace::trainer
