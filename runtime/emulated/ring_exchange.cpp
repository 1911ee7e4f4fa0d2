// Exchanges between emulated devices: the kernel's own blocks, one after another on the stream's thread.
#include "runtime/ring_exchange.hpp"

#include "runtime/device_fault.hpp"
#include "runtime/emulated/emulated_device.hpp"
#include "runtime/emulated/host_block.hpp"

namespace terrace {

namespace {

// The blocks run one after another, so any number would do; each of them looks at every word anew.
constexpr std::uint32_t kBlocks = 64;

}  // namespace

Result<std::uint32_t> EmulatedDevice::exchange_blocks() { return kBlocks; }

Status EmulatedDevice::exchange(Stream stream, const RingExchange& exchange) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  const std::uint32_t blocks = ring_block_count(exchange);
  if (blocks > kBlocks) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "emulated device: an exchange of " + std::to_string(blocks) +
                         " blocks: " + std::to_string(kBlocks) + " run at once; ask for fewer"};
  }
  stream_of(stream)->run([exchange, blocks] {
    for (std::uint32_t index = 0; index < blocks; ++index) {
      emulated::HostBlock block;
      ring_run(exchange, block, index);
    }
  });
  return {};
}

}  // namespace terrace
