#include "examples/moe_trainer/data.hpp"

#include <filesystem>
#include <fstream>

#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

std::string file_with(const std::string& name, const std::string& text) {
  const std::string path = ::testing::TempDir() + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(Corpus, JoinsFilesInOrder) {
  const Corpus corpus = Corpus::load({file_with("one.txt", "ab"), file_with("two.txt", "cd")});
  EXPECT_EQ(corpus.text(), "abcd");
  EXPECT_EQ(corpus.fingerprint(), Corpus::from_text("abcd", "x").fingerprint());
  EXPECT_NE(corpus.fingerprint(), Corpus::from_text("abce", "x").fingerprint());
}

TEST(Corpus, SaysWhatIsWrongWithAFile) {
  EXPECT_NE(failure_of([] { (void)Corpus::load({}); }).find("--data"), std::string::npos);
  EXPECT_NE(failure_of([] { (void)Corpus::load({"no/such/file"}); }).find("no/such/file: cannot read"),
            std::string::npos);
  EXPECT_NE(failure_of([] { (void)Corpus::load({::testing::TempDir()}); }).find("a folder"),
            std::string::npos);
  const std::string empty = file_with("empty.txt", "");
  EXPECT_NE(failure_of([&] { (void)Corpus::load({empty}); }).find("empty.txt: the file is empty"),
            std::string::npos);
  const std::string binary = file_with("binary.dat", "text\xff\x00more");
  EXPECT_NE(failure_of([&] { (void)Corpus::load({binary}); }).find("binary.dat: not UTF-8 text (byte 4)"),
            std::string::npos);
}

TEST(Corpus, KnowsWellFormedUtf8) {
  for (const char* good : {"", "plain", "\u00e9\u20ac", "\U0001F600", "\uD7FF\uE000", "\U0010FFFF"}) {
    EXPECT_EQ(valid_utf8_prefix(good), std::string_view(good).size()) << good;
  }
  // Overlong, surrogate, beyond the last code point, stray continuation, cut short.
  for (const char* bad :
       {"\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\x80", "\xE2\x82", "\xF0\x9F\x98"}) {
    EXPECT_EQ(valid_utf8_prefix(bad), 0U) << bad;
  }
}

TEST(Sampler, DrawsTheSameSequencesForASeed) {
  const Corpus corpus = Corpus::from_text(sample_text(1000), "sample");
  const auto draw = [&](std::uint64_t seed, std::uint64_t n) {
    std::vector<std::int32_t> ids(16), labels(16);
    Sampler(corpus, {.seed = seed, .length = 16}).draw(n, ids, labels);
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) EXPECT_EQ(labels[i], ids[i + 1]);
    return ids;
  };
  EXPECT_EQ(draw(1, 5), draw(1, 5));
  EXPECT_NE(draw(1, 5), draw(1, 6));
  EXPECT_NE(draw(1, 5), draw(2, 5));
}

TEST(Sampler, TakesTextOfExactlyOneSequence) {
  const Corpus corpus = Corpus::from_text("abcde", "sample");
  std::vector<std::int32_t> ids(4), labels(4);
  Sampler(corpus, {.seed = 3, .length = 4}).draw(99, ids, labels);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(labels, (std::vector<std::int32_t>{'b', 'c', 'd', 'e'}));
  EXPECT_NE(failure_of([&] { (void)Sampler(corpus, {.seed = 3, .length = 5}); }).find("a sequence needs 6"),
            std::string::npos);
}

}  // namespace
}  // namespace terrace::trainer::test
