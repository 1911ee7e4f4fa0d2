#include "allocator/block_table.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

std::uint64_t page_size() {
  static const auto size = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return size;
}

Error refused(const char* call, std::uint64_t bytes) {
  return {.code = Errc::kOutOfMemory,
          .text = std::string("block table: ") + call + " of " + format_bytes(Bytes(bytes)) +
                  " refused: " + std::strerror(errno) + "; raise the limit of address space (ulimit -v)",
          .bytes = Bytes(bytes)};
}

// Reads as zero and counts against no overcommit limit until it is made writable.
Result<void*> reserve_zeros(std::uint64_t bytes) {
  if (fault_point(FaultPoint::kHostMap)) {
    errno = ENOMEM;
    return refused("mmap", bytes);
  }
  void* at = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return refused("mmap", bytes);
  // One touched word must not bring in two megabytes of them.
  (void)madvise(at, bytes, MADV_NOHUGEPAGE);
  return at;
}

struct Pages {
  std::byte* at;
  std::uint64_t bytes;
};

// The whole pages that hold words [first, last).
Pages pages_around(void* words, std::uint64_t first, std::uint64_t last) {
  const std::uint64_t begin = first * 8 / page_size() * page_size();
  const std::uint64_t end = (last * 8 + page_size() - 1) / page_size() * page_size();
  return {static_cast<std::byte*>(words) + begin, end - begin};
}

Status make_writable(void* words, std::uint64_t first, std::uint64_t last) {
  const Pages pages = pages_around(words, first, last);
  if (fault_point(FaultPoint::kHostMap)) {
    errno = ENOMEM;
    return refused("mprotect", pages.bytes);
  }
  if (mprotect(pages.at, pages.bytes, PROT_READ | PROT_WRITE) != 0) return refused("mprotect", pages.bytes);
  return {};
}

}  // namespace

Result<BlockTable> BlockTable::create(Address base, Bytes size) {
  BlockTable table(base, size);
  const std::uint64_t units = size.count() >> kUnitShift;
  const auto whole_pages = [](std::uint64_t words) {
    return (words * 8 + page_size() - 1) / page_size() * page_size();
  };
  table.words_bytes_ = whole_pages(units);
  auto words = reserve_zeros(table.words_bytes_);
  if (!words) return std::move(words).error();
  table.words_ = static_cast<Word*>(*words);
  for (std::uint64_t bits = units; table.levels_ < kMostLevels; ++table.levels_) {
    const std::uint64_t count = (bits + 63) / 64;
    Level& level = table.starts_[table.levels_];
    level.bytes = whole_pages(count);
    auto at = reserve_zeros(level.bytes);
    if (!at) return std::move(at).error();
    level.words = static_cast<Word*>(*at);
    // The summaries are small: they are writable as a whole, from the start.
    if (table.levels_ > 0) {
      if (auto writable = make_writable(level.words, 0, count); !writable) return writable.error();
    }
    bits = count;
    if (count == 1) {
      ++table.levels_;
      break;
    }
  }
  return table;
}

BlockTable::BlockTable(BlockTable&& other) noexcept
    : base_(other.base_),
      size_(other.size_),
      words_(std::exchange(other.words_, nullptr)),
      words_bytes_(other.words_bytes_),
      levels_(other.levels_),
      starts_(std::exchange(other.starts_, {})) {}

BlockTable::~BlockTable() {
  if (words_ != nullptr) munmap(static_cast<void*>(words_), words_bytes_);
  for (const Level& level : starts_) {
    if (level.words != nullptr) munmap(static_cast<void*>(level.words), level.bytes);
  }
}

Status BlockTable::open(Address at, Bytes size) {
  const std::uint64_t first = offset_of(at) >> kUnitShift;
  const std::uint64_t last = first + (size.count() >> kUnitShift);
  if (auto opened = make_writable(words_, first, last); !opened) return opened;
  return make_writable(starts_[0].words, first / 64, (last + 63) / 64);
}

void BlockTable::clear(Address at, Bytes size) {
  const std::uint64_t first = offset_of(at) >> kUnitShift;
  const std::uint64_t last = first + (size.count() >> kUnitShift);
  // Only pages that hold words of this range alone.
  const std::uint64_t per_page = page_size() / 8;
  const std::uint64_t begin = (first + per_page - 1) / per_page * per_page;
  const std::uint64_t end = last / per_page * per_page;
  if (begin < end) (void)madvise(static_cast<void*>(words_ + begin), (end - begin) * 8, MADV_DONTNEED);
}

void BlockTable::place(Address at, BlockWord word) {
  std::uint64_t bit = offset_of(at) >> kUnitShift;
  words_[bit].store(word.bits(), std::memory_order_relaxed);
  for (unsigned level = 0; level < levels_; ++level, bit /= 64) {
    Word& bits = starts_[level].words[bit / 64];
    const std::uint64_t before = bits.load(std::memory_order_relaxed);
    bits.store(before | 1ULL << bit % 64, std::memory_order_release);
    if (before != 0) break;  // its summary is set
  }
}

void BlockTable::remove(Address at) {
  std::uint64_t bit = offset_of(at) >> kUnitShift;
  words_[bit].store(0, std::memory_order_relaxed);
  for (unsigned level = 0; level < levels_; ++level, bit /= 64) {
    Word& bits = starts_[level].words[bit / 64];
    const std::uint64_t after = bits.load(std::memory_order_relaxed) & ~(1ULL << bit % 64);
    bits.store(after, std::memory_order_release);
    if (after != 0) break;  // its summary stays set
  }
}

// While a live block holds `unit`, the bits between its start and the unit stay clear and those on the way to
// its start stay set, so the first pass finds it. A summary that outlived the word under it sends the search
// on below that word.
std::optional<std::uint64_t> BlockTable::start_at_or_before(std::uint64_t unit) const {
  const auto last_bit = [](std::uint64_t word) {
    return 63U - static_cast<unsigned>(std::countl_zero(word));
  };
  const auto word_of = [this](unsigned level, std::uint64_t index) {
    return starts_[level].words[index].load(std::memory_order_acquire);
  };
  while (true) {
    unsigned level = 0;
    std::uint64_t bit = unit;
    while (true) {  // up, to a word with a start at or before
      const std::uint64_t word = word_of(level, bit / 64) & (~0ULL >> (63 - bit % 64));
      if (word != 0) {
        bit = bit / 64 * 64 + last_bit(word);
        break;
      }
      if (bit < 64 || ++level == levels_) return std::nullopt;
      bit = bit / 64 - 1;
    }
    while (level > 0) {  // down, to its last start
      const std::uint64_t word = word_of(level - 1, bit);
      if (word == 0) break;
      bit = bit * 64 + last_bit(word);
      --level;
    }
    if (level == 0) return bit;
    if (bit == 0) return std::nullopt;
    unit = (bit << 6 * level) - 1;
  }
}

std::optional<Block> BlockTable::find(const std::byte* address) const {
  if (!holds(address)) return std::nullopt;
  const std::uint64_t unit = offset_of(address) >> kUnitShift;
  const auto start = start_at_or_before(unit);
  if (!start) return std::nullopt;
  const BlockWord word(words_[*start].load(std::memory_order_relaxed));
  if (word.state() != BlockWord::State::kLive || unit >= *start + word.units()) return std::nullopt;
  return Block{base_ + (*start << kUnitShift), word.size(), word.pool()};
}

}  // namespace terrace
