// What every C function here does at its edge: lets no exception out, keeps the error in words, takes structs
// of older and newer callers.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "hooks/c_abi/terrace.h"
#include "runtime/result.hpp"

namespace terrace::c_abi {

static_assert(TERRACE_OUT_OF_BUDGET == static_cast<int>(Errc::kOutOfBudget) + 1);
static_assert(TERRACE_CANCELLED == static_cast<int>(Errc::kCancelled) + 1);

// What the last failed call of this thread said. A plain array: keeping an error must not be able to fail.
inline char* last_error() noexcept {
  thread_local constinit char text[1024] = "";
  return text;
}

inline terrace_result failed(terrace_result result, const char* text) noexcept {
  std::snprintf(last_error(), 1024, "%s", text);
  return result;
}
inline terrace_result failed(const Error& error) noexcept {
  return failed(static_cast<terrace_result>(static_cast<int>(error.code) + 1), error.text.c_str());
}
inline terrace_result result_of(const Status& status) noexcept {
  return status ? TERRACE_OK : failed(status.error());
}
inline terrace_result bad_argument(const char* text) noexcept {
  return failed(TERRACE_INVALID_ARGUMENT, text);
}

template <typename Work>
terrace_result guarded(Work work) noexcept {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return failed(TERRACE_OUT_OF_MEMORY, "the process has no more memory");
  } catch (const std::exception& exception) {
    return failed(TERRACE_INTERNAL, exception.what());
  } catch (...) {
    return failed(TERRACE_INTERNAL, "an unknown exception was stopped at the C boundary");
  }
}

inline const char* or_default(const char* text, const char* fallback) noexcept {
  return text == nullptr ? fallback : text;
}

// Copies what the caller's version of a struct covers. False: no version has that size.
template <typename T>
bool take_struct(const T* from, T* to) noexcept {
  const std::size_t size = from->struct_size;
  if (size < sizeof(std::size_t) || size > sizeof(T)) return false;
  std::memcpy(to, from, size);
  to->struct_size = sizeof(T);
  return true;
}

// Fills what the caller's version of a struct covers. False as above.
template <typename T>
bool give_struct(const T& from, T* to) noexcept {
  if (to == nullptr || to->struct_size < sizeof(std::size_t) || to->struct_size > sizeof(T)) return false;
  const std::size_t size = to->struct_size;
  std::memcpy(to, &from, size);
  to->struct_size = size;
  return true;
}

}  // namespace terrace::c_abi
