// Blocks under 1 MiB inside memory that somebody else owns: jemalloc arenas over a source of host memory.
//
// jemalloc is a private copy of ours (docs/design/0010-private-jemalloc.md): its names are renamed and
// hidden, the process's malloc stays what it was, and it works in a library that is opened late, by threads
// that were there before. It keeps its own tables in ordinary memory, never in the source's, and never asks
// the system to drop the source's pages: they stay pinned.
//
// Memory is taken from the source an area at a time and given back, by purge() and the destructor, as exactly
// the pieces that were taken. A freed block is reused at once; an area goes back only when asked for, because
// pinned memory is cheap to keep and dear to get.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/device.hpp"
#include "runtime/result.hpp"
#include "runtime/units.hpp"

namespace terrace {

// Sizes from here on are not small.
inline constexpr Bytes kSmallBlockLimit = 1_MiB;

// Where the memory comes from. Called from any thread of SmallBlocks' callers, several at once, while locks
// of SmallBlocks are held: neither function may call back into it, and who calls allocate, free, purge or the
// destructor holds no lock that take or give wants. usage() alone locks nothing.
class SmallBlockSource {
 public:
  virtual ~SmallBlockSource() = default;
  // `size` is a multiple of 4 KiB, and so is the address returned. The contents are unspecified. An error is
  // what allocate() then returns, unless a smaller piece or memory freed before does.
  [[nodiscard]] virtual Result<Address> take(Bytes size) = 0;
  // Exactly one earlier take, address and size.
  virtual void give(Address address, Bytes size) = 0;
};

class SmallBlocks {
 public:
  struct Options {
    Bytes area = 2_MiB;  // taken at a time, a multiple of 4 KiB; where that is refused, just what is needed
  };
  struct Usage {
    Bytes live;  // spans of the blocks in use
    Bytes held;  // taken from the source and not given back: live, rounding, and what is free for reuse
  };

  // The source outlives the object. Errors: kInvalidArgument, kOutOfMemory (no memory for jemalloc's tables).
  [[nodiscard]] static Result<std::unique_ptr<SmallBlocks>> create(SmallBlockSource& source, Options options);
  SmallBlocks(const SmallBlocks&) = delete;
  SmallBlocks& operator=(const SmallBlocks&) = delete;
  // Every block is freed before, and no thread is inside a call. Gives back everything.
  ~SmallBlocks();

  // Thread-safe, and so is all below. The block starts at a multiple of 64 bytes, so that no two share a
  // cache line, and may be used up to span_of(size). Size 0 counts as 1. Errors: what the source said when it
  // refused, after what other threads keep for reuse was tried; kInvalidArgument from kSmallBlockLimit on;
  // kOutOfMemory where jemalloc finds no memory for its tables. Nothing changed.
  [[nodiscard]] Result<Address> allocate(Bytes size);
  // `block` came from allocate() of this object and is in use; any thread may free it.
  void free(Address block);

  // What a block of that size, under kSmallBlockLimit, takes up: at most a quarter more, or 64 bytes.
  [[nodiscard]] static Bytes span_of(Bytes size);
  // The span of a block in use.
  [[nodiscard]] Bytes span_at(Address block) const;

  // Gives back every area in which no block is in use, those kept by threads for reuse included. Returns how
  // many bytes went back.
  Bytes purge();

  [[nodiscard]] Usage usage() const;

 private:
  struct Impl;
  struct ThreadCaches;
  explicit SmallBlocks(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace terrace
