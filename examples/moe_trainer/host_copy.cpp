#include "examples/moe_trainer/host_copy.hpp"

#include <algorithm>
#include <cstring>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/memory.hpp"

namespace terrace::trainer {

namespace {

constexpr std::size_t kPiece = std::size_t{8} << 20;  // bytes

}  // namespace

void upload(Session& session, std::span<const float> from, float* device) {
  upload(session, std::as_bytes(from), reinterpret_cast<Address>(device));
}

void upload(Session& session, std::span<const std::byte> from, Address device) {
  const PinnedBuffer staging(session.device(), Bytes(std::min(kPiece, from.size())));
  for (std::size_t at = 0; at < from.size(); at += kPiece) {
    const Bytes size(std::min(kPiece, from.size() - at));
    std::memcpy(staging.address(), from.data() + at, size.count());
    require(session.device().copy(session.compute(), Direction::kH2D, device + at, staging.address(), size));
    require(session.device().synchronize(session.compute()));
  }
}

namespace {

void download_to(Session& session, const std::byte* device, std::span<std::byte> to) {
  const PinnedBuffer staging(session.device(), Bytes(std::min(kPiece, to.size())));
  for (std::size_t at = 0; at < to.size(); at += kPiece) {
    const Bytes size(std::min(kPiece, to.size() - at));
    require(session.device().copy(session.compute(), Direction::kD2H, staging.address(), device + at, size));
    require(session.device().synchronize(session.compute()));
    std::memcpy(to.data() + at, staging.address(), size.count());
  }
}

}  // namespace

std::vector<float> download(Session& session, const float* device, std::int64_t count) {
  std::vector<float> to(static_cast<std::size_t>(count));
  download_to(session, reinterpret_cast<const std::byte*>(device), std::as_writable_bytes(std::span(to)));
  return to;
}

std::vector<std::byte> download_bytes(Session& session, const std::byte* device, std::size_t size) {
  std::vector<std::byte> to(size);
  download_to(session, device, to);
  return to;
}

}  // namespace terrace::trainer
