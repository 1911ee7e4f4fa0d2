#include "bench/allocator_systems.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "allocator/hbm_pool.hpp"

namespace terrace::bench {
namespace {

// A device of its own for each system: none finds what another left behind.
Result<std::unique_ptr<Device>> open_device_for(int device, std::size_t budget) {
  if (device == kHostMemory) return open_emulated_device({.capacity = Bytes(budget)});
  return open_cuda_device(DeviceId{device});
}

// Streams are numbers, and the table has pointers: number n travels as n + 1, so that none is null.
void* pointer_of(Stream stream) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream.id) + 1);
}
Stream stream_of(void* pointer) {
  return Stream{static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(pointer) - 1)};
}

class TerracePool {
 public:
  static std::unique_ptr<TerracePool> open(int device, std::size_t budget, std::string& why) {
    auto opened = std::make_unique<TerracePool>();
    auto own = open_device_for(device, budget);
    if (own) {
      opened->device_ = std::move(own).value();
      auto pool = HbmPool::create(*opened->device_, {.budget = Bytes(budget)});
      if (pool) {
        opened->pool_ = std::move(pool).value();
        return opened;
      }
      why = pool.error().text;
    } else {
      why = own.error().text;
    }
    return nullptr;
  }
  TerracePool() = default;
  TerracePool(const TerracePool&) = delete;
  TerracePool& operator=(const TerracePool&) = delete;
  ~TerracePool() {
    pool_.reset();  // while the streams exist
    for (Stream stream : streams_) device_->destroy_stream(stream);
  }

  void* new_stream() {
    if (!device_->bind_thread()) return nullptr;  // as the peers' libraries do for the threads that use them
    const auto made = device_->create_stream(StreamPriority::kNormal);
    if (!made) return nullptr;
    const std::lock_guard lock(mutex_);
    streams_.push_back(*made);
    return pointer_of(*made);
  }
  void* allocate(std::size_t bytes, void* stream) {
    const auto block = pool_->allocate(stream_of(stream), Bytes(bytes), Pool::kActivation);
    return block ? block->address : nullptr;
  }
  void release(void* address, std::size_t bytes, void* stream) {
    const Block block{
        .address = static_cast<Address>(address), .size = Bytes(bytes), .pool = Pool::kActivation};
    (void)pool_->free(stream_of(stream), block);
  }
  std::size_t reserved() { return pool_->usage().mapped.count(); }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<HbmPool> pool_;
  std::mutex mutex_;
  std::vector<Stream> streams_;
};

class EmulatedBaseline {
 public:
  static std::unique_ptr<EmulatedBaseline> open(int device, std::size_t budget, std::string& why) {
    if (device != kHostMemory) {
      why = "it is the emulated device's";
      return nullptr;
    }
    auto opened = open_device_for(device, budget);
    if (opened) return std::make_unique<EmulatedBaseline>(std::move(opened).value());
    why = opened.error().text;
    return nullptr;
  }
  explicit EmulatedBaseline(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  void* new_stream() { return nullptr; }  // every call is done when it returns
  void* allocate(std::size_t bytes, void* /*stream*/) {
    const Bytes size = span_of(bytes);
    const auto physical = device_->create_physical(size);
    if (!physical) return nullptr;
    const auto address = device_->reserve(size);
    if (address) {
      if (device_->map(*address, *physical, size)) {
        const std::lock_guard lock(mutex_);
        physical_.emplace(*address, *physical);
        return *address;
      }
      device_->release(*address, size);
    }
    device_->destroy_physical(*physical);
    return nullptr;
  }
  void release(void* address, std::size_t bytes, void* /*stream*/) {
    auto* at = static_cast<Address>(address);
    const Bytes size = span_of(bytes);
    if (!device_->unmap(at, size)) return;
    std::unique_lock lock(mutex_);
    const auto physical = physical_.extract(at);
    lock.unlock();
    device_->destroy_physical(physical.mapped());
    device_->release(at, size);
  }
  std::size_t reserved() {
    const auto memory = device_->memory();
    return memory ? (memory->total - memory->free).count() : 0;
  }

 private:
  [[nodiscard]] Bytes span_of(std::size_t bytes) const {
    return round_up(Bytes(bytes), device_->info().granularity);
  }

  std::unique_ptr<Device> device_;
  std::mutex mutex_;
  std::unordered_map<Address, Physical> physical_;
};

}  // namespace

Result<System> System::open(const AllocatorPlugin& table, int device, Bytes budget) {
  char why[512] = "";
  void* self = table.open(device, budget.count(), why, sizeof why);
  if (self == nullptr) return Error{Errc::kNotSupported, std::string(table.name) + ": " + why, {}, {}};
  return System(table, self);
}

Result<System> System::load(const std::filesystem::path& file, int device, Bytes budget) {
  // Local: a peer may define malloc, and the program keeps its own.
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Error{Errc::kIo, std::string("cannot load a peer: ") + dlerror(), {}, {}};
  const auto entry =
      reinterpret_cast<decltype(&terrace_allocator_plugin)>(dlsym(library, "terrace_allocator_plugin"));
  const AllocatorPlugin* table = entry != nullptr ? entry() : nullptr;
  if (table == nullptr) {
    return Error{Errc::kInvalidArgument, file.string() + " exports no terrace_allocator_plugin()", {}, {}};
  }
  if (table->abi != TERRACE_ALLOCATOR_PLUGIN_ABI) {
    const std::string has = std::to_string(table->abi);
    const std::string wanted = std::to_string(TERRACE_ALLOCATOR_PLUGIN_ABI);
    return Error{Errc::kInvalidArgument,
                 file.string() + " is built for version " + has + " of the plugin interface, not " + wanted +
                     ": build it again",
                 {},
                 {}};
  }
  return open(*table, device, budget);
}

const AllocatorPlugin& terrace_table() {
  static constexpr AllocatorPlugin kTable = table_for<TerracePool>("terrace");
  return kTable;
}

const AllocatorPlugin& emulated_table() {
  static constexpr AllocatorPlugin kTable = table_for<EmulatedBaseline>("emulated");
  return kTable;
}

}  // namespace terrace::bench
