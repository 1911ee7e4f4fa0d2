// Words in policy values and errors: amounts, quoting what the user wrote, the nearest known word.
// Internal to the policy parser.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "swapcore/policy/policy.hpp"

namespace terrace {

// Whether "auto" has a meaning where an amount is read.
enum class AutoAllowed : std::uint8_t { kNo, kYes };

// As parse_amount(text), which allows "auto".
[[nodiscard]] Result<Amount> parse_amount(std::string_view text, AutoAllowed auto_allowed);

// The text with its control characters as \x1b: fit for one line of a terminal.
[[nodiscard]] std::string escaped(std::string_view text);

// The text in double quotes, fit for one line: control characters escaped, long text cut short with "...".
[[nodiscard]] std::string in_quotes(std::string_view text);

// The known word that takes the fewest insertions, deletions and replacements to reach; ties go to the first.
// Precondition: `known` is not empty.
[[nodiscard]] std::string_view nearest_word(std::string_view word, std::span<const std::string_view> known);

// "a, b or c".
[[nodiscard]] std::string listed(std::span<const std::string_view> words);

}  // namespace terrace
