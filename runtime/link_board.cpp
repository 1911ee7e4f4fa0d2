#include "runtime/link_board.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "runtime/fault.hpp"

namespace terrace {
namespace {

Error io_error(const char* what) {
  return Error{Errc::kIo, std::string("link board: ") + what + ": " + std::strerror(errno)};
}
Error refused(const char* why) { return Error{Errc::kProtocol, std::string("link board refused: ") + why}; }

}  // namespace

struct alignas(64) LinkBoard::Header {
  static constexpr std::uint64_t kMagic = 0x314b4e494c525254;  // "TRRLINK1"
  std::uint64_t magic = kMagic;
  std::uint32_t size = kSize;
  std::uint32_t reserved = 0;
  std::atomic<std::int64_t> looked_at{0};
};

void LinkSlot::clear() {
  for (std::size_t d = 0; d < kLinkDirections; ++d) {
    limited_at[d].store(0, std::memory_order_relaxed);
    spent[d].store(0, std::memory_order_relaxed);
    lease[d].store(0, std::memory_order_relaxed);
    usable[d].store(0, std::memory_order_relaxed);
  }
  for (CollectiveLane& lane : lanes) {
    lane.begun.store(0, std::memory_order_relaxed);
    lane.ended.store(0, std::memory_order_relaxed);
  }
}

Result<std::shared_ptr<LinkBoard>> LinkBoard::create() {
  static_assert(sizeof(Header) == 64 && kSize == 4096);
  if (fault_point(FaultPoint::kPageCreate)) {
    errno = ENOMEM;
    return io_error("memfd_create");
  }
  OwnedFd fd(::memfd_create("terrace-link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return io_error("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(kSize)) != 0) return io_error("ftruncate");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return io_error("sealing");
  void* mapping = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (mapping == MAP_FAILED) return io_error("mmap");
  new (mapping) Header;
  auto* slots = reinterpret_cast<LinkSlot*>(static_cast<std::byte*>(mapping) + sizeof(Header));
  for (std::size_t i = 0; i < kSlots; ++i) new (slots + i) LinkSlot;
  return std::shared_ptr<LinkBoard>(new LinkBoard(std::move(fd), mapping));
}

Result<std::shared_ptr<LinkBoard>> LinkBoard::open(OwnedFd fd) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0) return refused("not a memfd");
  if ((seals & F_SEAL_SHRINK) == 0) return refused("not sealed against shrinking");
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return io_error("fstat");
  if (status.st_size != static_cast<off_t>(kSize)) return refused("of another size");
  void* mapping = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (mapping == MAP_FAILED) return io_error("mmap");
  std::shared_ptr<LinkBoard> board(new LinkBoard(OwnedFd(), mapping));
  if (board->header().magic != Header::kMagic || board->header().size != kSize)
    return refused("not a link board of this version");
  return board;
}

LinkBoard::~LinkBoard() { ::munmap(mapping_, kSize); }

LinkBoard::Header& LinkBoard::header() const { return *std::launder(static_cast<Header*>(mapping_)); }

std::span<LinkSlot, LinkBoard::kSlots> LinkBoard::slots() const {
  return std::span<LinkSlot, kSlots>(
      std::launder(reinterpret_cast<LinkSlot*>(static_cast<std::byte*>(mapping_) + sizeof(Header))), kSlots);
}

void LinkBoard::note_look(Nanoseconds now) {
  header().looked_at.store(now.count(), std::memory_order_relaxed);
}
Nanoseconds LinkBoard::looked_at() const {
  return Nanoseconds(header().looked_at.load(std::memory_order_relaxed));
}

}  // namespace terrace
