#include "examples/moe_trainer/image_feed.hpp"

#include <algorithm>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {

// From -1 to 1.
float number_of(std::uint8_t colour) { return static_cast<float>(colour) / 127.5F - 1.0F; }

// Writes a picture's patches, one after the other: (grid, grid, patch, patch, colours).
void write_patches(const Picture& picture, const ImagesConfig& images, float* to) {
  for (std::int64_t top = 0; top < images.size; top += images.patch) {
    for (std::int64_t left = 0; left < images.size; left += images.patch) {
      for (std::int64_t y = top; y < top + images.patch; ++y) {
        const auto from = picture.rgb.begin() + (y * images.size + left) * kColours;
        to = std::transform(from, from + images.patch * kColours, to, number_of);
      }
    }
  }
}

}  // namespace

ImageFeed::ImageFeed(Session& session, Memory& memory, const Config& config, const ImageSource& source)
    : session_(session),
      config_(config),
      source_(source),
      most_rows_(config.most_image_rows()),
      rows_(static_cast<std::size_t>(config.train.micro_batches)) {
  const std::int64_t micro_batches = config.train.micro_batches;
  patches_ = memory.tensor(micro_batches * most_rows_, config.images.numbers(), Pool::kWeights);
  places_ = memory.tensor(micro_batches, config.tokens() + most_rows_, Pool::kWeights);
  host_patches_.emplace(session.device(), patches_.bytes());
  host_places_.emplace(session.device(), places_.bytes());
}

// Row r of a micro-batch is its r-th image token.
void ImageFeed::place_image(const Picture& picture, std::size_t micro_batch, std::int64_t token) {
  const ImagesConfig& images = config_.images;
  const auto index = static_cast<std::int64_t>(micro_batch);
  std::int64_t& rows = rows_[micro_batch];
  float* patches = host_patches_->as<float>().data() + (index * most_rows_ + rows) * images.numbers();
  if (images.content == ImageContent::kPixels) {
    write_patches(picture, images, patches);
  } else {
    std::fill_n(patches, images.tokens() * images.numbers(), 0.0F);
  }
  std::int32_t* row_of_token = host_places_->as<std::int32_t>().data() + index * places_.width;
  std::int32_t* token_of_row = row_of_token + config_.tokens();
  for (std::int64_t i = 0; i < images.tokens(); ++i, ++rows) {
    row_of_token[token + i] = static_cast<std::int32_t>(rows);
    token_of_row[rows] = static_cast<std::int32_t>(token + i);
  }
}

// `place`: which of the step's sequences it is.
std::int64_t ImageFeed::draw_sequence(std::uint64_t n, std::size_t place, const Tokens& to) {
  const auto batch = static_cast<std::size_t>(config_.train.batch);
  const auto length = static_cast<std::size_t>(config_.train.length);
  const auto image = static_cast<std::size_t>(config_.images.tokens());
  const std::size_t most = length / (image + static_cast<std::size_t>(kShortestCaption));
  std::fill(to.ids.begin(), to.ids.end(), '\n');
  std::fill(to.labels.begin(), to.labels.end(), kNotCounted);
  std::int64_t counted = 0;
  std::size_t at = 0;
  for (std::size_t pair = 0; pair < most; ++pair) {
    const CaptionedPicture drawn = source_.draw(n * most + pair);
    const std::size_t caption = at + image;
    if (caption + drawn.caption.size() > length) break;
    place_image(drawn.picture, place / batch, static_cast<std::int64_t>(place % batch * length + at));
    std::fill_n(to.ids.begin() + static_cast<std::ptrdiff_t>(at), image, kImageToken);
    for (std::size_t i = 0; i < drawn.caption.size(); ++i) {
      const std::int32_t byte = static_cast<unsigned char>(drawn.caption[i]);
      to.ids[caption + i] = byte;
      to.labels[caption + i - 1] = byte;
    }
    counted += static_cast<std::int64_t>(drawn.caption.size());
    at = caption + drawn.caption.size();
  }
  return counted;
}

std::int64_t ImageFeed::draw(std::uint64_t first, const Tokens& to) {
  const auto length = static_cast<std::size_t>(config_.train.length);
  std::fill(rows_.begin(), rows_.end(), 0);
  const std::span<std::int32_t> places = host_places_->as<std::int32_t>();
  std::fill(places.begin(), places.end(), -1);
  std::int64_t counted = 0;
  for (std::size_t place = 0; (place + 1) * length <= to.ids.size(); ++place) {
    counted +=
        draw_sequence(first + place, place,
                      {to.ids.subspan(place * length, length), to.labels.subspan(place * length, length)});
  }
  const auto send = [&](const Tensor& device, const PinnedBuffer& host) {
    require(session_.device().copy(session_.compute(), Direction::kH2D, device.block->address, host.address(),
                                   device.bytes()));
  };
  send(patches_, *host_patches_);
  send(places_, *host_places_);
  return counted;
}

ImageBatch ImageFeed::micro_batch(std::uint32_t index) const {
  const std::int32_t* places = places_.as<const std::int32_t>() + index * places_.width;
  return {.rows = rows_[index],
          .patches = patches_.f32() + index * most_rows_ * patches_.width,
          .token_of_row = places + config_.tokens(),
          .row_of_token = places};
}

}  // namespace terrace::trainer
