#include "examples/moe_trainer/safetensors.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/fault.hpp"

namespace terrace::trainer {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

using Json = nlohmann::json;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr const char* kMetadataKey = "__metadata__";

struct TypeName {
  DType type;
  const char* name;
  std::uint64_t bytes;
};
constexpr TypeName kTypes[] = {{DType::kF32, "F32", 4}, {DType::kF64, "F64", 8}, {DType::kI32, "I32", 4},
                               {DType::kI64, "I64", 8}, {DType::kU8, "U8", 1},   {DType::kBf16, "BF16", 2}};

std::optional<DType> type_named(const std::string& name) {
  for (const TypeName& row : kTypes) {
    if (name == row.name) return row.type;
  }
  return std::nullopt;
}

// Elements of a shape; none where a dimension is negative or the product leaves 63 bits.
std::optional<std::int64_t> elements(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t n : shape) {
    if (n < 0 || __builtin_mul_overflow(count, n, &count)) return std::nullopt;
  }
  return count;
}

std::optional<std::vector<std::int64_t>> shape_in(const Json& json) {
  if (!json.is_array()) return std::nullopt;
  std::vector<std::int64_t> shape;
  for (const Json& n : json) {
    if (!n.is_number_unsigned()) return std::nullopt;
    const auto value = n.get<std::uint64_t>();
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
    shape.push_back(static_cast<std::int64_t>(value));
  }
  return shape;
}

struct Parsed {
  TensorInfo info;
  std::uint64_t begin = 0;
};
// A tensor's row of the header. On failure `wrong` says what is the matter with it.
std::optional<Parsed> tensor_in(const std::string& name, const Json& json, std::uint64_t data_bytes,
                                std::string* wrong) {
  const auto refuse = [&](const std::string& what) {
    *wrong = "tensor \"" + name + "\": " + what;
    return std::nullopt;
  };
  if (!json.is_object() || !json.contains("dtype") || !json.contains("shape") ||
      !json.contains("data_offsets")) {
    return refuse("needs dtype, shape and data_offsets");
  }
  const Json& type = json["dtype"];
  const std::optional<DType> known = type.is_string() ? type_named(type.get<std::string>()) : std::nullopt;
  if (!known) return refuse("dtype is " + type.dump() + "; F32, F64, I32, I64, U8 and BF16 are read");
  const auto shape = shape_in(json["shape"]);
  const auto count = shape ? elements(*shape) : std::nullopt;
  if (!count) return refuse("shape must be a list of dimensions whose product is a number of elements");
  const auto offsets = shape_in(json["data_offsets"]);
  if (!offsets || offsets->size() != 2) return refuse("data_offsets must be two positions");
  const auto begin = static_cast<std::uint64_t>((*offsets)[0]),
             end = static_cast<std::uint64_t>((*offsets)[1]);
  if (begin > end || end > data_bytes) {
    return refuse("its bytes end at " + std::to_string(end) + " of " + std::to_string(data_bytes) +
                  ": the file is truncated or its offsets are wrong");
  }
  const std::uint64_t each = size_of(*known).count();
  if ((end - begin) / each != static_cast<std::uint64_t>(*count) || (end - begin) % each != 0) {
    return refuse("shape and data_offsets do not agree");
  }
  return Parsed{.info = {.name = name, .type = *known, .shape = *shape}, .begin = begin};
}

std::string system_error() { return std::strerror(errno); }

