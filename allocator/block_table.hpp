// The block table of device memory: which block an address belongs to, interior pointers included, in
// constant time.
//
// The pool's reservation is cut into units of 512 bytes. A word for each unit says, where a block starts
// there, how long it is, whose it is and whether it is live or waits in a thread's cache; a bitmap of starts
// with summaries, 64 bits to one, finds the start at or before any unit in at most twice as many reads as it
// has levels (seven for 64 TiB). Both are reserved once, as memory that reads as zero, and made writable as
// chunks are mapped for the first time: 8 bytes and a bit for each 512 bytes of blocks, whatever the system's
// overcommit setting.
//
// Readers take no lock and never wait. place(), remove() and open() are called under the owning pool's lock;
// the word of a placed block is written by whoever holds the block: a thread's cache, or the pool under its
// lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "allocator/block.hpp"
#include "allocator/quota.hpp"
#include "runtime/device.hpp"

namespace terrace {

inline constexpr unsigned kUnitShift = 9;
inline constexpr Bytes kUnit{1ULL << kUnitShift};

// What the table says of the block that starts at a unit, in one word, so that a reader never sees a mixture.
class BlockWord {
 public:
  enum class State : std::uint8_t { kNone = 0, kLive = 1, kCached = 2 };

  constexpr BlockWord() = default;
  constexpr explicit BlockWord(std::uint64_t bits) : bits_(bits) {}
  // `size` is what was asked for, at least one; the range is that many bytes rounded up to whole units.
  [[nodiscard]] static constexpr BlockWord live(Bytes size, Pool pool, TenantId tenant) {
    return BlockWord(size.count() | static_cast<std::uint64_t>(pool) << kPoolAt |
                     static_cast<std::uint64_t>(tenant.index) << kTenantAt |
                     static_cast<std::uint64_t>(State::kLive) << kStateAt);
  }
  [[nodiscard]] static constexpr BlockWord cached(std::uint64_t units) {
    return BlockWord(units << kUnitShift | static_cast<std::uint64_t>(State::kCached) << kStateAt);
  }

  constexpr bool operator==(const BlockWord&) const = default;
  [[nodiscard]] constexpr std::uint64_t bits() const { return bits_; }
  [[nodiscard]] constexpr State state() const { return static_cast<State>(bits_ >> kStateAt & 3); }
  [[nodiscard]] constexpr Bytes size() const { return Bytes(bits_ & ((1ULL << kPoolAt) - 1)); }
  [[nodiscard]] constexpr std::uint64_t units() const {
    return (size().count() + kUnit.count() - 1) >> kUnitShift;
  }
  [[nodiscard]] constexpr Bytes span() const { return Bytes(units() << kUnitShift); }
  [[nodiscard]] constexpr Pool pool() const { return static_cast<Pool>(bits_ >> kPoolAt & 7); }
  [[nodiscard]] constexpr TenantId tenant() const {
    return TenantId{static_cast<std::uint8_t>(bits_ >> kTenantAt & 15)};
  }
  static constexpr Bytes kMostBytes{(1ULL << 44) - kUnit.count()};

 private:
  static constexpr unsigned kPoolAt = 44;  // 44 bits of size
  static constexpr unsigned kTenantAt = 47;
  static constexpr unsigned kStateAt = 51;
  std::uint64_t bits_ = 0;
};

class BlockTable {
 public:
  // For the reserved range of `size` bytes at `base`. Errors: kOutOfMemory (no address space).
  [[nodiscard]] static Result<BlockTable> create(Address base, Bytes size);
  BlockTable(BlockTable&& other) noexcept;
  BlockTable& operator=(BlockTable&&) = delete;
  ~BlockTable();

  // Makes the words of [at, at + size) writable; again is fine. Errors: kOutOfMemory.
  [[nodiscard]] Status open(Address at, Bytes size);
  // Gives the memory behind the words of a range without blocks back to the system.
  void clear(Address at, Bytes size);

  void place(Address at, BlockWord word);
  void remove(Address at);

  // The live block whose range holds `address`. Safe from any thread, at any time.
  [[nodiscard]] std::optional<Block> find(const std::byte* address) const;

  // The words alone, by address; a copy for who reads and writes them at every turn.
  class Words {
   public:
    [[nodiscard]] std::uint64_t offset_of(const std::byte* address) const {
      return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(address) - base_);
    }
    // Within, and where a unit starts.
    [[nodiscard]] bool may_start_at(const std::byte* address) const {
      const std::uint64_t offset = offset_of(address);
      return offset < bytes_ && offset % kUnit.count() == 0;
    }
    // By index, for who has found it once. Precondition: may_start_at(at).
    [[nodiscard]] std::uint64_t index_of(const std::byte* at) const { return offset_of(at) >> kUnitShift; }
    [[nodiscard]] BlockWord word(std::uint64_t index) const {
      return BlockWord(words_[index].load(std::memory_order_relaxed));
    }
    void set_word(std::uint64_t index, BlockWord word) {
      words_[index].store(word.bits(), std::memory_order_relaxed);
    }
    // Precondition of both: may_start_at(at).
    [[nodiscard]] BlockWord word_at(const std::byte* at) const {
      return BlockWord(words_[offset_of(at) >> kUnitShift].load(std::memory_order_relaxed));
    }
    void set_word(const std::byte* at, BlockWord word) {
      words_[offset_of(at) >> kUnitShift].store(word.bits(), std::memory_order_relaxed);
    }

   private:
    friend class BlockTable;
    std::uintptr_t base_ = 0;
    std::uint64_t bytes_ = 0;
    std::atomic<std::uint64_t>* words_ = nullptr;
  };
  [[nodiscard]] Words words() const {
    Words words;
    words.base_ = reinterpret_cast<std::uintptr_t>(base_);
    words.bytes_ = size_.count();
    words.words_ = words_;
    return words;
  }
  [[nodiscard]] bool holds(const std::byte* address) const { return offset_of(address) < size_.count(); }
  [[nodiscard]] bool may_start_at(const std::byte* address) const { return words().may_start_at(address); }
  [[nodiscard]] BlockWord word_at(const std::byte* at) const { return words().word_at(at); }
  void set_word(const std::byte* at, BlockWord word) { words().set_word(at, word); }
  [[nodiscard]] std::uint64_t offset_of(const std::byte* address) const { return words().offset_of(address); }

 private:
  using Word = std::atomic<std::uint64_t>;
  static constexpr unsigned kMostLevels = 7;
  struct Level {
    Word* words = nullptr;
    std::uint64_t bytes = 0;
  };
  BlockTable(Address base, Bytes size) : base_(base), size_(size) {}
  [[nodiscard]] std::optional<std::uint64_t> start_at_or_before(std::uint64_t unit) const;

  Address base_;
  Bytes size_;
  Word* words_ = nullptr;
  std::uint64_t words_bytes_ = 0;
  unsigned levels_ = 0;
  std::array<Level, kMostLevels> starts_;
};

}  // namespace terrace
