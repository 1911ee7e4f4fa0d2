// The memory of the emulated device: physical memory and where it is mapped, and pinned host memory.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "runtime/device_fault.hpp"
#include "runtime/emulated/emulated_device.hpp"

namespace terrace {

using emulated::PhysicalMemory;

namespace {

Error invalid(std::string text, Bytes size = {}) {
  return {.code = Errc::kInvalidArgument, .text = "emulated device: " + std::move(text), .bytes = size};
}

// Address space that faults when touched.
constexpr int kGap = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

Bytes sum_of(const std::map<Address, Bytes>& ranges) {
  Bytes sum;
  for (const auto& [address, size] : ranges) sum += size;
  return sum;
}

}  // namespace

Bytes EmulatedDevice::reserved_bytes() const {
  const std::lock_guard lock(memory_mutex_);
  return sum_of(reservations_);
}

Bytes EmulatedDevice::mapped_bytes() const {
  const std::lock_guard lock(memory_mutex_);
  Bytes sum;
  for (const auto& [address, mapping] : mappings_) sum += mapping.size;
  return sum;
}

Bytes EmulatedDevice::pinned_bytes() const {
  const std::lock_guard lock(memory_mutex_);
  return sum_of(pinned_);
}

Status EmulatedDevice::check_size(const char* call, Bytes size) const {
  if (size > 0_B && size.count() % info_.granularity.count() == 0) return {};
  return invalid(std::string(call) + " of " + format_bytes(size) + ": sizes are multiples of " +
                     format_bytes(info_.granularity),
                 size);
}

bool EmulatedDevice::reserved(Address at, Bytes size) const {
  auto range = reservations_.upper_bound(at);
  if (range == reservations_.begin()) return false;
  --range;
  return at + size.count() <= range->first + range->second.count();
}

bool EmulatedDevice::maps_whole(Address at, Bytes size) const {
  const Address end = at + size.count();
  Address next = at;
  for (auto mapping = mappings_.find(at); next < end; ++mapping) {
    if (mapping == mappings_.end() || mapping->first != next) return false;
    next += mapping->second.size.count();
  }
  return next == end;
}

Result<Address> EmulatedDevice::reserve(Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceReserve, size)) return *std::move(fault);
  if (Status checked = check_size("reserve", size); !checked.ok()) return checked.error();
  // Reserved with room to align the start to the granularity, as the driver does; the ends are given back.
  const std::uint64_t granularity = info_.granularity.count();
  const std::uint64_t padded = size.count() + granularity;
  void* space = padded < size.count() ? MAP_FAILED : mmap(nullptr, padded, PROT_NONE, kGap, -1, 0);
  if (space == MAP_FAILED) {
    return Error{
        .code = Errc::kOutOfMemory,
        .text = "emulated device: no address space of " + format_bytes(size) + ": " + std::strerror(errno),
        .bytes = size};
  }
  const auto start = reinterpret_cast<std::uintptr_t>(space);
  const std::uintptr_t aligned = (start + granularity - 1) & ~(granularity - 1);
  const std::uint64_t before = aligned - start;
  if (before > 0) munmap(space, before);
  const auto address = reinterpret_cast<Address>(aligned);
  munmap(address + size.count(), granularity - before);
  const std::lock_guard lock(memory_mutex_);
  reservations_.emplace(address, size);
  return address;
}

void EmulatedDevice::release(Address address, Bytes size) {
  const std::lock_guard lock(memory_mutex_);
  const auto range = reservations_.find(address);
  TERRACE_CHECK(range != reservations_.end() && range->second == size, "release takes what reserve gave");
  const auto mapping = mappings_.lower_bound(address);
  TERRACE_CHECK(mapping == mappings_.end() || mapping->first >= address + size.count(),
                "a range is unmapped before it is released");
  munmap(address, size.count());
  reservations_.erase(range);
}

Result<Physical> EmulatedDevice::create_from(PhysicalMemory& memory, Bytes size) {
  const Result<PhysicalMemory::Range> range = memory.allocate(size);
  if (!range.ok()) return range.error();
  const std::lock_guard lock(memory_mutex_);
  const Physical physical{.id = ++last_physical_};
  physical_.emplace(physical, PhysicalState{.memory = &memory, .range = *range});
  return physical;
}

Result<Physical> EmulatedDevice::create_physical(Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreatePhysical, size)) return *std::move(fault);
  if (Status checked = check_size("create_physical", size); !checked.ok()) return checked.error();
  return create_from(*memory_, size);
}

Result<Physical> EmulatedDevice::create_host_physical(Bytes size, int numa_node) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreatePhysical, size)) return *std::move(fault);
  if (Status checked = check_size("create_host_physical", size); !checked.ok()) return checked.error();
  if (numa_node < 0 || numa_node >= numa_nodes_) {
    return Error{.code = Errc::kNotSupported,
                 .text = "emulated device: no host memory on NUMA node " + std::to_string(numa_node) +
                         "; it has the nodes 0 to " + std::to_string(numa_nodes_ - 1),
                 .bytes = size};
  }
  return create_from(*host_memory_, size);
}

