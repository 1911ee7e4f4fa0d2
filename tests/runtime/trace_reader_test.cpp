// The format of traces: what is written is read, and nothing that is damaged passes.
#include "runtime/trace/reader.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "runtime/trace/format.hpp"
#include "tests/runtime/memory_source.hpp"

namespace terrace::trace {
namespace {

using test::read_trace;
using test::ReadTrace;
using test::TraceBytes;
using testing::HasSubstr;

constexpr std::size_t kHeaderBytes = 8 + 2 + 1 + (1 + 8) + (1 + 4);  // of TraceBytes: "emulated", "test"

// A program's worth of events by a seed, with every field in use.
struct Recorded {
  TraceBytes bytes;
  std::vector<Event> events;
};
Recorded random_trace(unsigned seed, std::size_t count) {
  std::mt19937_64 random(seed);
  Recorded recorded;
  std::vector<std::pair<std::uint64_t, Bytes>> live;
  std::uint64_t allocations = 0, time = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Event event;
    event.microseconds = time += random() % 3 == 0 ? random() % 1000000 : random() % 20;
    event.stream = random() % 4 == 0 ? random() : random() % 3;
    event.thread = static_cast<std::uint32_t>(random() % 5);
    if (live.empty() || random() % 5 < 3) {
      event.id = allocations++;
      event.size = Bytes(random() % (random() % 2 == 0 ? 4096 : kLargestBlock.count()));
      const auto pool = random() % (kPoolCount + 1);
      if (pool < kPoolCount) event.pool = static_cast<Pool>(pool);
      live.emplace_back(event.id, event.size);
    } else {
      const std::size_t at = random() % live.size();
      event.kind = Event::Kind::kFree;
      std::tie(event.id, event.size) = live[at];
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
    }
    recorded.bytes.add(event);
    recorded.events.push_back(event);
  }
  return recorded;
}

void expect_equal(const Event& read, const Event& written, std::size_t at) {
  ASSERT_EQ(read.kind, written.kind) << at;
  ASSERT_EQ(read.id, written.id) << at;
  ASSERT_EQ(read.size, written.size) << at;
  ASSERT_EQ(read.stream, written.stream) << at;
  ASSERT_EQ(read.pool, written.pool) << at;
  ASSERT_EQ(read.thread, written.thread) << at;
  ASSERT_EQ(read.microseconds, written.microseconds) << at;
}

TEST(TraceFormat, WhatIsWrittenIsRead) {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    const Recorded recorded = random_trace(seed, 20000);
    for (const std::size_t piece : {std::size_t{1} << 20, std::size_t{777}}) {
      const ReadTrace read = read_trace(recorded.bytes.text(), piece);
      ASSERT_EQ(read.error, "");
      EXPECT_FALSE(read.torn);
      ASSERT_EQ(read.events.size(), recorded.events.size());
      for (std::size_t i = 0; i < read.events.size(); ++i)
        expect_equal(read.events[i], recorded.events[i], i);
    }
  }
}

TEST(TraceFormat, TheHeaderSaysWhoAndOnWhat) {
  const ReadTrace read = read_trace(TraceBytes(Layer::kDriverCalls).text());
  EXPECT_EQ(read.error, "");
  EXPECT_EQ(read.header.layer, Layer::kDriverCalls);
  EXPECT_EQ(read.header.device_kind, "emulated");
  EXPECT_EQ(read.header.process, "test");
  std::array<std::byte, kMostHeaderBytes> place;
  const std::string endless(500, 'x');
  const std::size_t length = encode_header(place, Layer::kPool, endless, "\x1b[2J\xff");
  const ReadTrace cut = read_trace(std::string(reinterpret_cast<const char*>(place.data()), length));
  EXPECT_EQ(cut.error, "");
  EXPECT_EQ(cut.header.device_kind, std::string(kMostNameBytes, 'x'));
  EXPECT_EQ(cut.header.process, "?[2J?") << "no control sequence reaches a terminal";
}

TEST(TraceFormat, AnOrdinaryEventTakesAFewBytes) {
  TraceBytes bytes;
  const std::size_t header = bytes.text().size();
  for (int i = 0; i < 100; ++i) bytes.free(bytes.allocate(Bytes(16 << 20)));
  EXPECT_LE(bytes.text().size() - header, 100u * (6 + 3))
      << "tag, time, size of four bytes; tag, time, distance";
}

TEST(TraceFormat, ATornTailCostsTheLastEventOnly) {
  const Recorded recorded = random_trace(7, 200);
  const std::string& whole = recorded.bytes.text();
  std::size_t most = 0;
  for (std::size_t length = kHeaderBytes; length <= whole.size(); ++length) {
    const ReadTrace read = read_trace(whole.substr(0, length));
    ASSERT_EQ(read.error, "") << length;
    ASSERT_LE(read.events.size(), recorded.events.size());
    ASSERT_TRUE(read.events.size() == most || read.events.size() == most + 1) << length;
    most = read.events.size();
    if (most > 0) expect_equal(read.events.back(), recorded.events[most - 1], most - 1);
    if (length == whole.size()) {
      EXPECT_FALSE(read.torn);
    }
  }
  EXPECT_EQ(most, recorded.events.size());
  EXPECT_TRUE(read_trace(whole.substr(0, whole.size() - 1)).torn);
}

