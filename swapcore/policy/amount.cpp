// Sizes and shares as people write them.
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "swapcore/policy/policy.hpp"
#include "swapcore/policy/value_words.hpp"

namespace terrace {
namespace {

struct Unit {
  std::string_view name;
  int shift;
};
constexpr std::array<Unit, 5> kUnits = {{{"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}};
constexpr double kLargest = 9.2e18;  // below 2^63: sums of two limits stay in range
constexpr std::string_view kSizeForms = "use a size like \"24GiB\" (units B, KiB, MiB, GiB, TiB)";

Error bad(std::string_view text, std::string_view what, std::string_view would_do) {
  return Error{Errc::kInvalidArgument,
               in_quotes(text) + " " + std::string(what) + "; " + std::string(would_do),
               {},
               Pool::kScratch};
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// A number and what follows it. from_chars alone would take "inf", "1e9" and "0x10".
struct Split {
  std::string_view number, rest;
};
Split split_number(std::string_view text) {
  std::size_t end = 0;
  int dots = 0;
  while (end < text.size() && (is_digit(text[end]) || (text[end] == '.' && dots++ == 0))) ++end;
  return {text.substr(0, end), trimmed(text.substr(end))};
}

bool well_formed(std::string_view number) {
  return !number.empty() && is_digit(number.front()) && is_digit(number.back());
}

double to_double(std::string_view number) {
  double value = 0;
  const auto parsed = std::from_chars(number.data(), number.data() + number.size(), value);
  return parsed.ec == std::errc() ? value : HUGE_VAL;
}

Result<Bytes> bytes_of(std::string_view text, const Split& split, std::string_view forms) {
  if (split.rest.empty()) {
    if (to_double(split.number) == 0) return Bytes(0);
    return bad(text, "has no unit", forms);
  }
  for (const Unit& unit : kUnits) {
    if (split.rest != unit.name) continue;
    const double exact = std::ldexp(to_double(split.number), unit.shift);
    if (!(exact < kLargest)) return bad(text, "is more than any machine holds", forms);
    std::uint64_t whole = 0;
    const char* last = split.number.data() + split.number.size();
    const auto parsed = std::from_chars(split.number.data(), last, whole);
    // Whole numbers stay exact above 2^53; fractions round to the nearest byte.
    if (parsed.ptr == last) return Bytes(whole << unit.shift);
    return Bytes(static_cast<std::uint64_t>(std::llround(exact)));
  }
  return bad(text, "has the unknown unit " + in_quotes(split.rest), forms);
}

}  // namespace

Bytes Amount::resolve(Bytes whole, Bytes automatic) const {
  switch (form) {
    case Form::kAuto:
      return automatic;
    case Form::kBytes:
      return bytes;
    case Form::kShare:
      break;
  }
  if (share >= 1) return whole;  // not by way of a double, which holds only 53 bits
  return Bytes(static_cast<std::uint64_t>(share * static_cast<double>(whole.count())));
}

Result<Bytes> parse_bytes(std::string_view text) {
  const std::string_view body = trimmed(text);
  if (body.empty()) return bad(text, "is empty", kSizeForms);
  if (body.front() == '-') return bad(text, "is negative", kSizeForms);
  const Split split = split_number(body);
  if (!well_formed(split.number)) return bad(text, "is not a size", kSizeForms);
  if (split.rest == "%") return bad(text, "is a share, and here only bytes will do", kSizeForms);
  return bytes_of(text, split, kSizeForms);
}

Result<Amount> parse_amount(std::string_view text) { return parse_amount(text, AutoAllowed::kYes); }

Result<Amount> parse_amount(std::string_view text, AutoAllowed auto_allowed) {
  const bool has_auto = auto_allowed == AutoAllowed::kYes;
  const std::string forms = std::string(kSizeForms) + (has_auto ? ", a share up to \"100%\", or \"auto\""
                                                                : " or a share up to \"100%\"");
  const std::string_view body = trimmed(text);
  if (body == "auto") return has_auto ? Result<Amount>(Amount{}) : bad(text, "has no meaning here", forms);
  if (body.empty()) return bad(text, "is empty", forms);
  if (body.front() == '-') return bad(text, "is negative", forms);
  const Split split = split_number(body);
  if (!well_formed(split.number)) return bad(text, "is not a size", forms);
  if (split.rest == "%") {
    const double percent = to_double(split.number);
    if (percent > 100) return bad(text, "is more than the whole", forms);
    return Amount::of_share(percent / 100);
  }
  const auto bytes = bytes_of(text, split, forms);
  if (!bytes) return bytes.error();
  return Amount::of(*bytes);
}

}  // namespace terrace
