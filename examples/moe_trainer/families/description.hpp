// A family's config.json, asked for one value at a time; whatever is wrong with it is one line.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace terrace::trainer {

class Description {
 public:
  Description(const nlohmann::json& json, std::string source) : json_(json), source_(std::move(source)) {}

  // The value of the first of these names that is there and not null: families have renamed some. Throws
  // Failure (kBadInput) where there is none, or one out of range.
  using Names = std::initializer_list<const char*>;
  [[nodiscard]] std::int64_t whole(Names names) const;
  [[nodiscard]] std::int64_t whole_or(Names names, std::int64_t otherwise) const;
  [[nodiscard]] double real(Names names) const;
  [[nodiscard]] double real_or(Names names, double otherwise) const;
  [[nodiscard]] std::vector<std::string> words_or(Names names, std::vector<std::string> otherwise) const;
  [[nodiscard]] bool flag_or(Names names, bool otherwise) const;
  // An object inside; an empty one where there is none.
  [[nodiscard]] Description inside(const char* name) const;
  [[nodiscard]] std::vector<std::int64_t> wholes(const char* name) const;

  struct Expected {
    const char* name;
    nlohmann::json value;  // also taken for granted where the name is absent or null
  };
  // Throws Failure where a value is another: the model would not be what the file says.
  void expect(std::initializer_list<Expected> values) const;
  [[noreturn]] void refuse(const std::string& name, const std::string& why) const;

 private:
  [[nodiscard]] const nlohmann::json* find(Names names) const;
  [[nodiscard]] const nlohmann::json& need(Names names) const;

  nlohmann::json json_;
  std::string source_;
};

}  // namespace terrace::trainer
