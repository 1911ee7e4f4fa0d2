#include "hooks/intercept/cuda/launch_view.hpp"

#include <new>
#include <string>

#include "hooks/intercept/cuda/driver_calls.hpp"
#include "hooks/intercept/cuda/stable_blocks.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"
#include "hooks/intercept/notice.hpp"
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

// The driver's words for one of the handles by which a kernel is known: a function of a context, or a kernel
// of a library, which a launch takes as well and the calls about functions refuse.
struct Form {
  FunctionHandle handle;
  decltype(DriverCalls::parameter_info) parameter_info;
  decltype(DriverCalls::function_name) name;
  const char* parameter_call;
  const char* name_call;
};

struct Description {
  std::array<Parameter, ParameterLayouts::kMostParameters> parameters;
  std::size_t count = 0;
  const char* name = "";
  std::string refusals{};  // what the driver answered where it did not tell

  void refused(const char* call, CallResult result) {
    refusals += (refusals.empty() ? "" : ", ") + std::string(call) + " said " + std::to_string(result);
  }
};

// True: the driver told all of it.
bool describe(const Form& form, Description& out) {
  if (form.parameter_info == nullptr) {
    out.refusals +=
        (out.refusals.empty() ? "" : ", ") + ("the driver has no " + std::string(form.parameter_call));
    return false;
  }
  std::size_t count = 0;
  for (; count < out.parameters.size(); ++count) {
    std::size_t offset = 0, bytes = 0;
    const CallResult result = form.parameter_info(form.handle, count, &offset, &bytes);
    // One past the last is an invalid value; any other answer is about the handle.
    if (result == kInvalidValue) break;
    if (result != kSuccess) return out.refused(form.parameter_call, result), false;
    out.parameters[count] = {static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(bytes)};
  }
  if (count == out.parameters.size()) {
    out.refusals = "it has more parameters than are looked at";
    return false;
  }
  const char* name = nullptr;
  const CallResult named = form.name == nullptr ? kSuccess : form.name(&name, form.handle);
  if (named != kSuccess || (form.name != nullptr && name == nullptr))
    return out.refused(form.name_call, named), false;
  out.count = count;
  out.name = name == nullptr ? "" : name;
  return true;
}

// The form of a function first. One that has no parameters there is asked about as a kernel too: the answer
// for a handle of the other kind could look the same.
bool describe(const DriverCalls& driver, FunctionHandle handle, Description& out) {
  const auto as_function = [&](FunctionHandle function) {
    return Form{function, driver.parameter_info, driver.function_name, "cuFuncGetParamInfo", "cuFuncGetName"};
  };
  const bool is_function = describe(as_function(handle), out);
  if (is_function && out.count > 0) return true;
  const Form kernel{handle, driver.kernel_parameter_info, driver.kernel_name, "cuKernelGetParamInfo",
                    "cuKernelGetName"};
  if (describe(kernel, out) || is_function) return true;
  FunctionHandle function = nullptr;
  if (driver.kernel_function == nullptr) return false;
  const RelaxedCapture relaxed(driver);
  const CallResult found = driver.kernel_function(&function, handle);
  if (found != kSuccess) return out.refused("cuKernelGetFunction", found), false;
  return describe(as_function(function), out);
}

// For what could not be described: whichever call tells.
const char* name_of(const DriverCalls& driver, FunctionHandle handle) {
  const char* name = nullptr;
  for (const auto call : {driver.function_name, driver.kernel_name}) {
    if (call != nullptr && call(&name, handle) == kSuccess && name != nullptr) return name;
  }
  return "";
}

// Lives as long as the process.
const char* kept(std::string text) {
  static constexpr std::size_t kMost = 240;  // names of templates are long
  if (text.size() > kMost) text.replace(kMost, text.npos, "...");
  auto* copy = static_cast<char*>(::operator new(text.size() + 1, std::nothrow));
  return copy == nullptr ? "" : static_cast<const char*>(std::memcpy(copy, text.c_str(), text.size() + 1));
}

constinit std::atomic<bool> opaque_noted{false};
constinit std::atomic<const char*> opaque_text{""};

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

void note_opaque(FunctionHandle function, const char* why) noexcept {
  if (opaque_noted.load(std::memory_order_relaxed) || opaque_noted.exchange(true)) return;
  try {
    const ParameterLayouts::Layout* layout = the_layouts.of(function);
    const bool named = layout != nullptr && *layout->name != '\0';
    const std::string name = named ? '"' + std::string(layout->name) + '"' : "a kernel";
    if (*why == '\0') why = layout == nullptr ? "there are too many functions" : layout->why;
    opaque_text.store(kept(name + ", " + why), std::memory_order_release);
    say_once(Notice::kOpaque, "launches of " + name + " hold everything: " + why);
  } catch (...) {
  }
}
std::string_view first_opaque() noexcept { return opaque_text.load(std::memory_order_acquire); }

ParameterLayouts::Layout* ParameterLayouts::ask(FunctionHandle function) noexcept try {
  const DriverCalls* driver = driver_calls();
  Description description;
  const bool told = driver != nullptr && describe(*driver, function, description);
  const bool by_name = told && reads_pointers_from_memory(description.name);
  if (!told || by_name) description.count = 0;
  Layout* layout = make_layout({description.parameters.data(), description.count});
  if (layout == nullptr) return nullptr;
  layout->opaque = !told || by_name;
  layout->name = kept(told || driver == nullptr ? description.name : name_of(*driver, function));
  if (by_name) layout->why = "by its name it takes pointers from device memory";
  if (!told) layout->why = kept(description.refusals);
  return layout;
} catch (...) {
  return nullptr;
}

const ParameterLayouts::Layout* ParameterLayouts::learn(FunctionHandle function) noexcept {
  const std::uint64_t generation = generation_.load(std::memory_order_relaxed);
  Layout* layout = ask(function);
  if (layout == nullptr) return nullptr;
  layout->function = function;
  layout->generation = generation;
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
