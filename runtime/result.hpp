// Operating errors are values. Result<T> holds a T or an Error; Status is a Result without a value.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "runtime/assert.hpp"
#include "runtime/units.hpp"

namespace terrace {

enum class Errc : std::uint8_t {
  kOutOfBudget,      // a budget of ours would be exceeded; bytes and pool say by what. Nothing changed
  kOutOfMemory,      // the device or the operating system has no more
  kInvalidArgument,  // the caller's input; the text says what, where and what would do
  kNotSupported,     // this device lacks the capability
  kNotFound,
  kDeviceLost,  // no later call on this device will succeed
  kIo,
  kProtocol,  // the other side broke the wire protocol
  kTimeout,
  kCancelled,
};
[[nodiscard]] const char* name_of(Errc code);

struct Error {
  Errc code = Errc::kInvalidArgument;
  std::string text;            // one line, for a person: what, where, what would do
  Bytes bytes{};               // kOutOfBudget, kOutOfMemory: how many bytes were asked for
  Pool pool = Pool::kScratch;  // kOutOfBudget: for whom
};

[[nodiscard]] inline Error out_of_budget(Bytes bytes, Pool pool, std::string text) {
  return Error{Errc::kOutOfBudget, std::move(text), bytes, pool};
}

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: values convert
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: errors convert

  [[nodiscard]] bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  [[nodiscard]] T& value() & {
    TERRACE_CHECK(ok(), "Result holds an error");
    return std::get<0>(state_);
  }
  [[nodiscard]] const T& value() const& {
    TERRACE_CHECK(ok(), "Result holds an error");
    return std::get<0>(state_);
  }
  [[nodiscard]] T&& value() && {
    TERRACE_CHECK(ok(), "Result holds an error");
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  [[nodiscard]] const Error& error() const& {
    TERRACE_CHECK(!ok(), "Result holds a value");
    return std::get<1>(state_);
  }
  [[nodiscard]] Error&& error() && {
    TERRACE_CHECK(!ok(), "Result holds a value");
    return std::get<1>(std::move(state_));
  }

 private:
  std::variant<T, Error> state_;
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}  // NOLINT: errors convert
  [[nodiscard]] bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  [[nodiscard]] const Error& error() const {
    TERRACE_CHECK(!ok(), "Status is ok");
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

}  // namespace terrace
