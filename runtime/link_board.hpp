// The page by which the processes of one user that use one device share its link: a memfd that terraced makes
// and hands to each of them, with a slot for each.
//
// terraced writes what each may use of either direction, and the processes what they need and when a
// collective runs. Everybody of that user may write all of it, as they may do worse to each other: whoever
// reads believes no value further than it makes sense. Other users have other boards.
//
// Everything here is a relaxed atomic, or a word that a device writes: nobody calls the kernel to look or to
// tell.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/clock.hpp"
#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"

namespace terrace {

inline constexpr std::size_t kLinkDirections = 2;     // h2d, d2h: as Direction
inline constexpr std::uint32_t kLinkWhole = 1000000;  // of a link's time; shares are millionths

// Collectives of one stream, or of streams that wait for each other: one runs where the two differ. Written
// in the order of the stream, by the device.
struct CollectiveLane {
  std::atomic<std::uint32_t> begun{0}, ended{0};
};

// Of one process and device. A cache line.
struct alignas(64) LinkSlot {
  static constexpr std::size_t kLanes = 3;
  // By the process. When its copies were last held back by what it may use, in nanoseconds of
  // steady_clock(); how long it has kept the link busy, in microseconds that start again after 2^32.
  std::array<std::atomic<std::uint64_t>, kLinkDirections> limited_at{};
  std::array<std::atomic<std::uint32_t>, kLinkDirections> spent{};
  // By terraced, in millionths. The lease: over the processes of a device never more than the whole. What the
  // process may use until the next look: its lease, and more where others leave theirs.
  std::array<std::atomic<std::uint32_t>, kLinkDirections> lease{}, usable{};
  std::array<CollectiveLane, kLanes> lanes{};

  void clear();
};
static_assert(sizeof(LinkSlot) == 64);

class LinkBoard {
 public:
  static constexpr std::size_t kSlots = 63;  // with the header a page
  static constexpr std::size_t kSize = 64 + kSlots * sizeof(LinkSlot);

  // A new one, sealed so that nobody can shrink it under the others. Errors: kIo (no memfd, no memory).
  [[nodiscard]] static Result<std::shared_ptr<LinkBoard>> create();
  // Takes the descriptor, closed in any case. Errors: kProtocol (no such board; the text says why), kIo.
  [[nodiscard]] static Result<std::shared_ptr<LinkBoard>> open(OwnedFd fd);
  ~LinkBoard();
  LinkBoard(const LinkBoard&) = delete;
  LinkBoard& operator=(const LinkBoard&) = delete;

  [[nodiscard]] int fd() const { return fd_.get(); }  // invalid where open() made this
  [[nodiscard]] std::span<LinkSlot, kSlots> slots() const;
  // When terraced last looked, of steady_clock(): what it has written holds for a while.
  void note_look(Nanoseconds now);
  [[nodiscard]] Nanoseconds looked_at() const;
  // The whole page, for a device that is to write to it.
  [[nodiscard]] std::byte* memory() const { return static_cast<std::byte*>(mapping_); }

 private:
  struct Header;
  LinkBoard(OwnedFd fd, void* mapping) : fd_(std::move(fd)), mapping_(mapping) {}
  [[nodiscard]] Header& header() const;
  OwnedFd fd_;
  void* mapping_;
};

}  // namespace terrace
