// How the trainer fails: operating errors travel as values up to here, then as one exception that main()
// prints as one line. The exit code tells who has to act.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/result.hpp"

namespace terrace::trainer {

enum class ExitCode : int {
  kFinished = 0,
  kFailed = 1,       // the machine, the disk or the device
  kBadInput = 2,     // arguments, configuration, policy, data, checkpoint: the text says what to change
  kOutOfMemory = 3,  // a budget or the device: the text says what was missing
};

class Failure : public std::runtime_error {
 public:
  Failure(ExitCode exit_code, const std::string& text) : std::runtime_error(text), exit_code_(exit_code) {}
  [[nodiscard]] ExitCode exit_code() const { return exit_code_; }

 private:
  ExitCode exit_code_;
};

// No memory left within the budgets; carries the error as the session gave it.
class OutOfMemory : public Failure {
 public:
  explicit OutOfMemory(Error error) : Failure(ExitCode::kOutOfMemory, error.text), error_(std::move(error)) {}
  [[nodiscard]] const Error& error() const { return error_; }

 private:
  Error error_;
};

[[noreturn]] void bad_input(const std::string& text);
// Throws OutOfMemory, or a Failure whose exit code follows from the error's code.
[[noreturn]] void fail(Error error);

inline void require(const Status& status) {
  if (!status.ok()) fail(status.error());
}
template <typename T>
[[nodiscard]] T require(Result<T> result) {
  if (!result.ok()) fail(std::move(result).error());
  return std::move(result).value();
}

}  // namespace terrace::trainer
