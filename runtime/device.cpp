#include "runtime/device.hpp"

#include "runtime/link_time.hpp"

namespace terrace {

Device::Device() : own_link_time_(std::make_unique<LinkTime>()), link_time_(own_link_time_.get()) {}
Device::~Device() = default;

const char* name_of(Direction direction) {
  switch (direction) {
    case Direction::kH2D:
      return "h2d";
    case Direction::kD2H:
      return "d2h";
    case Direction::kD2D:
      return "d2d";
    case Direction::kPeer:
      return "peer";
  }
  return "unknown";
}

namespace {
Error no_fp8(const Device& device) {
  return {.code = Errc::kNotSupported, .text = device.info().kind + " devices pack no numbers"};
}
}  // namespace

Status Device::pack_fp8(Stream, const Fp8Blocks&) { return no_fp8(*this); }
Status Device::unpack_fp8(Stream, const Fp8Blocks&) { return no_fp8(*this); }

Status Device::write_word(Stream, std::atomic<std::uint32_t>&, std::uint32_t) {
  return Error{.code = Errc::kNotSupported, .text = info().kind + " devices write no words"};
}

Bytes whole_size(std::span<const PhysicalPiece> pieces) {
  Bytes sum;
  for (const PhysicalPiece& piece : pieces) sum += piece.size;
  return sum;
}

Result<Stream> Device::adopt_stream(void* native) {
  (void)native;
  return Error{Errc::kNotSupported, "streams of this device have no native form to be adopted by", {}, {}};
}

}  // namespace terrace