void EmulatedDevice::destroy_physical(Physical physical) {
  PhysicalMemory::Range range;
  PhysicalMemory* memory = nullptr;
  {
    const std::lock_guard lock(memory_mutex_);
    const auto state = physical_.find(physical);
    TERRACE_CHECK(state != physical_.end(), "physical memory is destroyed once");
    TERRACE_CHECK(state->second.mappings == 0, "physical memory is unmapped before it is destroyed");
    range = state->second.range;
    memory = state->second.memory;
    physical_.erase(state);
  }
  memory->free(range);
}

Status EmulatedDevice::map(Address at, Physical physical, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceMap, size)) return *std::move(fault);
  if (Status checked = check_size("map", size); !checked.ok()) return checked;
  const std::lock_guard lock(memory_mutex_);
  return map_locked(at, physical, size);
}

Status EmulatedDevice::map_all(Address at, std::span<const PhysicalPiece> pieces) {
  if (auto fault = device_fault(FaultPoint::kDeviceMap, whole_size(pieces))) return *std::move(fault);
  const std::lock_guard lock(memory_mutex_);
  Bytes done;
  for (const PhysicalPiece& piece : pieces) {
    Status mapped = check_size("map_all", piece.size);
    if (mapped.ok()) mapped = map_locked(at + done.count(), piece.physical, piece.size);
    if (!mapped.ok()) {
      if (done > 0_B) (void)unmap_locked(at, done);
      return mapped;
    }
    done += piece.size;
  }
  return {};
}

Status EmulatedDevice::map_locked(Address at, Physical physical, Bytes size) {
  const auto state = physical_.find(physical);
  if (state == physical_.end()) return invalid("map: no such physical memory", size);
  const PhysicalMemory::Range range = state->second.range;
  if (range.size != size) {
    return invalid("map of " + format_bytes(size) + ": physical memory is mapped whole, here " +
                       format_bytes(range.size),
                   size);
  }
  if (!reserved(at, size) || reinterpret_cast<std::uintptr_t>(at) % info_.granularity.count() != 0) {
    return invalid("map: the range is not reserved, or starts between two granules", size);
  }
  const auto after = mappings_.lower_bound(at);
  const bool overlaps_next = after != mappings_.end() && after->first < at + size.count();
  const bool overlaps_last =
      after != mappings_.begin() && std::prev(after)->first + std::prev(after)->second.size.count() > at;
  if (overlaps_next || overlaps_last) return invalid("map: part of the range is mapped already", size);
  void* mapped = mmap(at, size.count(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                      state->second.memory->file(), static_cast<off_t>(range.offset));
  if (mapped == MAP_FAILED) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "emulated device: map of " + format_bytes(size) + ": " + std::strerror(errno),
                 .bytes = size};
  }
  mappings_.emplace(at, Mapping{.size = size, .physical = physical});
  ++state->second.mappings;
  return {};
}

Status EmulatedDevice::unmap(Address at, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceUnmap, size)) return *std::move(fault);
  if (Status checked = check_size("unmap", size); !checked.ok()) return checked;
  const std::lock_guard lock(memory_mutex_);
  return unmap_locked(at, size);
}

Status EmulatedDevice::unmap_locked(Address at, Bytes size) {
  if (!maps_whole(at, size)) return invalid("unmap: the range is not one of whole mappings", size);
  if (mmap(at, size.count(), PROT_NONE, kGap | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "emulated device: unmap of " + format_bytes(size) + ": " + std::strerror(errno),
                 .bytes = size};
  }
  const auto first = mappings_.find(at);
  const auto last = mappings_.lower_bound(at + size.count());
  for (auto mapping = first; mapping != last; ++mapping) --physical_.at(mapping->second.physical).mappings;
  mappings_.erase(first, last);
  return {};
}

Status EmulatedDevice::grant_access_to(const Device& peer) {
  if (peer.info().kind == info_.kind) return {};
  return Error{.code = Errc::kNotSupported,
               .text = "an emulated device and a " + peer.info().kind + " one reach no common memory"};
}

Result<MemoryInfo> EmulatedDevice::memory() const {
  return MemoryInfo{.free = memory_->capacity() - memory_->live(), .total = memory_->capacity()};
}

Status EmulatedDevice::pin(Address host, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDevicePin, size)) return *std::move(fault);
  if (host == nullptr || size == 0_B) return invalid("pin of nothing", size);
  const std::lock_guard lock(memory_mutex_);
  const auto after = pinned_.lower_bound(host);
  const bool overlaps_next = after != pinned_.end() && after->first < host + size.count();
  const bool overlaps_last =
      after != pinned_.begin() && std::prev(after)->first + std::prev(after)->second.count() > host;
  if (overlaps_next || overlaps_last) return invalid("pin: part of the range is pinned already", size);
  pinned_.emplace(host, size);
  return {};
}

void EmulatedDevice::unpin(Address host, Bytes size) {
  const std::lock_guard lock(memory_mutex_);
  const auto range = pinned_.find(host);
  TERRACE_CHECK(range != pinned_.end() && range->second == size, "unpin takes what was pinned");
  pinned_.erase(range);
}

}  // namespace terrace
