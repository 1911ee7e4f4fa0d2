// Pictures with captions: made ones, folders of them, and the sequences they become.
#include <array>
#include <bit>
#include <map>
#include <set>
#include <sstream>

#include "examples/moe_trainer/images.hpp"
#include "tests/trainer/image_folder.hpp"
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

Config with_images(std::int64_t size) {
  Config config = small_config();
  config.images = {.patch = 8, .size = size};
  config.train.length = 80;
  return config;
}

// What can be seen of one colour.
struct Seen {
  std::int64_t left = 1 << 20, right = -1, top = 1 << 20, bottom = -1, pixels = 0;
};
std::map<std::string, Seen> look_at(const Picture& picture) {
  const std::map<std::array<int, 3>, std::string> names = {
      {{255, 0, 0}, "red"},      {{0, 255, 0}, "green"},    {{0, 0, 255}, "blue"},
      {{255, 255, 0}, "yellow"}, {{255, 0, 255}, "purple"}, {{255, 255, 255}, "white"}};
  std::map<std::string, Seen> seen;
  for (std::int64_t y = 0; y < picture.height; ++y) {
    for (std::int64_t x = 0; x < picture.width; ++x) {
      const std::uint8_t* rgb = picture.rgb.data() + (y * picture.width + x) * kColours;
      if (rgb[0] + rgb[1] + rgb[2] == 0) continue;
      Seen& one = seen[names.at({rgb[0], rgb[1], rgb[2]})];
      one = {std::min(one.left, x), std::max(one.right, x), std::min(one.top, y), std::max(one.bottom, y),
             one.pixels + 1};
    }
  }
  return seen;
}

TEST(MadeImages, AreAsTheirCaptionsSay) {
  const auto source = open_images("", with_images(32), 5);
  std::map<std::string, std::set<std::int64_t>> pixels;
  for (std::uint64_t n = 0; n < 200; ++n) {
    const CaptionedPicture made = source->draw(n);
    EXPECT_LE(made.caption.size(), source->longest_caption());
    std::istringstream words(made.caption);
    std::string article, size, colour, shape, at, the, row, column;
    words >> article >> size >> colour >> shape >> at >> the >> row >> column;
    ASSERT_TRUE(words) << made.caption;
    const auto seen = look_at(made.picture);
    ASSERT_EQ(seen.size(), 1U) << made.caption;
    const Seen& one = seen.at(colour);
    EXPECT_EQ(one.bottom - one.top + 1, size == "large" ? 12 : 6) << made.caption;
    EXPECT_TRUE(row == "top" ? one.bottom < 16 : row == "bottom" && one.top >= 16) << made.caption;
    EXPECT_TRUE(column == "left" ? one.right < 16 : column == "right" && one.left >= 16) << made.caption;
    pixels[size + shape].insert(one.pixels);
  }
  ASSERT_EQ(pixels.size(), 6U);
  for (const auto& [kind, counts] : pixels) EXPECT_EQ(counts.size(), 1U) << kind;
  EXPECT_GT(*pixels["largesquare"].begin(), *pixels["largecircle"].begin());
  EXPECT_GT(*pixels["largecircle"].begin(), *pixels["largetriangle"].begin());
}

TEST(MadeImages, AreTheSameForASeed) {
  const auto source = open_images("", with_images(32), 5);
  const auto again = open_images("", with_images(32), 5);
  const auto other = open_images("", with_images(32), 6);
  EXPECT_EQ(source->draw(7).picture.rgb, again->draw(7).picture.rgb);
  EXPECT_NE(source->draw(7).picture.rgb, other->draw(7).picture.rgb);
  EXPECT_NE(source->draw(7).picture.rgb, source->draw(8).picture.rgb);
}