// All of the range, through interruptions; false at an error (errno says which) or the file's end (errno 0).
bool read_fully(int fd, std::uint64_t at, std::span<std::byte> to) {
  while (!to.empty()) {
    const ssize_t got = ::pread(fd, to.data(), to.size(), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      if (got == 0) errno = 0;
      return false;
    }
    at += static_cast<std::uint64_t>(got);
    to = to.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

bool write_fully(int fd, std::span<const std::byte> from) {
  while (!from.empty()) {
    if (fault_point(FaultPoint::kFileWrite)) {
      errno = ENOSPC;
      return false;
    }
    const ssize_t put = ::write(fd, from.data(), from.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    from = from.subspan(static_cast<std::size_t>(put));
  }
  return true;
}

Error io_error(const std::string& text) { return {Errc::kIo, text, {}, Pool::kScratch}; }
Error bad_argument(const std::string& text) { return {Errc::kInvalidArgument, text, {}, Pool::kScratch}; }

// The new name is durable once its folder is.
void sync_folder_of(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const OwnedFd folder(::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.valid()) (void)::fsync(folder.get());
}

Result<std::string> header_text(const std::string& path, const Metadata& metadata,
                                const std::vector<TensorInfo>& tensors, std::uint64_t* data_bytes) {
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  std::uint64_t at = 0;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.name == kMetadataKey || header.contains(tensor.name)) {
      return bad_argument(path + ": two tensors are named \"" + tensor.name + "\"");
    }
    const std::uint64_t end = at + tensor.bytes().count();
    header[tensor.name] = {
        {"dtype", name_of(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
    at = end;
  }
  *data_bytes = at;
  // A file whose names are not UTF-8 could not be read back.
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    return bad_argument(path + ": tensor names and metadata must be UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the tensors start aligned
  if (text.size() > kMaxHeaderBytes) return bad_argument(path + ": the header would exceed 100 MB");
  return text;
}

}  // namespace

const char* name_of(DType type) { return kTypes[static_cast<std::size_t>(type)].name; }
Bytes size_of(DType type) { return Bytes(kTypes[static_cast<std::size_t>(type)].bytes); }

std::int64_t TensorInfo::count() const {
  const std::optional<std::int64_t> n = elements(shape);
  TERRACE_CHECK(n.has_value(), "a shape is a number of elements");
  return *n;
}
Bytes TensorInfo::bytes() const { return size_of(type) * static_cast<std::uint64_t>(count()); }

Error SafetensorsReader::wrong(const std::string& what) const {
  return bad_argument(path_ + ": not a whole safetensors file: " + what);
}

Result<SafetensorsReader> SafetensorsReader::open(const std::string& path) {
  SafetensorsReader reader;
  reader.path_ = path;
  reader.file_ = OwnedFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!reader.file_.valid()) {
    return Error{
        errno == ENOENT ? Errc::kNotFound : Errc::kIo, path + ": " + system_error(), {}, Pool::kScratch};
  }
  if (const Status loaded = reader.load_header(); !loaded.ok()) return loaded.error();
  return reader;
}

Status SafetensorsReader::load_header() {
  struct stat about {};
  if (::fstat(file_.get(), &about) != 0) return io_error(path_ + ": " + system_error());
  if (!S_ISREG(about.st_mode)) return wrong("not a regular file");
  const auto size = static_cast<std::uint64_t>(about.st_size);
  std::uint64_t length = 0;
  if (size < kLengthBytes)
    return wrong("it has " + std::to_string(size) + " bytes, fewer than a header's length");
  if (!read_fully(file_.get(), 0, std::as_writable_bytes(std::span(&length, 1)))) {
    return io_error(path_ + ": " + system_error());
  }
  if (length > kMaxHeaderBytes) return wrong("its header claims " + std::to_string(length) + " bytes");
  if (length > size - kLengthBytes) {
    return wrong("its header claims " + std::to_string(length) + " bytes, the file has " +
                 std::to_string(size));
  }
  std::string text(length, '\0');
  if (!read_fully(file_.get(), kLengthBytes, std::as_writable_bytes(std::span(text)))) {
    return io_error(path_ + ": " + system_error());
  }
  return adopt_header(text, size - kLengthBytes - length);
}

Status SafetensorsReader::adopt_header(const std::string& text, std::uint64_t data_bytes) {
  const Json header = Json::parse(text, nullptr, false);
  if (!header.is_object()) return wrong("its header is no JSON object");
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadataKey) {
      if (!value.is_object()) return wrong("__metadata__ is no object");
      for (const auto& [key, word] : value.items()) {
        if (!word.is_string()) return wrong("__metadata__ holds a value that is no text: " + key);
        metadata_[key] = word.get<std::string>();
      }
      continue;
    }
    std::string what;
    std::optional<Parsed> parsed = tensor_in(name, value, data_bytes, &what);
    if (!parsed) return wrong(what);
    entries_.push_back({std::move(parsed->info), parsed->begin + kLengthBytes + text.size()});
  }
  return check_layout(data_bytes);
}

// The bytes of the tensors follow one another without gap or overlap and end with the file.
Status SafetensorsReader::check_layout(std::uint64_t data_bytes) {
  const auto extent = [](const Entry& e) { return std::pair(e.begin, e.info.bytes()); };
  std::sort(entries_.begin(), entries_.end(),
            [&](const Entry& a, const Entry& b) { return extent(a) < extent(b); });
  std::uint64_t covered = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].begin != entries_.front().begin + covered) {
      return wrong("tensor \"" + entries_[i].info.name + "\" overlaps another or leaves a gap before it");
    }
    covered += entries_[i].info.bytes().count();
    index_.emplace(entries_[i].info.name, i);
  }
  if (covered != data_bytes) {
    return wrong("its tensors have " + std::to_string(covered) + " bytes, the file holds " +
                 std::to_string(data_bytes));
  }
  return {};
}

