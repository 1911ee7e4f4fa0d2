#include "examples/moe_trainer/images.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>
#include <vector>

#include "examples/moe_trainer/data.hpp"
#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/made_images.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer {

namespace {

namespace fs = std::filesystem;

std::string read_caption(const fs::path& picture) {
  const std::string path = fs::path(picture).replace_extension(".txt").string();
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) {
    bad_input(picture.string() + ": has no caption: " + path + ": " + std::strerror(errno) +
              "; write one there");
  }
  const std::size_t end = text.find_last_not_of(" \t\r\n");
  if (end == std::string::npos) bad_input(path + ": the caption is empty; write one");
  text.resize(end + 1);
  const std::size_t valid = valid_utf8_prefix(text);
  if (valid != text.size()) {
    bad_input(path + ": not UTF-8 text (byte " + std::to_string(valid) + "); convert it with iconv -t UTF-8");
  }
  return text + "\n";
}

class FolderImages : public ImageSource {
 public:
  FolderImages(std::vector<CaptionedPicture> all, std::uint64_t seed)
      : all_(std::move(all)), random_({.seed = seed, .stream = "images"}) {}

  [[nodiscard]] CaptionedPicture draw(std::uint64_t n) const override {
    return all_[random_.bits(n) % all_.size()];
  }
  [[nodiscard]] std::uint64_t fingerprint() const override {
    std::uint64_t hash = hash_text("images of a folder");
    for (const CaptionedPicture& each : all_) {
      const auto* pixels = reinterpret_cast<const char*>(each.picture.rgb.data());
      hash = hash_text({pixels, each.picture.rgb.size()}, hash_text(each.caption, hash));
    }
    return hash;
  }
  [[nodiscard]] std::size_t longest_caption() const override {
    return std::max_element(all_.begin(), all_.end(),
                            [](const CaptionedPicture& a, const CaptionedPicture& b) {
                              return a.caption.size() < b.caption.size();
                            })
        ->caption.size();
  }

 private:
  std::vector<CaptionedPicture> all_;
  CounterRandom random_;
};

std::vector<fs::path> pictures_in(const std::string& folder) {
  std::vector<fs::path> paths;
  std::error_code wrong;
  for (fs::directory_iterator at(folder, wrong), end; !wrong && at != end; at.increment(wrong)) {
    if (at->path().extension() == ".ppm") paths.push_back(at->path());
  }
  if (wrong) bad_input(folder + ": cannot read the folder of images: " + wrong.message());
  if (paths.empty()) {
    bad_input(folder + ": holds no image; put pictures there as NAME.ppm and their captions as NAME.txt");
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

CaptionedPicture read_pair(const fs::path& path, std::int64_t size) {
  CaptionedPicture pair{read_ppm(path.string()), read_caption(path)};
  if (pair.picture.width != size || pair.picture.height != size) {
    const std::string wanted = std::to_string(size);
    bad_input(path.string() + ": is " + std::to_string(pair.picture.width) + "x" +
              std::to_string(pair.picture.height) + " pixels, images.size asks for " + wanted + "x" + wanted +
              "; scale it, or change images.size");
  }
  return pair;
}

// Which caption it was that a sequence could not hold is known to a folder alone.
std::string needs_more_room(const Config& config, std::size_t caption) {
  return "a caption of " + std::to_string(caption) + " bytes and its image are " +
         std::to_string(static_cast<std::int64_t>(caption) + config.images.tokens()) +
         " tokens, a sequence has " + std::to_string(config.train.length) + "; raise train.length";
}
bool fits(const Config& config, std::size_t caption) {
  return static_cast<std::int64_t>(caption) <= config.train.length - config.images.tokens();
}

}  // namespace

std::unique_ptr<ImageSource> open_images(const std::string& folder, const Config& config,
                                         std::uint64_t seed) {
  if (folder.empty()) {
    auto made = make_images(config, seed);
    if (!fits(config, made->longest_caption())) {
      bad_input("made images: " + needs_more_room(config, made->longest_caption()));
    }
    return made;
  }
  std::vector<CaptionedPicture> all;
  for (const fs::path& path : pictures_in(folder)) {
    all.push_back(read_pair(path, config.images.size));
    if (!fits(config, all.back().caption.size())) {
      bad_input(path.string() + ": " + needs_more_room(config, all.back().caption.size()));
    }
  }
  return std::make_unique<FolderImages>(std::move(all), seed);
}

}  // namespace terrace::trainer
