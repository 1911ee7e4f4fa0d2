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

std::vector<float> download(Session& session, const float* device, std::int64_t count) {
  std::vector<float> to(static_cast<std::size_t>(count));
  const PinnedBuffer staging(session.device(), Bytes(std::min(kPiece, to.size() * sizeof(float))));
  constexpr std::size_t kFloats = kPiece / sizeof(float);
  for (std::size_t at = 0; at < to.size(); at += kFloats) {
    const Bytes size(std::min(kFloats, to.size() - at) * sizeof(float));
    require(session.device().copy(session.compute(), Direction::kD2H, staging.address(),
                                  reinterpret_cast<const std::byte*>(device + at), size));
    require(session.device().synchronize(session.compute()));
    std::memcpy(to.data() + at, staging.address(), size.count());
  }
  return to;
}

}  // namespace terrace::trainer
