#include "examples/moe_trainer/data.hpp"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer {

namespace {

// The length of the UTF-8 sequence at the front of `text`, or 0 where it is malformed: overlong forms,
// surrogates and what lies beyond U+10FFFF are.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0 || text.size() < length) return 0;
  unsigned char least = 0x80;
  unsigned char most = 0xBF;
  if (lead == 0xE0) least = 0xA0;
  if (lead == 0xED) most = 0x9F;
  if (lead == 0xF0) least = 0x90;
  if (lead == 0xF4) most = 0x8F;
  if (byte(1) < least || byte(1) > most) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
  }
  return length;
}

void check_utf8(std::string_view text, const std::string& source) {
  const std::size_t valid = valid_utf8_prefix(text);
  if (valid == text.size()) return;
  bad_input(source + ": not UTF-8 text (byte " + std::to_string(valid) +
            "); give a text file, or convert it with iconv -t UTF-8");
}

std::string read_text(const std::string& path) {
  if (std::filesystem::is_directory(path)) {
    bad_input(path + ": a folder; name the text files in it");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) bad_input(path + ": cannot read the data: " + std::strerror(errno) + "; check the path");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) bad_input(path + ": cannot read the data: " + std::strerror(errno));
  if (text.empty()) bad_input(path + ": the file is empty; give one with text in it");
  check_utf8(text, path);
  return text;
}

}  // namespace

std::size_t valid_utf8_prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t length = sequence_length(text.substr(at));
    if (length == 0) break;
    at += length;
  }
  return at;
}

Corpus Corpus::load(const std::vector<std::string>& paths) {
  if (paths.empty()) bad_input("no training data; name one or more text files with --data");
  Corpus corpus;
  for (const std::string& path : paths) corpus.text_ += read_text(path);
  return corpus;
}

Corpus Corpus::from_text(std::string text, const std::string& source) {
  check_utf8(text, source);
  Corpus corpus;
  corpus.text_ = std::move(text);
  return corpus;
}

std::uint64_t Corpus::fingerprint() const { return hash_text(text_); }

Sampler::Sampler(const Corpus& corpus, Options options) : corpus_(corpus), options_(options) {
  const auto needed = static_cast<std::uint64_t>(options.length) + 1;
  if (corpus.text().size() >= needed) return;
  bad_input("the data holds " + std::to_string(corpus.text().size()) + " bytes, a sequence needs " +
            std::to_string(needed) + "; give more text with --data, or lower train.length");
}

void Sampler::draw(std::uint64_t n, std::span<std::int32_t> ids, std::span<std::int32_t> labels) const {
  const std::string_view text = corpus_.text();
  const auto length = static_cast<std::size_t>(options_.length);
  const CounterRandom random({.seed = options_.seed, .stream = "data"});
  const std::size_t at = random.bits(n) % (text.size() - length);
  for (std::size_t i = 0; i < length; ++i) {
    ids[i] = static_cast<unsigned char>(text[at + i]);
    labels[i] = static_cast<unsigned char>(text[at + i + 1]);
  }
}

}  // namespace terrace::trainer
