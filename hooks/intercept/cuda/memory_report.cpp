#include "hooks/intercept/cuda/memory_report.hpp"

#include <algorithm>

#include "hooks/intercept/cuda/stable_blocks.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"
#include "hooks/intercept/hook_settings.hpp"
#include "hooks/intercept/wall.hpp"

namespace terrace::hooks::cuda {

void report_memory(DeviceOrdinal device, std::size_t& available, std::size_t& total) noexcept {
  Bytes unused = stream_pools().unused(device);
  if (const DeviceBlocks* const blocks = stable_blocks().of_device(device))
    unused += blocks->space->hbm_kept();
  const auto room = wall().room(device);
  Bytes free(available);
  if (room) free = std::min(free, *room);
  free = std::min(free + unused, Bytes(total));
  const HookSettings& settings = hook_settings();
  const Bytes more = settings.report == MemoryReport::kExtended ? settings.ddr_budget : 0_B;
  available = (free + more).count();
  total += more.count();
}

}  // namespace terrace::hooks::cuda
