#include "examples/moe_trainer/families/description.hpp"

#include <limits>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {
const nlohmann::json kNothing = nlohmann::json::object();
}

const nlohmann::json* Description::find(Names names) const {
  for (const char* name : names) {
    const auto found = json_.find(name);
    if (found != json_.end() && !found->is_null()) return &*found;
  }
  return nullptr;
}

const nlohmann::json& Description::need(Names names) const {
  const nlohmann::json* value = find(names);
  if (value == nullptr) refuse(*names.begin(), "is missing");
  return *value;
}

void Description::refuse(const std::string& name, const std::string& why) const {
  bad_input(source_ + ": " + name + " " + why);
}

std::int64_t Description::whole(Names names) const {
  const nlohmann::json& value = need(names);
  if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
    refuse(*names.begin(), "must be a whole number, not " + value.dump());
  }
  return value.get<std::int64_t>();
}
std::int64_t Description::whole_or(Names names, std::int64_t otherwise) const {
  return find(names) == nullptr ? otherwise : whole(names);
}

double Description::real(Names names) const {
  const nlohmann::json& value = need(names);
  if (!value.is_number()) refuse(*names.begin(), "must be a number, not " + value.dump());
  return value.get<double>();
}
double Description::real_or(Names names, double otherwise) const {
  return find(names) == nullptr ? otherwise : real(names);
}

std::vector<std::string> Description::words_or(Names names, std::vector<std::string> otherwise) const {
  const nlohmann::json* value = find(names);
  if (value == nullptr) return otherwise;
  std::vector<std::string> words;
  if (!value->is_array()) refuse(*names.begin(), "must be a list of words");
  for (const nlohmann::json& word : *value) {
    if (!word.is_string()) refuse(*names.begin(), "must be a list of words");
    words.push_back(word.get<std::string>());
  }
  return words;
}

bool Description::flag_or(Names names, bool otherwise) const {
  const nlohmann::json* value = find(names);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) refuse(*names.begin(), "must be true or false, not " + value->dump());
  return value->get<bool>();
}

Description Description::inside(const char* name) const {
  const nlohmann::json* value = find({name});
  return {value != nullptr && value->is_object() ? *value : kNothing, source_ + ": " + name};
}

std::vector<std::int64_t> Description::wholes(const char* name) const {
  const nlohmann::json& value = need({name});
  std::vector<std::int64_t> all;
  if (!value.is_array()) refuse(name, "must be a list of whole numbers");
  for (const nlohmann::json& number : value) {
    if (!number.is_number_integer()) refuse(name, "must be a list of whole numbers");
    all.push_back(number.get<std::int64_t>());
  }
  return all;
}

void Description::expect(std::initializer_list<Expected> values) const {
  for (const Expected& expected : values) {
    const nlohmann::json* value = find({expected.name});
    if (value == nullptr || *value == expected.value) continue;
    if (expected.value.is_null()) refuse(expected.name, "is given; this trainer does without it only");
    refuse(expected.name, "is " + value->dump() + "; this trainer does " + expected.value.dump() + " only");
  }
}

}  // namespace terrace::trainer