TEST(FolderImages, AreReadInOrderOfNamesWithTheirCaptions) {
  const ImageFolder folder("images-read");
  folder.write("b.ppm", ImageFolder::noise(16, 2));
  folder.write("b.txt", "second \r\n\n");
  folder.write("a.ppm", ImageFolder::noise(16, 1));
  folder.write("a.txt", "first");
  folder.write("readme.txt", "of no picture");
  const auto source = open_images(folder.path(), with_images(16), 1);
  std::map<std::string, std::vector<std::uint8_t>> drawn;
  for (std::uint64_t n = 0; n < 32; ++n) {
    const CaptionedPicture pair = source->draw(n);
    drawn[pair.caption] = pair.picture.rgb;
  }
  ASSERT_EQ(drawn.size(), 2U);
  const std::string first = ImageFolder::noise(16, 1);
  const std::vector<std::uint8_t>& pixels = drawn.at("first\n");
  EXPECT_TRUE(std::equal(pixels.begin(), pixels.end(), first.end() - 768,
                         [](std::uint8_t a, char b) { return a == static_cast<std::uint8_t>(b); }));
  EXPECT_EQ(drawn.count("second\n"), 1U);
  EXPECT_EQ(source->longest_caption(), 7U);
  const std::uint64_t before = source->fingerprint();
  folder.write("b.txt", "changed");
  EXPECT_NE(open_images(folder.path(), with_images(16), 1)->fingerprint(), before);
}

// What is said about a folder with one picture and its caption.
std::string refused(const std::string& picture, const std::string& caption) {
  const ImageFolder folder("images-refused");
  if (!picture.empty()) folder.write("one.ppm", picture);
  if (caption != "none") folder.write("one.txt", caption);
  return failure_of([&] { (void)open_images(folder.path(), with_images(16), 1); });
}
void expect_says(const std::string& error, const std::string& text) {
  EXPECT_NE(error.find(text), std::string::npos) << error;
}

TEST(FolderImages, SaysWhatIsWrong) {
  const std::string good = ImageFolder::noise(16, 1);
  expect_says(failure_of([] { (void)open_images("no/such", with_images(16), 1); }), "no/such: cannot read");
  expect_says(refused("", "a"), "holds no image");
  expect_says(refused(good, "none"), "one.ppm: has no caption");
  expect_says(refused(good, " \n"), "one.txt: the caption is empty");
  expect_says(refused(good, "a\xFF"), "one.txt: not UTF-8 text (byte 1)");
  expect_says(refused(good, std::string(76, 'a')),
              "one.ppm: a caption of 77 bytes and its image are 81 tokens");
  expect_says(refused(ImageFolder::noise(24, 1), "a"), "is 24x24 pixels, images.size asks for 16x16");
  expect_says(refused("\x89PNG", "a"), "one.ppm: not a binary PPM");
  expect_says(refused("P6", "a"), "its header is not that of a PPM");
  expect_says(refused("P6 #", "a"), "its header is not that of a PPM");
  expect_says(refused("P6 1 1 255", "a"), "its header is not that of a PPM");
  expect_says(refused("P6 0 1 255\n", "a"), "without pixels");
  expect_says(refused("P6 99999999999999999999 1 255\n", "a"), "above 32768");
  expect_says(refused("P6 1 1 1023\nabcdef", "a"), "colours from 0 to 1023");
  expect_says(refused(good.substr(0, good.size() - 1), "a"), "767 bytes of pixels, 16x16 are 768");
  expect_says(refused(good + "x", "a"), "769 bytes of pixels");
}

TEST(MadeImages, SayWhatTheyNeed) {
  const auto error = [](const Config& config) {
    return failure_of([&] { (void)open_images("", config, 1); });
  };
  expect_says(error(with_images(8)), "need 16 pixels or more");
  Config config = with_images(32);
  config.train.length = 59;
  expect_says(error(config), "60 tokens, a sequence has 59; raise train.length");
}

