#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

void bad_input(const std::string& text) { throw Failure(ExitCode::kBadInput, text); }

void fail(Error error) {
  switch (error.code) {
    case Errc::kOutOfBudget:
    case Errc::kOutOfMemory:
      throw OutOfMemory(std::move(error));
    case Errc::kInvalidArgument:
      throw Failure(ExitCode::kBadInput, error.text);
    default:
      throw Failure(ExitCode::kFailed, error.text);
  }
}

}  // namespace terrace::trainer
