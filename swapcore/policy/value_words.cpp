#include "swapcore/policy/value_words.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/assert.hpp"

namespace terrace {
namespace {

constexpr std::size_t kQuotedMost = 60;

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string escaped(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += c;
    }
  }
  return out;
}

std::string in_quotes(std::string_view text) {
  std::size_t kept = std::min(text.size(), kQuotedMost);
  // Cut between characters: a byte 10xxxxxx continues one.
  while (kept > 0 && kept < text.size() && (static_cast<unsigned char>(text[kept]) & 0xC0) == 0x80) --kept;
  return '"' + escaped(text.substr(0, kept)) + (kept < text.size() ? "...\"" : "\"");
}

std::string_view nearest_word(std::string_view word, std::span<const std::string_view> known) {
  TERRACE_CHECK(!known.empty(), "there is a known word");
  const std::string_view compared = word.substr(0, kQuotedMost);  // bounds the work for absurd keys
  return *std::min_element(known.begin(), known.end(), [&](std::string_view a, std::string_view b) {
    return edit_distance(compared, a) < edit_distance(compared, b);
  });
}

std::string listed(std::span<const std::string_view> words) {
  std::string out;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) out += i + 1 == words.size() ? " or " : ", ";
    out += words[i];
  }
  return out;
}

}  // namespace terrace