TEST(TraceFormat, ABrokenHeaderIsRefusedWithAPlace) {
  const std::string whole = TraceBytes().text();
  EXPECT_THAT(read_trace("").error, HasSubstr("t: empty"));
  EXPECT_THAT(read_trace("plain text").error, HasSubstr("not a trace; use a file written by"));
  for (std::size_t length = 1; length < whole.size(); ++length) {
    EXPECT_THAT(read_trace(whole.substr(0, length)).error, HasSubstr("breaks off at byte")) << length;
  }
  std::string changed = whole;
  changed[8] = 9;
  EXPECT_THAT(read_trace(changed).error, HasSubstr("version 9 at byte 8; this program reads version 1"));
  changed = whole;
  changed[kLayerOffset] = 7;
  EXPECT_THAT(read_trace(changed).error, HasSubstr("layer 7 at byte 10"));
  changed = whole;
  changed[kLayerOffset + 1] = '\xff';
  EXPECT_THAT(read_trace(changed).error, HasSubstr("device kind has 255 bytes at byte 11; at most 64"));
}

TEST(TraceFormat, HostileEventsAreRefusedWithAPlace) {
  const std::string at = "t: event 0 at byte " + std::to_string(kHeaderBytes) + ": ";
  const auto error_of = [](std::initializer_list<int> event) {
    std::string bytes = TraceBytes().text();
    for (const int byte : event) bytes += static_cast<char>(byte);
    return read_trace(bytes).error;
  };
  EXPECT_EQ(error_of({0, 0, 0}), at + "kind 0; there are 1 (allocate) and 2 (free)");
  EXPECT_EQ(error_of({3, 0, 0}), at + "kind 3; there are 1 (allocate) and 2 (free)");
  EXPECT_THAT(error_of({0x81, 0, 1}), HasSubstr("bits that version 1 does not use"));
  EXPECT_THAT(error_of({0x12, 0, 1}), HasSubstr("bits that version 1 does not use"));
  EXPECT_THAT(error_of({1, 0, 0x81, 0x80, 0x80, 0x80, 0x80, 0x80, 0x40}), HasSubstr("at most 256.0 TiB"));
  const std::string endless(20, '\xff');
  EXPECT_THAT(read_trace(TraceBytes().text() + "\x01" + endless).error,
              HasSubstr("more bits than its field"));
  EXPECT_THAT(error_of({9, 0, 0xff, 0xff, 0xff, 0xff, 0x7f, 1}), HasSubstr("more bits than its field"));
  EXPECT_THAT(error_of({2, 0, 1}), HasSubstr("1 allocations ago is freed; there were 0"));
  EXPECT_THAT(error_of({0x71, 0, 1, 2, 0, 0}), HasSubstr("event 1"));
  EXPECT_THAT(error_of({0x71, 0, 1, 2, 0, 1, 2, 0, 1}), HasSubstr("block 0 is freed twice"));
}

TEST(TraceFormat, TimeThatOverflowsIsRefused) {
  Event late;
  late.microseconds = ~0ULL;
  TraceBytes bytes;
  bytes.add(late);
  EXPECT_THAT(read_trace(bytes.text() + std::string("\x71\x01\x01", 3)).error, HasSubstr("more bits"));
}

TEST(TraceFormat, MoreLiveBlocksThanARecorderKeepsAreRefused) {
  TraceBytes bytes;
  for (std::size_t i = 0; i < kMostLiveBlocks; ++i) (void)bytes.allocate(1_B);
  EXPECT_EQ(read_trace(bytes.text()).error, "");
  (void)bytes.allocate(1_B);
  EXPECT_THAT(read_trace(bytes.text()).error, HasSubstr("one block more than 262144 are live"));
}

// Whatever bytes there are: an end or an error, never a wrong event.
TEST(TraceFormat, MutatedFilesNeverGiveInconsistentEvents) {
  const std::string whole = random_trace(3, 400).bytes.text();
  std::mt19937_64 random(1);
  for (int round = 0; round < 1500; ++round) {
    std::string bytes = whole;
    const std::uint64_t changes = 1 + random() % 6;
    for (std::uint64_t i = 0; i < changes; ++i) {
      const std::size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
          break;
        case 2:
          bytes.erase(at, random() % 9);
          break;
        default:
          bytes.insert(at, std::string(1 + random() % 9, static_cast<char>(random())));
          break;
      }
      if (bytes.empty()) bytes = "x";
    }
    const ReadTrace read = read_trace(bytes, 1 + random() % 300);
    std::unordered_map<std::uint64_t, Bytes> live;
    std::uint64_t allocations = 0, time = 0;
    for (const Event& event : read.events) {
      ASSERT_GE(event.microseconds, time);
      time = event.microseconds;
      if (event.kind == Event::Kind::kAllocate) {
        ASSERT_EQ(event.id, allocations++);
        ASSERT_LE(event.size, kLargestBlock);
        live[event.id] = event.size;
      } else {
        ASSERT_TRUE(live.contains(event.id));
        ASSERT_EQ(live[event.id], event.size);
        live.erase(event.id);
      }
    }
  }
}

}  // namespace
}  // namespace terrace::trace
