// The wire protocol: any packet is refused in words, or is a message that is written as the same packet.
#include <algorithm>

#include "runtime/wire.hpp"
#include "tests/fuzz/target.hpp"

using namespace terrace;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span packet(reinterpret_cast<const std::byte*>(data), size);
  const auto envelope = decode(packet);
  if (!envelope) {
    HOLDS(envelope.error().code == Errc::kProtocol);
    HOLDS(!envelope.error().text.empty());
    return 0;
  }
  const std::vector<std::byte> again = encode(envelope->message, envelope->sequence);
  HOLDS(std::ranges::equal(packet, again));
  if (const auto* hello = std::get_if<Hello>(&envelope->message)) {
    HOLDS(hello->job.view().size() <= hello->job.chars.size());
    HOLDS(hello->device.view().size() <= hello->device.chars.size());
  }
  return 0;
}
