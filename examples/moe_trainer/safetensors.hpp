// Safetensors files: an 8-byte length, a JSON header, then the tensors' bytes, little-endian and dense.
//
// The reader trusts nothing: lengths, offsets and shapes are checked against the file's size when it is
// opened, and every error names the file and what is wrong with it. The writer writes beside (path +
// ".partial"), syncs and renames, so `path` holds either what it held before or the whole new file.
//
// Errors: kNotFound (no such file), kInvalidArgument (not a file of this format, truncated, a type not listed
// below, a name given twice), kIo (the disk).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"

namespace terrace::trainer {

enum class DType : std::uint8_t { kF32, kF64, kI32, kI64, kU8, kBf16 };
[[nodiscard]] const char* name_of(DType type);  // "F32", ...
[[nodiscard]] Bytes size_of(DType type);

struct TensorInfo {
  std::string name;
  DType type = DType::kF32;
  std::vector<std::int64_t> shape;  // every dimension at least 0; empty: one element
  [[nodiscard]] std::int64_t count() const;
  [[nodiscard]] Bytes bytes() const;
};

using Metadata = std::map<std::string, std::string>;

class SafetensorsReader {
 public:
  [[nodiscard]] static Result<SafetensorsReader> open(const std::string& path);

  [[nodiscard]] const Metadata& metadata() const { return metadata_; }
  [[nodiscard]] std::vector<TensorInfo> tensors() const;              // in the order of their bytes
  [[nodiscard]] const TensorInfo* find(std::string_view name) const;  // null: not in the file
  // Fills `to` with the tensor's bytes from `offset` on. Precondition: inside the tensor.
  [[nodiscard]] Status read(const TensorInfo& tensor, Bytes offset, std::span<std::byte> to) const;
  // The whole tensor. Errors: also kNotFound (no such tensor), kInvalidArgument (another type).
  [[nodiscard]] Result<std::vector<float>> read_f32(std::string_view name) const;
  [[nodiscard]] Result<std::vector<std::int32_t>> read_i32(std::string_view name) const;

 private:
  struct Entry {
    TensorInfo info;
    std::uint64_t begin;  // in the file
  };
  SafetensorsReader() = default;
  [[nodiscard]] Status load_header();
  [[nodiscard]] Status adopt_header(const std::string& text, std::uint64_t data_bytes);
  [[nodiscard]] Status check_layout(std::uint64_t data_bytes);
  [[nodiscard]] Error wrong(const std::string& what) const;
  [[nodiscard]] const Entry* entry(std::string_view name) const;
  template <typename T>
  [[nodiscard]] Result<std::vector<T>> read_all(std::string_view name, DType type) const;

  std::string path_;
  OwnedFd file_;
  Metadata metadata_;
  std::vector<Entry> entries_;                             // in the order of their bytes
  std::map<std::string, std::size_t, std::less<>> index_;  // name to entry
};

class SafetensorsWriter {
 public:
  // Writes the header; the bytes of the tensors follow in the order given.
  [[nodiscard]] static Result<SafetensorsWriter> create(const std::string& path, const Metadata& metadata,
                                                        const std::vector<TensorInfo>& tensors);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept = default;
  SafetensorsWriter& operator=(SafetensorsWriter&& other) = delete;
  ~SafetensorsWriter();  // unfinished: removes the partial file; `path` stays as it was

  // The next bytes, in pieces of any size.
  [[nodiscard]] Status append(std::span<const std::byte> bytes);
  // Precondition: all bytes were appended. Syncs and renames; nothing is left beside `path` either way.
  [[nodiscard]] Status finish();

 private:
  SafetensorsWriter() = default;
  [[nodiscard]] Error failed(const char* what) const;

  std::string path_, partial_;
  OwnedFd file_;  // valid until finished
  std::uint64_t missing_ = 0;
};

}  // namespace terrace::trainer
