// Sequences of images and captions, on their way to the device.
//
// A sequence is [image][caption][image][caption] ... as many whole pairs as fit, then line feeds that count
// for nothing. A caption's bytes are predicted, the first one from the last token of its image; an image's
// tokens never are.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "examples/moe_trainer/images.hpp"
#include "examples/moe_trainer/memory.hpp"
#include "examples/moe_trainer/model/patch_embedder.hpp"

namespace terrace::trainer {

inline constexpr std::int32_t kImageToken = 0;  // the id in the place of a patch: no text has this byte
inline constexpr std::int32_t kNotCounted = -100;

class ImageFeed {
 public:
  // Reserves what a step's images need at most. Throws OutOfMemory. All three outlive the feed, and the
  // owner waits for the compute stream before it goes.
  ImageFeed(Session& session, Memory& memory, const Config& config, const ImageSource& source);

  struct Tokens {
    std::span<std::int32_t> ids, labels;  // (sequences, length) each
  };
  // A step's sequences, those from the `first` of all on: writes their ids and labels and sends their images.
  // Returns how many labels count. Precondition: the copies of the draw before are done.
  [[nodiscard]] std::int64_t draw(std::uint64_t first, const Tokens& to);
  // Of the last draw.
  [[nodiscard]] ImageBatch micro_batch(std::uint32_t index) const;

 private:
  [[nodiscard]] std::int64_t draw_sequence(std::uint64_t n, std::size_t place, const Tokens& to);
  void place_image(const Picture& picture, std::size_t micro_batch, std::int64_t token);

  Session& session_;
  const Config& config_;
  const ImageSource& source_;
  std::int64_t most_rows_;          // image tokens that a micro-batch can have
  std::vector<std::int64_t> rows_;  // that each micro-batch has
  Tensor patches_;                  // (micro-batches, most_rows, numbers of a patch)
  Tensor places_;                   // int32 (micro-batches, tokens + most_rows): see ImageBatch
  std::optional<PinnedBuffer> host_patches_, host_places_;
};

}  // namespace terrace::trainer