std::vector<TensorInfo> SafetensorsReader::tensors() const {
  std::vector<TensorInfo> all;
  for (const Entry& e : entries_) all.push_back(e.info);
  return all;
}

const SafetensorsReader::Entry* SafetensorsReader::entry(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

const TensorInfo* SafetensorsReader::find(std::string_view name) const {
  const Entry* e = entry(name);
  return e == nullptr ? nullptr : &e->info;
}

Status SafetensorsReader::read(const TensorInfo& tensor, Bytes offset, std::span<std::byte> to) const {
  const Entry* e = entry(tensor.name);
  TERRACE_CHECK(e != nullptr, "the tensor is one of this file");
  TERRACE_CHECK(offset + Bytes(to.size()) <= e->info.bytes(), "reads stay inside the tensor");
  if (read_fully(file_.get(), e->begin + offset.count(), to)) return {};
  if (errno == 0) return wrong("it was cut while it was read");
  return io_error(path_ + ": " + system_error());
}

template <typename T>
Result<std::vector<T>> SafetensorsReader::read_all(std::string_view name, DType type) const {
  const TensorInfo* info = find(name);
  if (info == nullptr) {
    return Error{
        Errc::kNotFound, path_ + ": has no tensor \"" + std::string(name) + "\"", {}, Pool::kScratch};
  }
  if (info->type != type) {
    return bad_argument(path_ + ": tensor \"" + std::string(name) + "\" is " + name_of(info->type) +
                        ", not " + name_of(type));
  }
  std::vector<T> values(static_cast<std::size_t>(info->count()));
  if (const Status got = read(*info, Bytes(), std::as_writable_bytes(std::span(values))); !got.ok()) {
    return got.error();
  }
  return values;
}
Result<std::vector<float>> SafetensorsReader::read_f32(std::string_view name) const {
  return read_all<float>(name, DType::kF32);
}
Result<std::vector<std::int32_t>> SafetensorsReader::read_i32(std::string_view name) const {
  return read_all<std::int32_t>(name, DType::kI32);
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path, const Metadata& metadata,
                                                    const std::vector<TensorInfo>& tensors) {
  SafetensorsWriter writer;
  writer.path_ = path;
  writer.partial_ = path + ".partial";
  const Result<std::string> header = header_text(path, metadata, tensors, &writer.missing_);
  if (!header.ok()) return header.error();
  writer.file_ = OwnedFd(::open(writer.partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!writer.file_.valid()) return writer.failed("could not be created");
  const std::uint64_t length = header.value().size();
  if (!write_fully(writer.file_.get(), std::as_bytes(std::span(&length, 1))) ||
      !write_fully(writer.file_.get(), std::as_bytes(std::span(header.value())))) {
    return writer.failed("could not be written");
  }
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_.valid()) (void)::unlink(partial_.c_str());
}

Error SafetensorsWriter::failed(const char* what) const {
  return io_error(partial_ + ": " + what + ": " + system_error() + "; " + path_ + " is as it was");
}

Status SafetensorsWriter::append(std::span<const std::byte> bytes) {
  TERRACE_CHECK(bytes.size() <= missing_, "no more bytes are appended than the header says");
  if (!write_fully(file_.get(), bytes)) return failed("could not be written");
  missing_ -= bytes.size();
  return {};
}

Status SafetensorsWriter::finish() {
  TERRACE_CHECK(file_.valid() && missing_ == 0, "finish() follows the last byte, once");
  if (::fsync(file_.get()) != 0) return failed("could not be synced");
  if (fault_point(FaultPoint::kFileRename)) {
    errno = EIO;
    return failed("could not be renamed");
  }
  if (::rename(partial_.c_str(), path_.c_str()) != 0) return failed("could not be renamed");
  file_.reset();
  sync_folder_of(path_);
  return {};
}

}  // namespace terrace::trainer