TEST(ImagesConfig, IsChecked) {
  const auto error = [](const std::string& toml) {
    return failure_of([&] { (void)parse_config(toml, "m"); });
  };
  EXPECT_EQ(error("[images]\nsize = 32\n"), "m:1:1: images.patch: say how many pixels a patch's side has");
  EXPECT_EQ(error("[images]\npatch = 5\n"), "m:2:9: images.patch: must divide images.size, 32, evenly");
  expect_says(error("[images]\npatch = 4\nsize = 32\n"), "m:3:8: images.size: an image is 64 tokens");
  const Config config = parse_config("[images]\npatch = 8\ncontent = \"blank\"\n", "m");
  EXPECT_EQ(config.images.tokens(), 16);
  EXPECT_NE(canonical_text(config).find("images.content = blank"), std::string::npos);
  EXPECT_EQ(canonical_text(Config{}).find("images"), std::string::npos) << "older checkpoints have none";
}

// Two pairs of seven tokens and six that are left over, in each of two sequences of two micro-batches.
TEST(ImageFeed, LaysOutSequencesAndPatches) {
  const ImageFolder folder("images-feed");
  folder.write("one.ppm", ImageFolder::noise(16, 1));
  folder.write("one.txt", "ab");
  Config config = with_images(16);
  config.train.length = 20;
  const auto source = open_images(folder.path(), config, 1);
  Rig rig({});
  ImageFeed feed(rig.session(), rig.trainer().memory(), config, *source);
  std::vector<std::int32_t> ids(80);
  std::vector<std::int32_t> labels(80);
  EXPECT_EQ(feed.draw(3, {.ids = ids, .labels = labels}), 4 * 2 * 3);
  constexpr std::int32_t kNo = kNotCounted;
  const std::vector<std::int32_t> want_ids = {0, 0,   0,   0,    'a',  'b',  '\n', 0,    0,    0,
                                              0, 'a', 'b', '\n', '\n', '\n', '\n', '\n', '\n', '\n'};
  const std::vector<std::int32_t> want_labels = {kNo, kNo, kNo,  'a', 'b', '\n', kNo, kNo, kNo, kNo,
                                                 'a', 'b', '\n', kNo, kNo, kNo,  kNo, kNo, kNo, kNo};
  for (int sequence = 0; sequence < 4; ++sequence) {
    EXPECT_TRUE(std::equal(want_ids.begin(), want_ids.end(), ids.begin() + 20 * sequence)) << sequence;
    EXPECT_TRUE(std::equal(want_labels.begin(), want_labels.end(), labels.begin() + 20 * sequence));
  }
  const std::string ppm = ImageFolder::noise(16, 1);
  const auto colour = [&](std::int64_t y, std::int64_t x, std::int64_t c) {
    const auto byte =
        static_cast<std::uint8_t>(ppm[ppm.size() - 768 + static_cast<std::size_t>((y * 16 + x) * 3 + c)]);
    return static_cast<float>(byte) / 127.5F - 1.0F;
  };
  for (std::uint32_t index = 0; index < 2; ++index) {
    const ImageBatch batch = feed.micro_batch(index);
    ASSERT_EQ(batch.rows, 16);
    const auto rows = rig.read(reinterpret_cast<const float*>(batch.row_of_token), 40);
    const auto tokens = rig.read(reinterpret_cast<const float*>(batch.token_of_row), 16);
    for (std::int32_t r = 0; r < 16; ++r) {
      const std::int32_t token = r / 8 * 20 + r % 8 / 4 * 7 + r % 4;
      EXPECT_EQ(std::bit_cast<std::int32_t>(tokens[static_cast<std::size_t>(r)]), token);
      EXPECT_EQ(std::bit_cast<std::int32_t>(rows[static_cast<std::size_t>(token)]), r);
    }
    EXPECT_EQ(std::count_if(rows.begin(), rows.end(),
                            [](float bits) { return std::bit_cast<std::int32_t>(bits) == -1; }),
              24);
    const auto patches = rig.read(batch.patches, 16 * 192);
    for (std::int64_t i = 0; i < 16 * 192; ++i) {
      const std::int64_t patch = i / 192 % 4, y = patch / 2 * 8 + i % 192 / 24,
                         x = patch % 2 * 8 + i % 24 / 3;
      ASSERT_EQ(patches[static_cast<std::size_t>(i)], colour(y, x, i % 3)) << i;
    }
  }
}

}  // namespace
}  // namespace terrace::trainer::test
