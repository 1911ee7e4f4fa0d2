// Training text: files of UTF-8 bytes, and the order in which sequences are drawn from them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace terrace::trainer {

class Corpus {
 public:
  // Reads the files one after another. Throws Failure (kBadInput) naming the file and what to do: none given,
  // missing, empty, not UTF-8 (with the byte's offset).
  [[nodiscard]] static Corpus load(const std::vector<std::string>& paths);
  // Throws as load(); `source` names the text in the error.
  [[nodiscard]] static Corpus from_text(std::string text, const std::string& source);

  [[nodiscard]] std::string_view text() const { return text_; }
  // The same for the same bytes.
  [[nodiscard]] std::uint64_t fingerprint() const;

 private:
  std::string text_;
};

// Draws sequences at places that only seed and number decide: the n-th draw is the same in every run, and a
// resumed run goes on where it was told to.
class Sampler {
 public:
  struct Options {
    std::uint64_t seed = 0;
    std::int64_t length = 0;  // of a sequence; its labels are the same text one byte on
  };
  // Throws Failure (kBadInput) where the text is shorter than one sequence and its last label.
  Sampler(const Corpus& corpus, Options options);

  // Writes the n-th sequence and its labels, `length` of each.
  void draw(std::uint64_t n, std::span<std::int32_t> ids, std::span<std::int32_t> labels) const;

 private:
  const Corpus& corpus_;
  Options options_;
};

// The offset of the first byte that is not part of well-formed UTF-8 (RFC 3629), or text.size().
[[nodiscard]] std::size_t valid_utf8_prefix(std::string_view text);

}  // namespace terrace::trainer
