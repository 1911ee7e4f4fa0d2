#include "swapcore/policy/section_reader.hpp"

#include <algorithm>

#include "runtime/assert.hpp"
#include "swapcore/policy/known_keys.hpp"
#include "swapcore/policy/value_words.hpp"

namespace terrace {
namespace {

std::string_view kind_of(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table:
      return "a section";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::string:
      return "a string";
    case toml::node_type::integer:
      return "an integer";
    case toml::node_type::floating_point:
      return "a number";
    case toml::node_type::boolean:
      return "true or false";
    default:
      return "a date or time";
  }
}

constexpr std::string_view kAmountForms =
    "use a size like \"24GiB\" or a share up to \"100%\", in double quotes";

}  // namespace

Position position_of(const toml::source_region& source) {
  return {std::max<std::uint32_t>(source.begin.line, 1), std::max<std::uint32_t>(source.begin.column, 1)};
}

void Problems::add(Position position, std::string_view key, std::string_view text) {
  problems_.push_back({position, std::string(key) + ": " + std::string(text)});
}

Error Problems::first(std::string_view source) const {
  TERRACE_CHECK(!problems_.empty(), "there is a problem");
  const auto& found = *std::min_element(problems_.begin(), problems_.end(),
                                        [](const auto& a, const auto& b) { return a.position < b.position; });
  std::string text = std::string(source) + ":" + std::to_string(found.position.line) + ":" +
                     std::to_string(found.position.column) + ": " + found.text;
  std::replace(text.begin(), text.end(), '\n', ' ');
  text = escaped(text);  // a syntax error quotes what it found
  return Error{Errc::kInvalidArgument, std::move(text), {}, Pool::kScratch};
}

SectionReader::SectionReader(const toml::table& table, std::string_view name, Problems& problems,
                             std::span<const std::string_view> subsections)
    : table_(table), name_(name), problems_(problems) {
  std::vector<std::string_view> known(subsections.begin(), subsections.end());
  for (const KnownKey& entry : known_keys()) {
    if (entry.section == name) known.push_back(entry.key);
  }
  for (const auto& [key, value] : table) {
    if (std::find(known.begin(), known.end(), key.str()) != known.end()) continue;
    const std::string_view what = value.is_table() ? "unknown section" : "unknown key";
    // in_quotes() without its quotes: a key may hold any character.
    const std::string safe = in_quotes(key.str());
    problem(position_of(key.source()), safe.substr(1, safe.size() - 2),
            std::string(what) + "; the nearest known is " + in_quotes(nearest_word(key.str(), known)) +
                " (known here: " + listed(known) + ")");
  }
}

std::string SectionReader::dotted(std::string_view key) const {
  return name_.empty() ? std::string(key) : name_ + "." + std::string(key);
}

void SectionReader::problem(Position position, std::string_view key, std::string_view what) const {
  problems_.add(position, dotted(key), what);
}

void SectionReader::wrong_type(std::string_view key, const toml::node& found,
                               std::string_view would_do) const {
  problem(position_of(found.source()), key,
          "is " + std::string(kind_of(found)) + "; " + std::string(would_do));
}

Read<Amount> SectionReader::amount(std::string_view key, Amount fallback, AutoAllowed auto_allowed) const {
  const toml::node* found = node(key);
  if (found == nullptr) return {fallback, {}};
  const Position position = position_of(found->source());
  const auto* text = found->as_string();
  if (text == nullptr) {
    wrong_type(key, *found, kAmountForms);
    return {fallback, {}};
  }
  const auto parsed = parse_amount(text->get(), auto_allowed);
  if (!parsed) {
    problem(position, key, parsed.error().text);
    return {fallback, {}};
  }
  return {*parsed, position};
}

Read<std::string> SectionReader::text(std::string_view key, std::string_view fallback) const {
  const toml::node* found = node(key);
  if (found == nullptr) return {std::string(fallback), {}};
  if (const auto* text = found->as_string()) return {text->get(), position_of(found->source())};
  wrong_type(key, *found, "use a string in double quotes");
  return {std::string(fallback), {}};
}

Read<bool> SectionReader::flag(std::string_view key, bool fallback) const {
  const toml::node* found = node(key);
  if (found == nullptr) return {fallback, {}};
  if (const auto* flag = found->as_boolean()) return {flag->get(), position_of(found->source())};
  wrong_type(key, *found, "use true or false, without quotes");
  return {fallback, {}};
}

Read<std::int64_t> SectionReader::integer(std::string_view key, std::int64_t fallback, Range range) const {
  const toml::node* found = node(key);
  if (found == nullptr) return {fallback, {}};
  std::string would_do = "use an integer";
  if (range.least != INT64_MIN || range.most != INT64_MAX)
    would_do += " from " + std::to_string(range.least) + " to " + std::to_string(range.most);
  const auto* number = found->as_integer();
  if (number == nullptr) {
    wrong_type(key, *found, would_do);
    return {fallback, {}};
  }
  const std::int64_t value = number->get();
  if (value < range.least || value > range.most) {
    problem(position_of(found->source()), key, std::to_string(value) + " is out of range; " + would_do);
    return {fallback, {}};
  }
  return {value, position_of(found->source())};
}

Read<std::size_t> SectionReader::word_index(std::string_view key,
                                            std::span<const std::string_view> names) const {
  const toml::node* found = node(key);
  if (found == nullptr) return {};
  const auto* text = found->as_string();
  if (text == nullptr) {
    wrong_type(key, *found, "use one of " + listed(names) + ", in double quotes");
    return {};
  }
  const auto at = std::find(names.begin(), names.end(), std::string_view(text->get()));
  const Position position = position_of(found->source());
  if (at != names.end()) return {static_cast<std::size_t>(at - names.begin()), position};
  problem(position, key, in_quotes(text->get()) + " is not known here; use " + listed(names));
  return {};
}

}  // namespace terrace
