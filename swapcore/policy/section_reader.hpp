// Typed reading of one section of a TOML document, with the position of everything that is wrong.
//
// Internal to the policy parser.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "swapcore/policy/policy.hpp"
#include "swapcore/policy/toml.hpp"
#include "swapcore/policy/value_words.hpp"

namespace terrace {

using Position = FilePosition;
[[nodiscard]] Position position_of(const toml::source_region& source);

// What is wrong with a document; the first in reading order is the one reported.
class Problems {
 public:
  // `text` says what, then what would do; `key` is dotted: "hbm.budget".
  void add(Position position, std::string_view key, std::string_view text);
  [[nodiscard]] bool empty() const { return problems_.empty(); }
  // Precondition: not empty.
  [[nodiscard]] Error first(std::string_view source) const;

 private:
  struct Problem {
    Position position;
    std::string text;
  };
  std::vector<Problem> problems_;
};

// A value, and where the file says it; no position where it doesn't.
template <typename T>
struct Read {
  T value{};
  std::optional<Position> position;
};

template <typename T>
struct Word {
  std::string_view name;
  T value;
};

class SectionReader {
 public:
  // `name`: as in KnownKey::section. Unknown keys are added to `problems` at once; `subsections` are keys
  // that the caller reads by itself.
  SectionReader(const toml::table& table, std::string_view name, Problems& problems,
                std::span<const std::string_view> subsections = {});

  [[nodiscard]] Read<Amount> amount(std::string_view key, Amount fallback, AutoAllowed auto_allowed) const;
  [[nodiscard]] Read<std::string> text(std::string_view key, std::string_view fallback) const;
  [[nodiscard]] Read<bool> flag(std::string_view key, bool fallback) const;
  struct Range {
    std::int64_t least, most;
  };
  [[nodiscard]] Read<std::int64_t> integer(std::string_view key, std::int64_t fallback, Range range) const;
  template <typename T>
  [[nodiscard]] Read<T> word(std::string_view key, T fallback, std::span<const Word<T>> words) const {
    std::vector<std::string_view> names;
    for (const Word<T>& word : words) names.push_back(word.name);
    const auto index = word_index(key, names);
    if (!index.position) return {fallback, {}};
    return {words[index.value].value, index.position};
  }

  // The value under a key, or null.
  [[nodiscard]] const toml::node* node(std::string_view key) const { return table_.get(key); }
  void problem(Position position, std::string_view key, std::string_view what) const;

 private:
  // The place in `names` of the string under `key`; no position where there is none or it is wrong.
  [[nodiscard]] Read<std::size_t> word_index(std::string_view key,
                                             std::span<const std::string_view> names) const;
  void wrong_type(std::string_view key, const toml::node& found, std::string_view would_do) const;
  [[nodiscard]] std::string dotted(std::string_view key) const;

  const toml::table& table_;
  std::string name_;
  Problems& problems_;
};

}  // namespace terrace
