#include "examples/moe_trainer/safetensors.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "runtime/fault.hpp"

namespace terrace::trainer {
namespace {

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "safetensors-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string path() const { return (folder_ / "file.safetensors").string(); }
  void put(const std::string& bytes) { std::ofstream(path(), std::ios::binary) << bytes; }
  [[nodiscard]] std::string get() const {
    std::ifstream in(path(), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  [[nodiscard]] std::size_t files() const {
    std::size_t n = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++n;
    return n;
  }
  static std::string with_length(const std::string& header, const std::string& data) {
    const std::uint64_t length = header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return bytes + header + data;
  }
  void expect_refused(const std::string& bytes, const std::string& because) {
    put(bytes);
    const auto opened = SafetensorsReader::open(path());
    ASSERT_FALSE(opened.ok()) << because;
    EXPECT_EQ(opened.error().code, Errc::kInvalidArgument);
    EXPECT_NE(opened.error().text.find(path()), std::string::npos) << opened.error().text;
    EXPECT_NE(opened.error().text.find(because), std::string::npos) << opened.error().text;
    EXPECT_EQ(opened.error().text.find('\n'), std::string::npos);
  }
  // Two tensors, one of no elements, and metadata.
  [[nodiscard]] Status write(float first) {
    const std::vector<float> a{first, 2, 3, 4, 5, 6};
    const std::vector<std::int32_t> b{7, -8};
    auto writer = SafetensorsWriter::create(path(), {{"step", "17"}, {"note", "\"quoted\" \xc3\xa9"}},
                                            {{"a", DType::kF32, {2, 3}},
                                             {"none", DType::kU8, {0, 5}},
                                             {"b", DType::kI32, {2}},
                                             {"scalar", DType::kF64, {}}});
    if (!writer.ok()) return writer.error();
    const double scalar = 0.25;
    if (auto s = writer->append(std::as_bytes(std::span(a).first(1))); !s.ok()) return s;
    if (auto s = writer->append(std::as_bytes(std::span(a).subspan(1))); !s.ok()) return s;
    if (auto s = writer->append(std::as_bytes(std::span(b))); !s.ok()) return s;
    if (auto s = writer->append(std::as_bytes(std::span(&scalar, 1))); !s.ok()) return s;
    return writer->finish();
  }
  std::filesystem::path folder_;
};

TEST_F(Safetensors, WhatIsWrittenIsRead) {
  const Status written = write(1);
  ASSERT_TRUE(written.ok()) << written.error().text;
  EXPECT_EQ(files(), 1U);
  const auto reader = SafetensorsReader::open(path());
  ASSERT_TRUE(reader.ok()) << reader.error().text;
  EXPECT_EQ(reader->metadata(), (Metadata{{"note", "\"quoted\" \xc3\xa9"}, {"step", "17"}}));
  EXPECT_EQ(reader->tensors().size(), 4U);
  EXPECT_EQ(reader->find("a")->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(reader->read_f32("a").value(), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(reader->read_i32("b").value(), (std::vector<std::int32_t>{7, -8}));
  EXPECT_EQ(reader->find("none")->count(), 0);
  EXPECT_EQ(reader->find("absent"), nullptr);
  EXPECT_EQ(reader->read_f32("absent").error().code, Errc::kNotFound);
  EXPECT_EQ(reader->read_f32("b").error().code, Errc::kInvalidArgument);
  double scalar = 0;
  ASSERT_TRUE(
      reader->read(*reader->find("scalar"), Bytes(), std::as_writable_bytes(std::span(&scalar, 1))).ok());
  EXPECT_EQ(scalar, 0.25);
  float part = 0;
  ASSERT_TRUE(reader->read(*reader->find("a"), Bytes(8), std::as_writable_bytes(std::span(&part, 1))).ok());
  EXPECT_EQ(part, 3.0F);
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  ASSERT_TRUE(write(1).ok());
  const std::string whole = get();
  for (std::size_t keep = 0; keep < whole.size(); ++keep) {
    put(whole.substr(0, keep));
    const auto opened = SafetensorsReader::open(path());
    ASSERT_FALSE(opened.ok()) << keep << " of " << whole.size();
    EXPECT_EQ(opened.error().code, Errc::kInvalidArgument);
  }
  expect_refused(whole + "x", "the file holds");
}

TEST_F(Safetensors, NoChangedByteOfTheHeaderIsTrusted) {
  ASSERT_TRUE(write(1).ok());
  const std::string whole = get();
  for (std::size_t at = 0; at < whole.size() - 40; ++at) {
    for (const char change : {'\x01', '\x80', '\x10'}) {
      std::string hostile = whole;
      hostile[at] = static_cast<char>(hostile[at] ^ change);
      put(hostile);
      const auto opened =
          SafetensorsReader::open(path());  // refused, or still consistent with the file's size
      if (!opened.ok()) continue;
      for (const TensorInfo& tensor : opened->tensors()) {
        std::vector<std::byte> bytes(tensor.bytes().count());
        EXPECT_TRUE(opened->read(tensor, Bytes(), bytes).ok());
      }
    }
  }
}

TEST_F(Safetensors, HostileHeadersAreNamed) {
  const std::string four(4, '\0'), eight(8, '\0');
  expect_refused("", "fewer than a header");
  expect_refused(std::string(8, '\xff'), "claims");
  expect_refused(with_length("[]", ""), "no JSON object");
  expect_refused(with_length("{", ""), "no JSON object");
  expect_refused(with_length(std::string(100'000, '['), ""), "no JSON object");
  expect_refused(with_length(R"({"x":5})", ""), "needs dtype");
  const auto tensor = [](const std::string& type, const std::string& shape, const std::string& offsets) {
    return R"({"x":{"dtype":)" + type + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  expect_refused(with_length(tensor("\"F16\"", "[2]", "[0,4]"), four), "dtype is \"F16\"");
  expect_refused(with_length(tensor("7", "[1]", "[0,4]"), four), "dtype is 7");
  expect_refused(with_length(tensor("\"F32\"", "[-1]", "[0,4]"), four), "shape");
  expect_refused(with_length(tensor("\"F32\"", "[1.5]", "[0,4]"), four), "shape");
  expect_refused(with_length(tensor("\"F32\"", "[4294967296,4294967296]", "[0,4]"), four), "shape");
  expect_refused(with_length(tensor("\"F32\"", "[4611686018427387904]", "[0,0]"), ""), "do not agree");
  expect_refused(with_length(tensor("\"F32\"", "[1]", "[0,8]"), four), "truncated");
  expect_refused(with_length(tensor("\"F32\"", "[1]", "[4,0]"), four), "truncated");
  expect_refused(with_length(tensor("\"F32\"", "[1]", "[0]"), four), "data_offsets");
  expect_refused(with_length(tensor("\"F32\"", "[2]", "[0,4]"), four), "do not agree");
  expect_refused(with_length(tensor("\"F32\"", "[1]", "[4,8]"), eight), "the file holds");
  expect_refused(with_length(R"({"__metadata__":{"a":1}})", ""), "__metadata__");
  const std::string row = R"({"dtype":"U8","shape":[4],"data_offsets":[)";
  expect_refused(with_length(R"({"x":)" + row + R"(0,4]},"y":)" + row + "2,6]}}", "123456"), "overlaps");
  expect_refused(with_length(R"({"x":)" + row + R"(0,4]},"y":)" + row + "6,10]}}", "1234567890"), "gap");
  EXPECT_EQ(SafetensorsReader::open(path() + ".absent").error().code, Errc::kNotFound);
  EXPECT_EQ(SafetensorsReader::open(folder_.string()).error().code, Errc::kInvalidArgument);
}

TEST_F(Safetensors, WhicheverWriteFailsTheOldFileStays) {
  ASSERT_TRUE(write(1).ok());
  const std::string before = get();
  for (std::uint64_t nth = 1;; ++nth) {
    bool fired = false;
    {
      const ScopedFaults faults(fail_call(nth));
      const Status written = write(9);
      fired = faults.fired();
      EXPECT_EQ(written.ok(), !fired);
      if (fired) {
        EXPECT_EQ(written.error().code, Errc::kIo);
      }
    }
    EXPECT_EQ(files(), 1U) << "after failing call " << nth;
    if (!fired) {
      EXPECT_GT(nth, 4U);
      break;
    }
    EXPECT_EQ(get(), before);
  }
  EXPECT_NE(get(), before);
}

TEST_F(Safetensors, AnAbandonedWriterLeavesNothing) {
  {
    auto writer = SafetensorsWriter::create(path(), {}, {{"x", DType::kU8, {4}}});
    ASSERT_TRUE(writer.ok());
  }
  EXPECT_EQ(files(), 0U);
  EXPECT_EQ(
      SafetensorsWriter::create(path(), {}, {{"x", DType::kU8, {1}}, {"x", DType::kU8, {1}}}).error().code,
      Errc::kInvalidArgument);
  EXPECT_EQ(SafetensorsWriter::create(path() + "/absent/x", {}, {}).error().code, Errc::kIo);
  EXPECT_EQ(SafetensorsWriter::create(path(), {{"bad", "\xff\xfe"}}, {}).error().code,
            Errc::kInvalidArgument);
  EXPECT_EQ(files(), 0U);
}

}  // namespace
}  // namespace terrace::trainer
