#include "hooks/intercept/cuda/launch_view.hpp"

#include <new>

#include "hooks/intercept/cuda/driver_calls.hpp"
#include "hooks/intercept/cuda/stable_blocks.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"
#include "runtime/metrics.hpp"

namespace terrace::hooks::cuda {
namespace {

constinit ParameterLayouts the_layouts;
constinit TensorMaps the_maps;

ParameterLayouts::Layout* make_layout(std::span<const Parameter> parameters) {
  using Layout = ParameterLayouts::Layout;
  const std::size_t more = parameters.size() <= 1 ? 0 : parameters.size() - 1;
  void* place = ::operator new(sizeof(Layout) + more * sizeof(Parameter), std::nothrow);
  if (place == nullptr) return nullptr;
  auto* layout = new (place) Layout;
  layout->count = static_cast<std::uint32_t>(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) new (layout->parameters + i) Parameter(parameters[i]);
  return layout;
}

// Kernels that reach memory by more than their parameters, by what their names say: grouped and batched
// multiplications take tables of pointers that lie in device memory, and communication keeps its buffers'
// addresses in structures there.
bool reads_pointers_from_memory(const char* name) {
  static constexpr const char* kParts[] = {"rouped",      "GroupProblem", "PtrArray", "ptr_array", "ArrayTma",
                                           "gemmBatched", "atchedGemm",   "nccl",     "nvshmem"};
  for (const char* part : kParts) {
    if (std::strstr(name, part) != nullptr) return true;
  }
  return false;
}

// Or has none: then it is no function that the driver could describe either.
bool has_such_a_name(const DriverCalls& driver, FunctionHandle function) {
  const char* name = nullptr;
  if (driver.function_name == nullptr) return false;
  if (driver.function_name(&name, function) != kSuccess || name == nullptr) return true;
  return reads_pointers_from_memory(name);
}

}  // namespace

ParameterLayouts& launch_layouts() noexcept { return the_layouts; }
TensorMaps& tensor_maps() noexcept { return the_maps; }

void TensorMaps::made(const void* map, const void* address) noexcept {
  const std::uint64_t wanted = reinterpret_cast<std::uintptr_t>(address);
  if (map == nullptr || !stable_blocks().may_hold(wanted)) return;
  bool seen = false;
  each_word(map, kBytes, [&](std::uint64_t word) { seen = seen || word == wanted; });
  if (!seen) hidden_.store(true, std::memory_order_relaxed);
}

const ParameterLayouts::Layout* ParameterLayouts::learn(FunctionHandle function) noexcept {
  const std::uint64_t generation = generation_.load(std::memory_order_relaxed);
  const DriverCalls* driver = driver_calls();
  std::array<Parameter, kMostParameters> parameters;
  std::size_t count = 0;
  bool opaque = driver == nullptr || driver->parameter_info == nullptr;
  for (; !opaque && count < kMostParameters; ++count) {
    std::size_t offset = 0, bytes = 0;
    const CallResult result = driver->parameter_info(function, count, &offset, &bytes);
    // One past the last is an invalid value; any other answer is about the function.
    if (result == kInvalidValue) break;
    opaque = result != kSuccess;
    parameters[count] = {static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(bytes)};
  }
  if (opaque || count == kMostParameters || has_such_a_name(*driver, function)) count = 0, opaque = true;
  Layout* layout = make_layout({parameters.data(), count});
  if (layout == nullptr) return nullptr;
  layout->function = function;
  layout->generation = generation;
  layout->opaque = opaque;
  for (const Parameter& each : layout->all()) layout->wide = layout->wide || each.bytes >= TensorMaps::kBytes;
  // A place of an older generation is taken over; its layout stays where a reader may still look.
  std::size_t at = home_of(function);
  for (std::size_t probes = 0; probes < kMostProbes; ++probes, at = (at + 1) & (kSlots - 1)) {
    const Layout* there = slots_[at].load(std::memory_order_acquire);
    if (there != nullptr && there->generation == generation) {
      if (there->function == function) break;  // another thread was first
      continue;
    }
    if (slots_[at].compare_exchange_strong(there, layout, std::memory_order_acq_rel)) return layout;
    if (there->function == function && there->generation == generation) break;
  }
  const Layout* found = slots_[at].load(std::memory_order_acquire);
  ::operator delete(layout);
  return found != nullptr && found->function == function && found->generation == generation ? found : nullptr;
}

void see_launch(const Launch& launch) noexcept {
  const StreamPools& pools = stream_pools();
  if (!pools.any()) return;
  std::uint64_t blocks = 0;
  const StreamPools::Span span = pools.span();
  const Readable readable = each_parameter_word(launch, the_layouts, [&](std::uint64_t word) {
    if (span.may_hold(word)) blocks += pools.find(word).has_value() ? 1 : 0;
  });
  if (readable == Readable::kYes) {
    metrics().add<Metric::kLaunches>(1);
    metrics().add<Metric::kLaunchBlocks>(blocks);
  } else {
    metrics().add<Metric::kOpaqueLaunches>(1);
  }
}

}  // namespace terrace::hooks::cuda
