// Traces on an allocator that another system brings.
#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <unordered_map>

#include "allocator/replay/allocator_plugin.h"
#include "allocator/replay/replayed_allocator.hpp"

namespace terrace {
namespace {

using Plugin = struct ::terrace_allocator_plugin;

class PluginReplay final : public ReplayedAllocator {
 public:
  PluginReplay(const Plugin& plugin, void* self) : plugin_(plugin), self_(self), name_(plugin.name) {}
  ~PluginReplay() override {
    for (const auto& [id, held] : blocks_) plugin_.release(self_, held.address, held.size, held.stream);
    plugin_.close(self_);
  }
  PluginReplay(const PluginReplay&) = delete;
  PluginReplay& operator=(const PluginReplay&) = delete;

  const std::string& name() const override { return name_; }
  Status prepare(ReplayStream stream) override {
    Made& made = streams_.at(stream.number);
    if (!made.made) made = {true, plugin_.new_stream(self_)};
    return {};
  }

  Status allocate(ReplayStream stream, const ReplayBlock& block, Pool) override {
    void* const on = streams_.at(stream.number).stream;
    void* const address = plugin_.allocate(self_, block.size.count(), on);
    if (address == nullptr && block.size > 0_B) {
      return Error{.code = Errc::kOutOfMemory,
                   .text = name_ + ": no " + format_bytes(block.size) + " left",
                   .bytes = block.size};
    }
    blocks_.emplace(block.id, Held{address, block.size.count(), on});
    return {};
  }

  Status free(ReplayStream stream, const ReplayBlock& block) override {
    const auto held = blocks_.find(block.id);
    plugin_.release(self_, held->second.address, held->second.size, streams_.at(stream.number).stream);
    blocks_.erase(held);
    return {};
  }

  Bytes reserved() const override { return Bytes(plugin_.reserved(self_)); }

 private:
  struct Made {
    bool made = false;
    void* stream = nullptr;
  };
  struct Held {
    void* address;
    std::size_t size;
    void* stream;
  };
  const Plugin& plugin_;
  void* const self_;
  const std::string name_;
  std::array<Made, kMostReplayStreams> streams_{};
  std::unordered_map<std::uint64_t, Held> blocks_;
};

bool complete(const Plugin& plugin) {
  return plugin.name != nullptr && plugin.open != nullptr && plugin.close != nullptr &&
         plugin.new_stream != nullptr && plugin.allocate != nullptr && plugin.release != nullptr &&
         plugin.reserved != nullptr;
}

}  // namespace

// The library stays loaded: what it brings may leave threads behind.
Result<std::unique_ptr<ReplayedAllocator>> replay_on_plugin(const std::string& file, int device_number,
                                                            Bytes budget) {
  const auto refuse = [&](Errc code, const std::string& why) {
    return Error{.code = code, .text = file + ": " + why};
  };
  std::error_code failed;
  const std::filesystem::path path = std::filesystem::absolute(file, failed);
  if (failed || !std::filesystem::exists(path, failed)) return refuse(Errc::kNotFound, "no such file");
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return refuse(Errc::kNotFound, std::string("cannot be loaded: ") + dlerror());
  using Entry = const Plugin* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "terrace_allocator_plugin"));
  if (entry == nullptr) {
    return refuse(Errc::kNotFound,
                  "no terrace_allocator_plugin() in it; see allocator/replay/allocator_plugin.h");
  }
  const Plugin* const plugin = entry();
  if (plugin == nullptr || plugin->abi != TERRACE_ALLOCATOR_PLUGIN_ABI) {
    return refuse(Errc::kNotSupported,
                  "the plugin is of ABI " + std::to_string(plugin == nullptr ? 0 : plugin->abi) +
                      "; this program takes " + std::to_string(TERRACE_ALLOCATOR_PLUGIN_ABI));
  }
  if (!complete(*plugin)) return refuse(Errc::kNotSupported, "the plugin leaves functions out");
  std::array<char, 512> why{};
  void* const self = plugin->open(device_number, budget.count(), why.data(), why.size());
  why.back() = '\0';
  if (self == nullptr) return refuse(Errc::kOutOfMemory, why.data());
  return std::unique_ptr<ReplayedAllocator>(std::make_unique<PluginReplay>(*plugin, self));
}

}  // namespace terrace
